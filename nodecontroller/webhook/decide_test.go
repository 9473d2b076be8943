package webhook

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// fact is a claim as a cache has it.
func fact(class *string, size string, change ...func(*claimFact)) claimFact {
	pvc := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: class}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}}
	if size != "" {
		pvc.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	}
	f := claimFact{claim: pvc}
	for _, c := range change {
		c(&f)
	}
	return f
}

func live(f *claimFact) { f.live = true }

func inPhase(p corev1.PersistentVolumeClaimPhase) func(*claimFact) {
	return func(f *claimFact) { f.claim.Status.Phase = p }
}

func byAnnotation(class string) func(*claimFact) {
	return func(f *claimFact) {
		f.claim.Annotations = map[string]string{"volume.beta.kubernetes.io/storage-class": class}
	}
}

// rawPodWith is a pod with a volume for each claim, and templates as they are given.
func rawPodWith(claims []string, templates ...string) string {
	var volumes []string
	for _, c := range claims {
		volumes = append(volumes, fmt.Sprintf(`{"persistentVolumeClaim":{"claimName":%q}}`, c))
	}
	for _, t := range templates {
		volumes = append(volumes, fmt.Sprintf(`{"ephemeral":{"volumeClaimTemplate":{"spec":%s}}}`, t))
	}
	return `{"metadata":{},"spec":{"containers":[{}],"volumes":[` + strings.Join(volumes, ",") + `]}}`
}

