// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/clock"
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
		"the same second":               {500 * time.Millisecond, 900 * time.Millisecond, "", OK, "equal to"},
		"an answer that took long":      {-5 * time.Second, 20 * time.Second, "", OK, "equal to"},
		"a little ahead":                {5 * time.Second, 5 * time.Second, "", OK, "equal to"},
		"ahead":                         {11 * time.Second, 11 * time.Second, "", Warning, "10s ahead of"},
		"behind":                        {-10 * time.Second, -10 * time.Second, "", Warning, "10s behind"},
		"far behind":                    {-time.Hour, -time.Hour, "", Failure, "60m behind"},
		"a server without a Date":       {0, 0, "-", Skipped, "no Date"},
		"a server with an invalid Date": {0, 0, "yesterday", Skipped, "no Date"},
	} {
		date := server.Format("Mon, 02 Jan 2006 15:04:05 GMT")
		if c.date != "" {
			date = c.date
		}
		got := checkSkew(clock.Skew(date, server.Add(c.before), server.Add(c.after)))
		if got.Status != c.want || !strings.Contains(got.Message, c.text) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestSidecarsOfAPod(t *testing.T) {
	t.Parallel()
	roles := func(elected bool) []Role {
		return []Role{{Name: "provisioner", Sidecar: "csi-provisioner", Elected: elected},
			{Name: "nodecontroller", Sidecar: topolvm, Lease: topolvmLease, Elected: elected}}
	}
	elected := Plan{Roles: roles(true), Pod: "mine"}
	nodecontroller := Plan{Roles: []Role{{Name: "nodecontroller", Sidecar: topolvm, Lease: "x", Elected: true}}}
	container := func(name, image string, args ...string) corev1.Container {
		return corev1.Container{Name: name, Image: image, Args: args}
	}
	old := container("old", "csi-provisioner:v5", "--leader-election")
	renamed := corev1.Container{Image: "storage-controller:v1", Command: []string{"/csi-provisioner"}}
	topolvm := corev1.Container{Image: "topolvm-with-sidecar:0.40", Command: []string{"/topolvm-controller"}}
	driver := func(args ...string) corev1.Container {
		return container("topolvm-controller", "topolvm-controller:0.40", args...)
	}
	mirrored := container("csi-provisioner", "mirror.example/abc/provisioner:v5", "--csi-address=/csi/csi.sock")
	prefixed := container("p", "mirror.example/abc-csi-provisioner:v5", "--csi-address", "/csi/csi.sock")
	for name, c := range map[string]struct {
		plan      Plan
		pod       string
		container corev1.Container
		want      []Status
		text      string
	}{
		"another sidecar":                {elected, "other", container("", "csi-resizer:v1"), nil, ""},
		"a sidecar of no role":           {elected, "other", container("", "csi-attacher:v4"), nil, ""},
		"this program under an old name": {elected, "other", renamed, nil, ""},
		"a sidecar with leader election": {elected, "other", old, []Status{Warning}, "only one of them is active"},
		"one with election in this pod": {elected, "mine", old, []Status{Failure}, "remove it, because storage-controller runs in the " +
			"same pod. Until then both are active, because in one pod both hold the Lease"},
		"this process without election": {Plan{Roles: roles(false), Pod: "mine"}, "mine", old, []Status{Failure}, "both are active"},
		"one without election elsewhere": {elected, "other", container("", "csi-provisioner:v5"), []Status{Warning},
			"if it serves the same driver"},
		"one behind a mirror, by its name":  {elected, "other", mirrored, []Status{Warning}, "container csi-provisioner"},
		"one behind a mirror, by its image": {elected, "other", prefixed, []Status{Warning}, "container p"},
		"a driver with such a name": {elected, "other", container("csi-provisioner", "driver:v5", "--endpoint=/csi/csi.sock"), nil,
			""},
		"an image with its old name": {elected, "other", container("", "external-provisioner:v5"), []Status{Warning},
			"csi-provisioner"},
		"TopoLVM's controller in this pod":  {elected, "mine", topolvm, []Status{Failure}, "remove it"},
		"TopoLVM's controller, other Lease": {nodecontroller, "other", topolvm, []Status{Warning}, "both are active"},
		"TopoLVM's controller, Lease of a flag": {
			elected, "mine", driver("--leader-election-id=x"), []Status{Failure}, "both are active",
		},
		"TopoLVM's controller, our Lease by a flag": {
			nodecontroller, "mine", driver("--leader-election-id", "x"), []Status{Warning}, "only one of them is active",
		},
		"TopoLVM's controller, other namespace": {
			elected, "other", driver("--leader-election-namespace=y"), []Status{Warning}, "both are active",
		},
		"one without election in this pod": {
			elected, "mine", container("", "csi-provisioner:v5", "--leader-election=false"), []Status{Failure}, "both are active",
		},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.pod}, Spec: corev1.PodSpec{Containers: []corev1.Container{c.container}}}
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
		attach, capacity         *bool
		publishes, tells         bool
		roles                    []string
		selected                 bool
		wantAttach, wantCapacity Status
	}{
		"all agree":                               {yes, yes, true, true, []string{"attacher", "capacity"}, false, OK, OK},
		"the defaults of the fields":              {nil, nil, true, false, []string{"attacher"}, false, OK, OK},
		"nothing to attach":                       {no, nil, false, false, nil, false, OK, OK},
		"attachments without a controller":        {yes, nil, false, false, nil, false, Failure, OK},
		"attachments of another process":          {yes, nil, false, false, nil, true, Warning, OK},
		"attachments for nothing":                 {yes, nil, false, false, []string{"attacher"}, false, Warning, OK},
		"a driver that is not asked to publish":   {no, nil, true, false, []string{"attacher"}, false, Failure, OK},
		"capacity that the driver cannot tell":    {nil, yes, true, false, []string{"attacher"}, false, OK, Failure},
		"capacity without a controller":           {nil, yes, true, true, []string{"attacher"}, false, OK, Failure},
		"capacity that another process publishes": {nil, yes, true, true, []string{"attacher"}, true, OK, Warning},
		"capacity that the scheduler ignores":     {nil, no, true, true, []string{"attacher", "capacity"}, false, OK, Warning},
	} {
		plan, driver := Plan{Selected: c.selected, Capacity: slices.Contains(c.roles, "capacity")}, csiclient.Driver{}
		for _, r := range c.roles {
			plan.Roles = append(plan.Roles, Role{Name: r})
		}
		driver.Controller.PublishUnpublishVolume, driver.Controller.GetCapacity = c.publishes, c.tells
		obj := &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{AttachRequired: c.attach, StorageCapacity: c.capacity}}
		if got := attachRequired(obj, driver, plan); got.Status != c.wantAttach || (got.Hint == "") != (got.Status == OK) {
			t.Errorf("%s: %+v", name, got)
		}
		if got := storageCapacity(obj, driver, plan); got.Status != c.wantCapacity || (got.Hint == "") != (got.Status == OK) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestLeaseIsHeld(t *testing.T) {
	t.Parallel()
	now := time.Now()
	lease := func(holder string, age time.Duration) *coordinationv1.Lease {
		return &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: ptr.To[int32](15), RenewTime: &metav1.MicroTime{Time: now.Add(-age)},
		}}
	}
	for _, c := range []struct {
		lease *coordinationv1.Lease
		want  bool
	}{
		{lease("a", time.Second), true}, {lease("", time.Second), false}, {lease("a", time.Minute), false},
		{&coordinationv1.Lease{}, false},
	} {
		if isHeld(c.lease, now) != c.want {
			t.Errorf("%s: want %t", describe(c.lease, now), c.want)
		}
	}
}

