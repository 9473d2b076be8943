package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestClock(t *testing.T) {
	t.Parallel()
	server := time.Date(2024, 5, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		before, after time.Duration // of the own clock, since server
		date          string
		want          Status
		text          string
	}{
		"the same second":             {500 * time.Millisecond, 900 * time.Millisecond, "", OK, "the same"},
		"an answer that took long":    {-5 * time.Second, 20 * time.Second, "", OK, "the same"},
		"a little ahead":              {5 * time.Second, 5 * time.Second, "", OK, "the same"},
		"ahead":                       {11 * time.Second, 11 * time.Second, "", Warning, "10s ahead of"},
		"behind":                      {-10 * time.Second, -10 * time.Second, "", Warning, "10s behind"},
		"far behind":                  {-time.Hour, -time.Hour, "", Failure, "1h0m0s behind"},
		"a server that says no time":  {0, 0, "-", Skipped, "does not tell"},
		"a server that says nonsense": {0, 0, "yesterday", Skipped, "does not tell"},
	} {
		date := server.Format("Mon, 02 Jan 2006 15:04:05 GMT")
		if c.date != "" {
			date = c.date
		}
		got := clock(skewOf(date, server.Add(c.before), server.Add(c.after)))
		if got.Status != c.want || !strings.Contains(got.Message, c.text) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestSidecarsOfAPod(t *testing.T) {
	t.Parallel()
	roles := []Role{{Name: "provisioner", Sidecar: "csi-provisioner"}, {Name: "nodecontroller", Sidecar: topolvm, Lease: topolvmLease}}
	elected := Plan{Roles: roles, LeaderElection: true, Pod: "mine"}
	old := corev1.Container{Name: "old", Image: "csi-provisioner:v5", Args: []string{"--leader-election"}}
	for name, c := range map[string]struct {
		plan       Plan
		pod        string
		containers []corev1.Container
		want       []Status
		text       string
	}{
		"others are left alone":               {elected, "other", []corev1.Container{{Image: "csi-resizer:v1"}, {Image: "csi-attacher:v4"}}, nil, ""},
		"this program under an old name":      {elected, "other", []corev1.Container{{Image: "storage-controller:v1", Command: []string{"/csi-provisioner"}}}, nil, ""},
		"an old one that elects":              {elected, "other", []corev1.Container{old}, []Status{Warning}, "take turns"},
		"an old one that elects, in this pod": {elected, "mine", []corev1.Container{old}, []Status{Warning}, "remove it"},
		"one without election in this pod":    {elected, "mine", []corev1.Container{{Image: "csi-provisioner:v5", Args: []string{"--leader-election=false"}}}, []Status{Failure}, "at the same time"},
		"this process without election":       {Plan{Roles: roles, Pod: "mine"}, "mine", []corev1.Container{old}, []Status{Failure}, "at the same time"},
		"one without election elsewhere":      {elected, "other", []corev1.Container{{Image: "csi-provisioner:v5"}}, []Status{Warning}, "if it serves the same driver"},
		"one behind a mirror, by its name":    {elected, "other", []corev1.Container{{Name: "csi-provisioner", Image: "mirror.example/abc/provisioner:v5", Args: []string{"--csi-address=/csi/csi.sock"}}}, []Status{Warning}, "container csi-provisioner"},
		"one behind a mirror, by its image":   {elected, "other", []corev1.Container{{Name: "p", Image: "mirror.example/abc-csi-provisioner:v5", Args: []string{"--csi-address", "/csi/csi.sock"}}}, []Status{Warning}, "container p"},
		"a driver with such a name":           {elected, "other", []corev1.Container{{Name: "csi-provisioner", Image: "driver:v5", Args: []string{"--endpoint=/csi/csi.sock"}}}, nil, ""},
		"an image that has its old name":      {elected, "other", []corev1.Container{{Image: "external-provisioner:v5"}}, []Status{Warning}, "csi-provisioner"},
		"TopoLVM's controller stays":          {elected, "mine", []corev1.Container{{Image: "topolvm-with-sidecar:0.40", Command: []string{"/topolvm-controller"}}}, []Status{OK}, "so it stays"},
		"TopoLVM's controller with another Lease": {Plan{Roles: []Role{{Name: "nodecontroller", Sidecar: topolvm, Lease: "x"}}, LeaderElection: true}, "other",
			[]corev1.Container{{Image: "topolvm", Command: []string{"/topolvm-controller"}}}, []Status{Warning}, "--profile=topolvm"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.pod}, Spec: corev1.PodSpec{Containers: c.containers}}
		var have []Status
		text := ""
		for _, check := range c.plan.sidecarsOf(pod) {
			have = append(have, check.Status)
			text += check.Message + check.Hint
		}
		if !slices.Equal(have, c.want) || !strings.Contains(text, c.text) {
			t.Errorf("%s: %v, want %v: %s", name, have, c.want, text)
		}
		pod.Status.Phase = corev1.PodSucceeded
		if got := c.plan.sidecarsOf(pod); got != nil {
			t.Errorf("%s: a pod that has ended: %+v", name, got)
		}
	}
}

func TestCSIDriverAgainstCapabilities(t *testing.T) {
	t.Parallel()
	yes, no := ptr.To(true), ptr.To(false)
	for name, c := range map[string]struct {
		attach, capacity     *bool
		publishes, tells     bool
		roles                []string
		selected             bool
		wantAttach, wantRoom Status
	}{
		"all agree":                               {yes, yes, true, true, []string{"attacher", "capacity"}, false, OK, OK},
		"the defaults of the fields":              {nil, nil, true, false, []string{"attacher"}, false, OK, OK},
		"nothing to attach":                       {no, nil, false, false, nil, false, OK, OK},
		"attachments that nobody makes":           {yes, nil, false, false, nil, false, Failure, OK},
		"attachments that another process makes":  {yes, nil, false, false, nil, true, Warning, OK},
		"attachments for nothing":                 {yes, nil, false, false, []string{"attacher"}, false, Warning, OK},
		"a driver that is not asked to publish":   {no, nil, true, false, []string{"attacher"}, false, Failure, OK},
		"capacity that the driver cannot tell":    {nil, yes, true, false, []string{"attacher"}, false, OK, Failure},
		"capacity that nobody publishes":          {nil, yes, true, true, []string{"attacher"}, false, OK, Failure},
		"capacity that another process publishes": {nil, yes, true, true, []string{"attacher"}, true, OK, Warning},
		"capacity that nobody looks at":           {nil, no, true, true, []string{"attacher", "capacity"}, false, OK, Warning},
	} {
		e := &examination{plan: Plan{Selected: c.selected}}
		for _, r := range c.roles {
			e.plan.Roles = append(e.plan.Roles, Role{Name: r})
		}
		e.plan.Capacity = slices.Contains(c.roles, "capacity")
		e.driver.Controller.PublishUnpublishVolume, e.driver.Controller.GetCapacity = c.publishes, c.tells
		obj := &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{AttachRequired: c.attach, StorageCapacity: c.capacity}}
		if got := e.attachRequired(obj); got.Status != c.wantAttach || (got.Hint == "") != (got.Status == OK) {
			t.Errorf("%s: %+v", name, got)
		}
		if got := e.storageCapacity(obj); got.Status != c.wantRoom || (got.Hint == "") != (got.Status == OK) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestAlive(t *testing.T) {
	t.Parallel()
	now := time.Now()
	lease := func(holder string, age time.Duration) *coordinationv1.Lease {
		return &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: ptr.To[int32](15), RenewTime: &metav1.MicroTime{Time: now.Add(-age)}}}
	}
	for _, c := range []struct {
		lease *coordinationv1.Lease
		want  bool
	}{{lease("a", time.Second), true}, {lease("", time.Second), false}, {lease("a", time.Minute), false}, {&coordinationv1.Lease{}, false}} {
		if alive(c.lease, now) != c.want {
			t.Errorf("%s: want %t", describe(c.lease, now), c.want)
		}
	}
}