func TestDecidePod(t *testing.T) {
	ours, theirs, bad := ptr.To("ours"), ptr.To("theirs"), ptr.To("bad")
	known := classes{device: map[string]string{"ours": "dc1", "second": "dc2", "bad": "a/b"}, others: map[string]bool{"theirs": true}}
	withDefault := known
	withDefault.standard = ours
	for name, c := range map[string]struct {
		claims    map[string]claimFact
		templates []string
		classes   *classes
		pod       string // instead of one with all claims
		want      string // the sums, or the reason with what is read
	}{
		"a cached claim is confirmed first":                {claims: map[string]claimFact{"a": fact(ours, "1Gi")}, want: "CachedClaims [a]"},
		"a confirmed claim counts":                         {claims: map[string]claimFact{"a": fact(ours, "1Gi", live)}, want: "dc1=1073741824"},
		"an unknown claim is asked for":                    {claims: map[string]claimFact{"a": {}, "b": fact(ours, "1", live)}, want: "UnknownClaims [a]"},
		"a claim that is not there does not count":         {claims: map[string]claimFact{"a": {live: true}, "b": fact(ours, "1", live)}, want: "dc1=1"},
		"a bound claim wins over an unknown one":           {claims: map[string]claimFact{"a": {}, "b": fact(ours, "1", inPhase(corev1.ClaimBound))}, want: "Bound"},
		"a lost claim is bound":                            {claims: map[string]claimFact{"a": fact(ours, "1", inPhase(corev1.ClaimLost))}, want: "Bound"},
		"a bound claim of another driver does not matter":  {claims: map[string]claimFact{"a": fact(theirs, "1", inPhase(corev1.ClaimBound)), "b": fact(ours, "1", live)}, want: "dc1=1"},
		"no class, no default":                             {claims: map[string]claimFact{"a": fact(nil, "1")}, want: "NoVolumes"},
		"no class, the default is ours":                    {claims: map[string]claimFact{"a": fact(nil, "5", live)}, classes: &withDefault, want: "dc1=5"},
		"the empty class is none, whatever the default":    {claims: map[string]claimFact{"a": fact(ptr.To(""), "1")}, classes: &withDefault, want: "NoVolumes"},
		"the annotation wins over the field":               {claims: map[string]claimFact{"a": fact(theirs, "5", live, byAnnotation("ours"))}, want: "dc1=5"},
		"an empty annotation is no class":                  {claims: map[string]claimFact{"a": fact(ours, "5", live, byAnnotation(""))}, want: "NoVolumes"},
		"an unknown class is asked for":                    {claims: map[string]claimFact{"a": fact(ptr.To("new"), "1")}, templates: []string{`{"storageClassName":"newer"}`, `{"storageClassName":"newer"}`}, want: "UnknownClasses [new newer]"},
		"what cannot be a class is not asked for":          {claims: map[string]claimFact{"a": fact(ptr.To("../x"), "1")}, templates: []string{`{"storageClassName":"A"}`}, want: "NoVolumes"},
		"the class of a bound claim matters to a sum only": {claims: map[string]claimFact{"a": fact(ptr.To("new"), "1", inPhase(corev1.ClaimBound))}, want: "NoVolumes"},
		"the class of a bound claim matters to a sum":      {claims: map[string]claimFact{"a": fact(ptr.To("new"), "1", inPhase(corev1.ClaimBound)), "b": fact(ours, "1")}, want: "UnknownClasses [new]"},
		"no size":                        {claims: map[string]claimFact{"a": fact(ours, "", live)}, want: "dc1=1073741824"},
		"no whole byte":                  {claims: map[string]claimFact{"a": fact(ours, "1500m", live)}, want: "dc1=2"},
		"too large":                      {claims: map[string]claimFact{"a": fact(ours, "100E", live)}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"too large in two powers":        {claims: map[string]claimFact{"a": fact(ours, "9999Ei", live), "b": fact(ours, "1", live)}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"sums that are too large":        {claims: map[string]claimFact{"a": fact(ours, "9223372036854775807", live), "b": fact(ours, "9223372036854775807", live)}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"a device class that is no name": {claims: map[string]claimFact{"a": fact(bad, "1"), "b": fact(ours, "1")}, want: "InvalidDeviceClass"},
		"a template":                     {templates: []string{`{"storageClassName":"second","resources":{"requests":{"storage":"3"}}}`}, want: "dc2=3"},
		"a template without class":       {templates: []string{`{}`}, want: "NoVolumes"},
		"a template without class, the default is ours":     {templates: []string{`{}`}, classes: &withDefault, want: "dc1=1073741824"},
		"a template with the empty class":                   {templates: []string{`{"storageClassName":""}`}, classes: &withDefault, want: "NoVolumes"},
		"templates are confirmed by nobody":                 {claims: map[string]claimFact{"a": {live: true}}, templates: []string{`{"storageClassName":"ours"}`}, want: "dc1=1073741824"},
		"a negative size":                                   {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"-5"}}}`}, want: "dc1=1073741824"},
		"a size of another driver is not read":              {templates: []string{`{"storageClassName":"theirs","resources":{"requests":{"storage":"x"}}}`}, want: "NoVolumes"},
		"no size at all":                                    {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"x"}}}`}, want: "error"},
		"a size that takes for ever to multiply out":        {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"1e999999999"}}}`}, want: "error"},
		"a size that takes for ever to divide":              {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":1e-99999999}}}`}, want: "error"},
		"a size with a thousand digits":                     {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"` + strings.Repeat("9", 1000) + `"}}}`}, want: "error"},
		"a size with a small exponent":                      {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"1e3"}}}`}, want: "dc1=1000"},
		"an exponent beyond all that fits":                  {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"1e99"}}}`}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"no containers":                                     {claims: map[string]claimFact{"a": fact(ours, "1", live)}, pod: `{"spec":{"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "NoContainers"},
		"a container that is null":                          {claims: map[string]claimFact{"a": fact(ours, "1", live)}, pod: `{"spec":{"containers":[null],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "NoContainers"},
		"what cannot be a name is not asked for":            {pod: rawPodWith([]string{"../x", "", "a/b", "A"}), want: "NoVolumes"},
		"empty volumes":                                     {pod: `{"spec":{"containers":[{}],"volumes":[null,{},{"ephemeral":null},{"ephemeral":{}},{"ephemeral":{"volumeClaimTemplate":null}},{"persistentVolumeClaim":null}]}}`, want: "NoVolumes"},
		"one claim in two volumes":                          {claims: map[string]claimFact{"a": fact(ours, "2", live)}, pod: rawPodWith([]string{"a", "a"}), want: "dc1=2"},
		"a pod that is right already is not confirmed":      {claims: map[string]claimFact{"a": fact(ours, "2")}, pod: `{"metadata":{"annotations":{"capacity.topolvm.io/dc1":"2"}},"spec":{"containers":[{"resources":{"limits":{"topolvm.io/capacity":"1"},"requests":{"topolvm.io/capacity":"1"}}}],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "Described"},
		"a pod of which only the sum is wrong is corrected": {claims: map[string]claimFact{"a": fact(ours, "3", live)}, pod: `{"metadata":{"annotations":{"capacity.topolvm.io/dc1":"2"}},"spec":{"containers":[{"resources":{"limits":{"topolvm.io/capacity":"1"},"requests":{"topolvm.io/capacity":"1"}}}],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "dc1=3"},
	} {
		t.Run(name, func(t *testing.T) {
			facts := podFacts{claims: c.claims, classes: known}
			if c.classes != nil {
				facts.classes = *c.classes
			}
			raw := c.pod
			if raw == "" {
				var names []string
				for name := range c.claims {
					names = append(names, name)
				}
				slices.Sort(names)
				raw = rawPodWith(names, c.templates...)
			}
			if got := decision(t, testConfig("d"), raw, facts); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// decision is what becomes of a pod as one line.
func decision(t *testing.T, cfg Config, raw string, facts podFacts) string {
	t.Helper()
	pod := &rawPod{}
	if err := decode([]byte(raw), pod); err != nil {
		t.Fatal(err)
	}
	v, err := cfg.decidePod(pod, facts)
	switch {
	case err != nil:
		return "error"
	case len(v.read)+len(v.readClasses) > 0:
		if v.patch != nil {
			t.Errorf("it reads and patches: %v", v)
		}
		return fmt.Sprint(v.reason, " ", append(slices.Clone(v.read), v.readClasses...))
	case v.patch == nil:
		if (len(v.warnings) > 0) != (v.reason == "InvalidDeviceClass") {
			t.Errorf("%s with warnings %q", v.reason, v.warnings)
		}
		return v.reason
	}
	patch, err := encode(v.patch)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		Metadata struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal(apply(t, []byte(raw), patch), &out); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(strings.TrimPrefix(fmt.Sprint(strings.ReplaceAll(strings.ReplaceAll(fmt.Sprint(out.Metadata.Annotations), "capacity.topolvm.io/", ""), ":", "=")), "map["), "]")
}

func TestForeignCapacity(t *testing.T) {
	cfg := testConfig("d")
	cfg.StripForeignCapacity = true
	facts := podFacts{claims: map[string]claimFact{"a": fact(ptr.To("ours"), "2", live)}, classes: classes{device: map[string]string{"ours": "dc1"}}}
	const annotations = `"metadata":{"annotations":{"capacity.topolvm.io/dc1":"9","capacity.topolvm.io/dc0":"9","capacity.topolvm.io/":"9"}}`
	if got := decision(t, cfg, strings.Replace(rawPodWith([]string{"a"}), `"metadata":{}`, annotations, 1), facts); got != "dc1=2" {
		t.Errorf("%s", got)
	}
	if got := decision(t, cfg, strings.Replace(rawPodWith(nil), `"metadata":{}`, annotations, 1), facts); got != "NoVolumes" {
		t.Errorf("a pod that is not patched: %s", got)
	}
}

func TestClasses(t *testing.T) {
	day := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	class := func(name, provisioner string, age int, annotation string) *storagev1.StorageClass {
		c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(day.AddDate(0, 0, -age))}, Provisioner: provisioner,
			Parameters: map[string]string{"topolvm.io/device-class": "x-" + name}}
		if annotation != "" {
			c.Annotations = map[string]string{annotation: "true"}
		}
		return c
	}
	cfg := testConfig("d")
	for name, c := range map[string]struct {
		list     []*storagev1.StorageClass
		standard string
	}{
		"none":                 {[]*storagev1.StorageClass{class("a", "d", 1, "")}, ""},
		"one":                  {[]*storagev1.StorageClass{class("a", "d", 1, ""), class("b", "d", 2, annDefaultClass)}, "b"},
		"the beta annotation":  {[]*storagev1.StorageClass{class("b", "d", 2, annBetaDefaultClass)}, "b"},
		"the newest":           {[]*storagev1.StorageClass{class("c", "d", 3, annDefaultClass), class("a", "d", 1, annDefaultClass), class("b", "d", 2, annDefaultClass)}, "a"},
		"of two the first one": {[]*storagev1.StorageClass{class("b", "d", 1, annDefaultClass), class("a", "d", 1, annDefaultClass), class("c", "d", 1, annDefaultClass)}, "a"},
		"that of another":      {[]*storagev1.StorageClass{class("b", "e", 1, annDefaultClass), class("a", "d", 2, annDefaultClass)}, "b"},
	} {
		known := cfg.classesOf(c.list)
		if got := ptr.Deref(known.standard, ""); got != c.standard {
			t.Errorf("%s: the default is %q, want %q", name, got, c.standard)
		}
		if name == "that of another" {
			if _, ours := known.deviceOf(nil); ours {
				t.Error("the default class of another driver counts")
			}
		}
		off := cfg
		off.ResolveDefaultClass = false
		if off.classesOf(c.list).standard != nil {
			t.Errorf("%s: a default although that is off", name)
		}
	}
}

func TestDecideClaim(t *testing.T) {
	cfg := testConfig("d")
	for name, c := range map[string]struct{ claim, provisioner, want string }{
		"no such class":     {`{}`, "", "Foreign"},
		"of another driver": {`{}`, "e", "Foreign"},
		"has it":            {`{"metadata":{"finalizers":["topolvm.io/pvc"]}}`, "d", "Protected"},
		"has none":          {`{"metadata":{}}`, "d", "Unprotected"},
	} {
		claim := &rawClaim{}
		if err := decode([]byte(c.claim), claim); err != nil {
			t.Fatal(err)
		}
		if v := cfg.decideClaim(claim, c.provisioner); v.reason != c.want || (v.patch != nil) != (c.want == "Unprotected") {
			t.Errorf("%s: %v", name, v)
		}
	}
	// A server without a driver name must not take all claims without a class for its own.
	if v := testConfig("").decideClaim(&rawClaim{}, ""); v.patch != nil {
		t.Errorf("%v", v)
	}
	for raw, want := range map[string]string{
		`{}`: "", `{"spec":{"storageClassName":"a"}}`: "a", `{"spec":{"storageClassName":""}}`: "",
		`{"metadata":{"annotations":{"volume.beta.kubernetes.io/storage-class":"b"}},"spec":{"storageClassName":"a"}}`: "b",
	} {
		claim := &rawClaim{}
		if err := decode([]byte(raw), claim); err != nil || claim.class() != want {
			t.Errorf("%s: %q %v", raw, claim.class(), err)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	if err := testConfig("d").Validate(); err != nil {
		t.Error(err)
	}
	bad := Config{CertMode: CertSelfSigned, ShutdownDelay: -1, CertSecret: "a/b/c", Service: "s"}
	err := bad.Validate()
	for _, flag := range []string{"--default-volume-size", "--shutdown-delay", "--webhook-cert-secret", "--webhook-service", "--webhook-config-name"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s is not named: %v", flag, err)
		}
	}
	if err := (Config{CertMode: "x", DefaultVolumeSize: 1}).Validate(); err == nil || !strings.Contains(err.Error(), "--webhook-cert-mode") {
		t.Error(err)
	}
	if n, err := nameIn("own", "x"); err != nil || n.String() != "own/x" {
		t.Errorf("%v %v", n, err)
	}
	if n, err := nameIn("own", "a/x"); err != nil || n.String() != "a/x" {
		t.Errorf("%v %v", n, err)
	}
}
