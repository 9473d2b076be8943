// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// facts is a source of claims and device classes that records which classes were looked up.
type facts struct {
	claims   map[string]*corev1.PersistentVolumeClaim
	devices  map[string]string // of the StorageClasses of the driver
	standard *string
	asked    []string
}

func (f *facts) claim(name string) *corev1.PersistentVolumeClaim { return f.claims[name] }

func (f *facts) deviceClass(class *string) (string, error) {
	if class == nil {
		class = f.standard
	}
	if class == nil {
		return "", nil
	}
	f.asked = append(f.asked, *class)
	return f.devices[*class], nil
}

// pvc returns an unbound claim.
func pvc(class *string, size string, change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{
		Spec:   corev1.PersistentVolumeClaimSpec{StorageClassName: class},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending},
	}
	if size != "" {
		claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	}
	for _, c := range change {
		c(claim)
	}
	return claim
}

func inPhase(p corev1.PersistentVolumeClaimPhase) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) { claim.Status.Phase = p }
}

func byAnnotation(class string) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) {
		claim.Annotations = map[string]string{corev1.BetaStorageClassAnnotation: class}
	}
}

// rawPodWith returns a pod with a volume for each claim, and ephemeral volumes with templates.
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

func TestPods(t *testing.T) {
	ours, theirs, bad := ptr.To("ours"), ptr.To("theirs"), ptr.To("bad")
	type claims = map[string]*corev1.PersistentVolumeClaim
	for name, c := range map[string]struct {
		claims    claims
		templates []string
		standard  *string
		pod       string // instead of one with all claims
		want      string // the sums, or the reason
	}{
		"a confirmed claim counts":                 {claims: claims{"a": pvc(ours, "1Gi")}, want: "dc1=1073741824"},
		"a claim that is not there does not count": {claims: claims{"a": nil, "b": pvc(ours, "1")}, want: "dc1=1"},
		"a lost claim is bound": {claims: claims{"a": pvc(ours, "1", inPhase(corev1.ClaimLost)),
			"b": pvc(ours, "1")}, want: "Bound"},
		"a bound claim of another driver does not matter": {claims: claims{"a": pvc(theirs, "1", inPhase(corev1.ClaimBound)),
			"b": pvc(ours, "1")}, want: "dc1=1"},
		"no class, no default":                          {claims: claims{"a": pvc(nil, "1")}, want: "NoVolumes"},
		"no class, the default is ours":                 {claims: claims{"a": pvc(nil, "5")}, standard: ours, want: "dc1=5"},
		"the empty class is none, whatever the default": {claims: claims{"a": pvc(ptr.To(""), "1")}, standard: ours, want: "NoVolumes"},
		"the annotation wins over the field":            {claims: claims{"a": pvc(theirs, "5", byAnnotation("ours"))}, want: "dc1=5"},
		"an empty annotation is no class":               {claims: claims{"a": pvc(ours, "5", byAnnotation(""))}, want: "NoVolumes"},
		"bound claims only": {claims: claims{"a": pvc(ours, "1", inPhase(corev1.ClaimBound))},
			want: "NoVolumes"},
		"a bound and an unbound claim": {claims: claims{"a": pvc(ours, "1", inPhase(corev1.ClaimBound)),
			"b": pvc(ours, "1")}, want: "Bound"},
		"a claim that is reserved for a volume": {claims: claims{"a": pvc(ours, "1",
			func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }), "b": pvc(ours, "1")}, want: "Bound"},
		"no size":       {claims: claims{"a": pvc(ours, "")}, want: "dc1=1073741824"},
		"no whole byte": {claims: claims{"a": pvc(ours, "1500m")}, want: "dc1=2"},
		"too large":     {claims: claims{"a": pvc(ours, "100E")}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"too large in two powers": {claims: claims{"a": pvc(ours, "9999Ei"), "b": pvc(ours, "1")},
			want: fmt.Sprint("dc1=", math.MaxInt64)},
		"sums that are too large": {claims: claims{"a": pvc(ours, "9223372036854775807"),
			"b": pvc(ours, "9223372036854775807")}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"a device class that is no name": {claims: claims{"a": pvc(bad, "1"), "b": pvc(ours, "1")},
			want: "InvalidDeviceClass"},
		"a template": {templates: []string{`{"storageClassName":"second","resources":{"requests":{"storage":"3"}}}`},
			want: "dc2=3"},
		"a template without class":                      {templates: []string{`{}`}, want: "NoVolumes"},
		"a template without class, the default is ours": {templates: []string{`{}`}, standard: ours, want: "dc1=1073741824"},
		"a template with the empty class": {templates: []string{`{"storageClassName":""}`}, standard: ours,
			want: "NoVolumes"},
		"a template beside a claim that is not found": {claims: claims{"a": nil}, templates: []string{`{"storageClassName":"ours"}`},
			want: "dc1=1073741824"},
		"a negative size": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":"-5"}}}`}, want: "dc1=1073741824"},
		"a size of another driver is not read": {templates: []string{
			`{"storageClassName":"theirs","resources":{"requests":{"storage":"x"}}}`}, want: "NoVolumes"},
		"no size at all": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":"x"}}}`}, want: "error"},
		"a size with a large exponent": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":"1e999999999"}}}`}, want: "error"},
		"a size with a small exponent": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":1e-99999999}}}`}, want: "error"},
		"a size with a thousand digits": {templates: []string{`{"storageClassName":"ours","resources":{"requests":{"storage":"` +
			strings.Repeat("9", 1000) + `"}}}`}, want: "error"},
		"a size with an exponent": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":"1e3"}}}`}, want: "dc1=1000"},
		"an exponent beyond all that fits": {templates: []string{
			`{"storageClassName":"ours","resources":{"requests":{"storage":"1e99"}}}`}, want: fmt.Sprint("dc1=", math.MaxInt64)},
		"no containers": {claims: claims{"a": pvc(ours, "1")},
			pod: `{"spec":{"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "NoContainers"},
		"a container that is null": {claims: claims{"a": pvc(ours, "1")},
			pod: `{"spec":{"containers":[null],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "NoContainers"},
		"what cannot be a name is not asked for": {pod: rawPodWith([]string{"../x", "", "a/b", "A"}), want: "NoVolumes"},
		"empty volumes":                          {pod: `{"spec":{"containers":[{}],"volumes":[null,{},{"ephemeral":null},{"ephemeral":{}},{"ephemeral":{"volumeClaimTemplate":null}},{"persistentVolumeClaim":null}]}}`, want: "NoVolumes"},
		"one claim in two volumes":               {claims: claims{"a": pvc(ours, "2")}, pod: rawPodWith([]string{"a", "a"}), want: "dc1=2"},
		"a wrong sum is corrected": {claims: claims{"a": pvc(ours, "3")},
			pod: `{"metadata":{"annotations":{"capacity.topolvm.io/dc1":"2"}},"spec":{"containers":[{"resources":{"limits":{"topolvm.io/capacity":"1"},"requests":{"topolvm.io/capacity":"1"}}}],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`, want: "dc1=3"},
	} {
		t.Run(name, func(t *testing.T) {
			raw := c.pod
			if raw == "" {
				raw = rawPodWith(slices.Sorted(maps.Keys(c.claims)), c.templates...)
			}
			from := &facts{claims: c.claims, devices: map[string]string{"ours": "dc1", "second": "dc2", "bad": "a/b"}, standard: c.standard}
			if got := decision(t, testConfig("d"), raw, from); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// TestBoundClassesAreReadLast looks up the class of a bound claim only if there is something to patch:
// a claim of a static PersistentVolume often names a class that does not exist.
func TestBoundClassesAreReadLast(t *testing.T) {
	from := &facts{claims: map[string]*corev1.PersistentVolumeClaim{
		"a": pvc(ptr.To("manual"), "1", inPhase(corev1.ClaimBound)), "b": pvc(ptr.To("theirs"), "1"),
	}}
	if got := decision(t, testConfig("d"), rawPodWith([]string{"a", "b"}), from); got != "NoVolumes" ||
		fmt.Sprint(from.asked) != "[theirs]" {
		t.Errorf("%s, looked up %q", got, from.asked)
	}
}

// decision returns the verdict about a pod as one line.
func decision(t *testing.T, cfg Config, raw string, from source) string {
	t.Helper()
	pod := &rawPod{}
	if err := decode([]byte(raw), pod); err != nil {
		t.Fatal(err)
	}
	_, v, err := cfg.decide(pod, from)
	switch {
	case err != nil:
		return "error"
	case v.patch == nil:
		if (len(v.warnings) > 0) != (v.reason == "InvalidDeviceClass") {
			t.Errorf("%s with warnings %q", v.reason, v.warnings)
		}
		return v.reason
	}
	patch, err := json.Marshal(v.patch)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		Metadata struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal(apply(t, []byte(raw), patch), &out); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(strings.TrimPrefix(fmt.Sprint(strings.ReplaceAll(strings.ReplaceAll(fmt.Sprint(out.Metadata.Annotations),
		"capacity.topolvm.io/", ""), ":", "=")), "map["), "]")
}
