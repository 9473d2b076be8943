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
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

func TestClock(t *testing.T) {
	t.Parallel()
	server := time.Date(2024, 5, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		before, after time.Duration // of the own clock, since server
		date          string
		want          finding.Severity
		text          string
	}{
		"the same second":               {500 * time.Millisecond, 900 * time.Millisecond, "", finding.OK, "equal to"},
		"an answer that took long":      {-5 * time.Second, 20 * time.Second, "", finding.OK, "equal to"},
		"a little ahead":                {5 * time.Second, 5 * time.Second, "", finding.OK, "equal to"},
		"ahead":                         {11 * time.Second, 11 * time.Second, "", finding.Warning, "10s ahead of"},
		"behind":                        {-10 * time.Second, -10 * time.Second, "", finding.Warning, "10s behind"},
		"far behind":                    {-time.Hour, -time.Hour, "", finding.Failing, "60m behind"},
		"a server without a Date":       {0, 0, "-", finding.Unknown, "no Date"},
		"a server with an invalid Date": {0, 0, "yesterday", finding.Unknown, "no Date"},
	} {
		date := server.Format("Mon, 02 Jan 2006 15:04:05 GMT")
		if c.date != "" {
			date = c.date
		}
		got := checkSkew(clock.Skew(date, server.Add(c.before), server.Add(c.after)))
		if got.Severity != c.want || !strings.Contains(got.Message, c.text) {
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
		want      []finding.Severity
		text      string
	}{
		"another sidecar":                {elected, "other", container("", "csi-resizer:v1"), nil, ""},
		"a sidecar of no role":           {elected, "other", container("", "csi-attacher:v4"), nil, ""},
		"this program under an old name": {elected, "other", renamed, nil, ""},
		"a sidecar with leader election": {elected, "other", old, []finding.Severity{finding.Warning}, "only one of them is active"},
		"one with election in this pod": {elected, "mine", old, []finding.Severity{finding.Failing},
			"remove it, because storage-controller runs in the " +
				"same pod. Until then both are active, because in one pod both hold the Lease"},
		"this process without election": {Plan{Roles: roles(false), Pod: "mine"}, "mine", old, []finding.Severity{finding.Failing},
			"both are active"},
		"one without election elsewhere": {elected, "other", container("", "csi-provisioner:v5"), []finding.Severity{finding.Warning},
			"if it serves the same driver"},
		"one behind a mirror, by its name":  {elected, "other", mirrored, []finding.Severity{finding.Warning}, "container csi-provisioner"},
		"one behind a mirror, by its image": {elected, "other", prefixed, []finding.Severity{finding.Warning}, "container p"},
		"a driver with such a name": {elected, "other", container("csi-provisioner", "driver:v5", "--endpoint=/csi/csi.sock"), nil,
			""},
		"an image with its old name": {elected, "other", container("", "external-provisioner:v5"), []finding.Severity{finding.Warning},
			"csi-provisioner"},
		"TopoLVM's controller in this pod":  {elected, "mine", topolvm, []finding.Severity{finding.Failing}, "remove it"},
		"TopoLVM's controller, other Lease": {nodecontroller, "other", topolvm, []finding.Severity{finding.Warning}, "both are active"},
		"TopoLVM's controller, Lease of a flag": {
			elected, "mine", driver("--leader-election-id=x"), []finding.Severity{finding.Failing}, "both are active",
		},
		"TopoLVM's controller, our Lease by a flag": {
			nodecontroller, "mine", driver("--leader-election-id", "x"), []finding.Severity{finding.Warning}, "only one of them is active",
		},
		"TopoLVM's controller, other namespace": {
			elected, "other", driver("--leader-election-namespace=y"), []finding.Severity{finding.Warning}, "both are active",
		},
		"one without election in this pod": {
			elected, "mine", container("", "csi-provisioner:v5", "--leader-election=false"), []finding.Severity{finding.Failing},
			"both are active",
		},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.pod}, Spec: corev1.PodSpec{Containers: []corev1.Container{c.container}}}
		var have []finding.Severity
		text := ""
		for _, check := range c.plan.sidecarsOf(pod) {
			have = append(have, check.Severity)
			text += check.Message + check.Next
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

// TestIdentity: the host name identifies a replica, unless several pods share it.
func TestIdentity(t *testing.T) {
	pod := func(name string, hostNetwork bool) []*corev1.Pod {
		return []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{HostNetwork: hostNetwork}}}
	}
	elected := []Role{{}, {Elected: true}}
	for name, tt := range map[string]struct {
		plan  Plan
		pods  []*corev1.Pod
		warns bool
	}{
		"POD_NAME is set":      {Plan{Roles: elected}, nil, false},
		"the name of the pod":  {Plan{Roles: elected, Host: "p"}, pod("p", false), false},
		"that of the node":     {Plan{Roles: elected, Host: "n"}, pod("p", true), true},
		"a pod with that name": {Plan{Roles: elected, Host: "p"}, pod("p", true), true},
		"pods are unknown":     {Plan{Roles: elected, Host: "p"}, nil, true},
		"no Lease":             {Plan{Roles: elected[:1], Host: "n"}, nil, false},
	} {
		e := &examination{Report: &Report{}, plan: tt.plan}
		e.checkIdentity(tt.pods)
		if (len(e.Findings) == 1) != tt.warns {
			t.Errorf("%s: %+v", name, e.Findings)
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
		wantAttach, wantCapacity finding.Severity
	}{
		"all agree":                               {yes, yes, true, true, []string{"attacher", "capacity"}, false, finding.OK, finding.OK},
		"the defaults of the fields":              {nil, nil, true, false, []string{"attacher"}, false, finding.OK, finding.OK},
		"nothing to attach":                       {no, nil, false, false, nil, false, finding.OK, finding.OK},
		"attachments without a controller":        {yes, nil, false, false, nil, false, finding.Failing, finding.OK},
		"attachments of another process":          {yes, nil, false, false, nil, true, finding.Warning, finding.OK},
		"attachments for nothing":                 {yes, nil, false, false, []string{"attacher"}, false, finding.Warning, finding.OK},
		"a driver that is not asked to publish":   {no, nil, true, false, []string{"attacher"}, false, finding.Failing, finding.OK},
		"capacity that the driver cannot tell":    {nil, yes, true, false, []string{"attacher"}, false, finding.OK, finding.Failing},
		"capacity without a controller":           {nil, yes, true, true, []string{"attacher"}, false, finding.OK, finding.Failing},
		"capacity that another process publishes": {nil, yes, true, true, []string{"attacher"}, true, finding.OK, finding.Warning},
		"capacity that the scheduler ignores": {nil, no, true, true, []string{"attacher", "capacity"}, false, finding.OK,
			finding.Warning},
	} {
		plan, driver := Plan{Selected: c.selected, Capacity: slices.Contains(c.roles, "capacity")}, csiclient.Driver{}
		for _, r := range c.roles {
			plan.Roles = append(plan.Roles, Role{Name: r})
		}
		driver.Controller.PublishUnpublishVolume, driver.Controller.GetCapacity = c.publishes, c.tells
		obj := &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{AttachRequired: c.attach, StorageCapacity: c.capacity}}
		if got := attachRequired(obj, driver, plan); got.Severity != c.wantAttach || (got.Next == "") != (got.Severity == finding.OK) {
			t.Errorf("%s: %+v", name, got)
		}
		if got := storageCapacity(obj, driver, plan); got.Severity != c.wantCapacity || (got.Next == "") != (got.Severity == finding.OK) {
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
		if clock.IsHeld(c.lease, now) != c.want {
			t.Errorf("%s: want %t", describe(c.lease, now), c.want)
		}
	}
}

func TestTopologyKeys(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		nodes map[string][]string
		want  finding.Severity
		text  string
	}{
		"the same keys": {map[string][]string{"a": {"x", "y"}, "b": {"x", "y"}}, finding.OK, "x, y"},
		"other keys":    {map[string][]string{"a": {"x"}, "b": {"x", "y"}}, finding.Warning, "[x] on a; [x, y] on b"},
		"no keys":       {map[string][]string{"a": nil, "b": nil}, finding.Failing, "no topology keys"},
	} {
		if check := topologyKeys(c.nodes); check.Severity != c.want || !strings.Contains(check.Message, c.text) {
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
		want    finding.Severity
	}{
		{rbac.Grant{File: "f"}, nil, nil, finding.OK},
		{rbac.Grant{File: "f"}, missing, fmt.Errorf("e"), finding.Failing},
		{rbac.Grant{File: "f", Without: "w"}, missing, nil, finding.Warning},
		{rbac.Grant{File: "f"}, nil, fmt.Errorf("e"), finding.Unknown},
	} {
		got := grantCheck(c.grant, c.missing, c.failed)
		if got.Severity != c.want || c.missing != nil && !strings.Contains(got.Message, "not granted: get,list x; get y") {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

func TestUnreviewed(t *testing.T) {
	t.Parallel()
	denied, unknown := finding.Finding{Topic: "rbac a", Severity: finding.Failing},
		finding.Finding{Topic: "rbac b", Severity: finding.Unknown, Message: "m"}
	for name, c := range map[string]struct {
		checks []finding.Finding
		want   string // part of the error; "" if there is none
	}{
		"all are checked":       {[]finding.Finding{denied, {Topic: "csidriver", Severity: finding.Unknown}}, ""},
		"one is not checked":    {[]finding.Finding{denied, unknown}, "rbac b: m. "},
		"three are not checked": {[]finding.Finding{unknown, unknown, unknown}, "rbac b: m (and 2 other checks). "},
		"rejected credentials": {[]finding.Finding{{Topic: apiServerCheck, Severity: finding.Failing, Message: "n"}},
			"api-server: n. "},
		"no client for any access review": {[]finding.Finding{{Topic: "rbac", Severity: finding.Unknown, Message: "n"}}, "rbac: n. "},
	} {
		err := Report{Findings: c.checks}.Unreviewed()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), "could not be checked: "+c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	r := Report{Findings: []finding.Finding{
		{Topic: "a", Severity: finding.OK, Message: "m"}, {Topic: "longer-topic", Severity: finding.Failing, Message: "n", Next: "h"},
		{Topic: "b", Severity: finding.Unknown, Message: "o"}, {Topic: "b", Severity: finding.Unknown, Message: "p"},
	}}
	const want = `ok       a             m
failing  longer-topic  n
                       → h
unknown  b             o
unknown  b             p

1 ok, 0 warnings, 1 failing, 2 unknown
`
	if got := r.Text(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