func TestTopologyKeys(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		nodes map[string][]string
		want  Status
		text  string
	}{
		"the same keys": {map[string][]string{"a": {"x", "y"}, "b": {"x", "y"}}, OK, "x, y"},
		"other keys":    {map[string][]string{"a": {"x"}, "b": {"x", "y"}}, Warning, "[x] on a; [x, y] on b"},
		"no keys":       {map[string][]string{"a": nil, "b": nil}, Failure, "no topology keys"},
	} {
		if check := topologyKeys(c.nodes); check.Status != c.want || !strings.Contains(check.Message, c.text) {
			t.Errorf("%s: %+v", name, check)
		}
	}
}

func TestGrantThatLacksSomething(t *testing.T) {
	t.Parallel()
	missing := []rbac.Access{{Verb: "get", Resource: "x"}, {Verb: "list", Resource: "x"}, {Verb: "get", Resource: "y"}}
	for _, c := range []struct {
		grant   rbac.Grant
		missing []rbac.Access
		failed  error
		want    Status
	}{
		{rbac.Grant{File: "f"}, nil, nil, OK},
		{rbac.Grant{File: "f"}, missing, fmt.Errorf("e"), Failure},
		{rbac.Grant{File: "f", Without: "w"}, missing, nil, Warning},
		{rbac.Grant{File: "f"}, nil, fmt.Errorf("e"), Skipped},
	} {
		got := grantCheck(c.grant, c.missing, c.failed)
		if got.Status != c.want || c.missing != nil && !strings.Contains(got.Message, "not granted: get,list x; get y") {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

func TestUnreviewed(t *testing.T) {
	t.Parallel()
	denied, unknown := Check{Name: "rbac a", Status: Failure}, Check{Name: "rbac b", Status: Skipped, Message: "m"}
	for name, c := range map[string]struct {
		checks []Check
		want   string // part of the error; "" if there is none
	}{
		"all are checked":                 {[]Check{denied, {Name: "csidriver", Status: Skipped}}, ""},
		"one is not checked":              {[]Check{denied, unknown}, "rbac b: m. "},
		"three are not checked":           {[]Check{unknown, unknown, unknown}, "rbac b: m (and 2 other checks). "},
		"rejected credentials":            {[]Check{{Name: apiServerCheck, Status: Failure, Message: "n"}}, "api-server: n. "},
		"no client for any access review": {[]Check{{Name: "rbac", Status: Skipped, Message: "n"}}, "rbac: n. "},
	} {
		err := Report{Checks: c.checks}.Unreviewed()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), "could not be checked: "+c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestWriteText(t *testing.T) {
	t.Parallel()
	r := Report{Checks: []Check{
		{Name: "a", Status: OK, Message: "m"}, {Name: "longer", Status: Failure, Message: "n", Hint: "h"},
		{Name: "b", Status: Skipped, Message: "o"}, {Name: "b", Status: Skipped, Message: "p"},
	}}
	var b strings.Builder
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	const want = `ok       a       m
failure  longer  n
                 → h
skipped  b       o
skipped  b       p

1 ok, 0 warnings, 1 failure, 2 skipped
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