func TestTopologyKeys(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		nodes map[string][]string
		want  Status
		keys  int
	}{
		"the same keys": {map[string][]string{"a": {"x", "y"}, "b": {"x", "y"}}, OK, 2},
		"other keys":    {map[string][]string{"a": {"x"}, "b": {"x", "y"}}, Warning, 0},
		"no keys":       {map[string][]string{"a": nil, "b": nil}, Failure, 0},
	} {
		if keys, check := topologyKeys(c.nodes); check.Status != c.want || len(keys) != c.keys {
			t.Errorf("%s: %q %+v", name, keys, check)
		}
	}
}

func TestGrantThatLacksSomething(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		grant   Grant
		lacking []access
		failed  error
		want    Status
	}{
		{Grant{File: "f"}, nil, nil, OK},
		{Grant{File: "f"}, []access{{verb: "get", resource: "x"}, {verb: "list", resource: "x"}, {verb: "get", resource: "y"}}, fmt.Errorf("e"), Failure},
		{Grant{File: "f", Without: "w"}, []access{{verb: "get", resource: "x"}, {verb: "list", resource: "x"}, {verb: "get", resource: "y"}}, nil, Warning},
		{Grant{File: "f"}, nil, fmt.Errorf("e"), Skipped},
	} {
		got := c.grant.check(c.lacking, c.failed)
		if got.Status != c.want || c.lacking != nil && !strings.Contains(got.Message, "not granted: get,list x; get y") {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}
