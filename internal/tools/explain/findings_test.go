// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestNextIsOfTheWorstFinding(t *testing.T) {
	of := func(severity finding.Severity, next string) finding.Finding {
		return finding.Finding{Severity: severity, Next: next}
	}
	for name, test := range map[string]struct {
		findings []finding.Finding
		want     string
	}{
		"none":                  {nil, "rest"},
		"none with a next step": {[]finding.Finding{of(finding.Blocked, "")}, "rest"},
		"one is unknown":        {[]finding.Finding{of(finding.Unknown, ""), of(finding.OK, "")}, "As far as known: rest"},
		"the worst": {[]finding.Finding{of(finding.Waiting, "one"), of(finding.Blocked, "two"), of(finding.Failing, "three")},
			"two"},
		"the first of equals":                {[]finding.Finding{of(finding.Failing, "one"), of(finding.Failing, "two")}, "one"},
		"one without a next step is skipped": {[]finding.Finding{of(finding.Waiting, "one"), of(finding.Blocked, "")}, "one"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := nextOf(test.findings, "rest"); got != test.want {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestWhoHoldsALease(t *testing.T) {
	lease := func(holder string, renewed time.Duration, managers ...string) *coordinationv1.Lease {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l"}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: ptr.To[int32](15), RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-renewed)))}}
		for i, m := range managers { // a later one has written later
			l.ManagedFields = append(l.ManagedFields, metav1.ManagedFieldsEntry{Manager: m,
				Time: ptr.To(metav1.NewTime(now.Add(time.Duration(i) * time.Second)))})
		}
		return l
	}
	for name, test := range map[string]struct {
		lease    *coordinationv1.Lease
		severity finding.Severity
		want     string
		former   *coordinationv1.Lease // of the same name in another namespace
	}{
		"ours": {lease("pod", time.Second, "csi-provisioner", "storage-controller"), finding.OK,
			`is "pod" (storage-controller), which holds`, nil},
		"back to the sidecar": {lease("pod", time.Second, "storage-controller", "csi-provisioner"), finding.OK,
			"(sidecar csi-provisioner), which holds", nil},
		"another program":   {lease("pod", time.Second, "kubectl-edit"), finding.OK, "(kubectl-edit), which holds", nil},
		"no managed fields": {lease("pod", time.Second), finding.OK, `is "pod", which holds Lease`, nil},
		"released":          {lease("", time.Second), finding.Blocked, "Lease ns/l has no holder", nil},
		"expired":           {lease("pod", 17*time.Second), finding.Blocked, "has expired (last renewed 17s ago)", nil},
		"just in time":      {lease("pod", 16*time.Second), finding.OK, "which holds", nil},
		"expired elsewhere": {lease("pod", time.Second), finding.OK, "which holds", lease("pod", time.Hour)},
	} {
		t.Run(name, func(t *testing.T) {
			e := &explanation{facts: &facts{now: now}}
			e.leases = []leaseFact{{role: roleProvisioner, driver: "d", name: "l",
				leases: apiread.Found([]*coordinationv1.Lease{test.lease})}}
			if test.former != nil {
				e.leases[0].leases.Value = append(e.leases[0].leases.Value, test.former)
			}
			explainLeases(e)
			got := e.findings
			if len(got) != 1 || got[0].Severity != test.severity || !strings.Contains(got[0].Message, test.want) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// claimOf is a claim with a request, in a class, with facts about both.
func claimOf(size string) *facts {
	class, requests := "fast", corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	return &facts{now: now, driver: "d",
		claim: apiread.Found(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"},
			Spec: corev1.PersistentVolumeClaimSpec{
				StorageClassName: &class, Resources: corev1.VolumeResourceRequirements{Requests: requests},
			}}),
		class:     apiread.Found(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: "d"}),
		csiDriver: apiread.Found(&storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)}}),
	}
}

func TestCapacity(t *testing.T) {
	capacity := func(zone, size, largest string) *storagev1.CSIStorageCapacity {
		c := &storagev1.CSIStorageCapacity{StorageClassName: "fast", Capacity: ptr.To(resource.MustParse(size))}
		if zone != "" {
			c.NodeTopology = &metav1.LabelSelector{MatchLabels: map[string]string{"zone": zone}}
		}
		if largest != "" {
			c.MaximumVolumeSize = ptr.To(resource.MustParse(largest))
		}
		return c
	}
	node := apiread.Found(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"zone": "a"}}})
	for name, test := range map[string]struct {
		have     []*storagev1.CSIStorageCapacity
		selected string
		severity finding.Severity
		want     string
	}{
		"enough": {[]*storagev1.CSIStorageCapacity{capacity("a", "9Gi", "")}, "", finding.OK,
			"Sufficient capacity in the cluster"},
		"enough elsewhere only": {[]*storagev1.CSIStorageCapacity{capacity("b", "9Gi", ""), capacity("a", "1Gi", "")}, "n", finding.Failing,
			`Insufficient capacity for node "n"`},
		"no object for the node": {[]*storagev1.CSIStorageCapacity{capacity("b", "9Gi", "")}, "n", finding.Failing,
			"No CSIStorageCapacity"},
		"no object": {nil, "", finding.Failing, "No CSIStorageCapacity"},
		"the largest volume counts": {[]*storagev1.CSIStorageCapacity{capacity("a", "9Gi", "2Gi")}, "n", finding.Failing,
			"available capacity for one volume is 2Gi"},
		"accessible from no node": {[]*storagev1.CSIStorageCapacity{capacity("", "9Gi", "")}, "", finding.Failing, "No CSIStorageCapacity"},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.capacities = apiread.Found(test.have)
			if test.selected != "" {
				f.node = node
			}
			e := &explanation{facts: f}
			explainCapacity(e)
			got := e.findings
			if len(got) != 1 || got[0].Severity != test.severity || !strings.Contains(got[0].Message, test.want) {
				t.Errorf("got %+v", got)
			}
		})
	}
	e := &explanation{facts: claimOf("5Gi")} // not read for a driver that does not publish it
	explainScheduling(e)
	if len(e.findings) != 0 {
		t.Errorf("got %+v", e.findings)
	}
}

// decoded returns object as a T.
func decoded[T any](t *testing.T, object map[string]any) *T {
	t.Helper()
	typed, err := apiread.Decode[T](object)
	if err != nil {
		t.Fatal(err)
	}
	return typed
}

func TestSources(t *testing.T) {
	grants := func(from string) apiread.Result[[]*volumerules.Grant] {
		return apiread.Found([]*volumerules.Grant{decoded[volumerules.Grant](t, map[string]any{"spec": map[string]any{
			"from": []any{map[string]any{"group": "", "kind": "PersistentVolumeClaim", "namespace": from}},
			"to":   []any{map[string]any{"group": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}},
		}})})
	}
	object := func(spec, status map[string]any) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": "s", "namespace": "other", "uid": "u"}, "spec": spec, "status": status}
	}
	snapshot := func(ready bool) apiread.Result[*snapshotv1.VolumeSnapshot] {
		return apiread.Found(decoded[snapshotv1.VolumeSnapshot](t,
			object(nil, map[string]any{"boundVolumeSnapshotContentName": "c", "readyToUse": ready})))
	}
	content := func(driver, mode string) apiread.Result[*snapshotv1.VolumeSnapshotContent] {
		spec := map[string]any{"driver": driver, "volumeSnapshotRef": map[string]any{"name": "s", "namespace": "other", "uid": "u"}}
		if mode != "" {
			spec["sourceVolumeMode"] = mode
		}
		return apiread.Found(decoded[snapshotv1.VolumeSnapshotContent](t, object(spec, map[string]any{"snapshotHandle": "h"})))
	}
	noContent := apiread.Result[*snapshotv1.VolumeSnapshotContent]{Missing: true}
	from := volumerules.Source{Kind: "VolumeSnapshot", Namespace: "other", Name: "s"}
	for name, test := range map[string]struct {
		source   sourceFact
		severity finding.Severity
		want     string
	}{
		"no grant": {sourceFact{Source: from, grants: grants("stranger")}, finding.Blocked,
			`No ReferenceGrant in namespace "other" allows claims of namespace "ns" to use VolumeSnapshot other/s.`},
		"a grant": {sourceFact{Source: from, grants: grants("ns")}, finding.OK,
			`A ReferenceGrant in namespace "other" allows the claim`},
		"no such kind": {sourceFact{Source: from, snapshot: apiread.Result[*snapshotv1.VolumeSnapshot]{Missing: true, Unserved: true}},
			finding.Blocked,
			"the cluster does not serve this kind"},
		"no content": {sourceFact{Source: from, snapshot: snapshot(true), content: noContent}, finding.Failing,
			"VolumeSnapshotContent of VolumeSnapshot other/s not found."},
		"mode conversion": {sourceFact{Source: from, snapshot: snapshot(true), content: content("d", "Block")}, finding.Failing,
			"--prevent-volume-mode-conversion=false: volume mode Filesystem of the claim differs from Block of the snapshot"},
		"foreign": {sourceFact{Source: from, snapshot: snapshot(true), content: content("e", "")}, finding.Failing,
			`it belongs to driver "e", not to "d".`},
		"ready": {sourceFact{Source: from, snapshot: snapshot(true), content: content("d", "")}, finding.OK,
			"VolumeSnapshot other/s is ready to be restored."},
		"not ready": {sourceFact{Source: from, snapshot: snapshot(false), content: content("d", "")}, finding.Failing,
			"it is not ready to use yet."},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.claim.Value.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
			f.source = &test.source
			e := &explanation{facts: f}
			explainDataSource(e)
			for _, got := range e.findings {
				if got.Severity == test.severity && strings.Contains(got.Message, test.want) {
					return
				}
			}
			t.Errorf("got %+v", e.findings)
		})
	}
	for name, test := range map[string]struct {
		change func(*facts)
		want   []finding.Severity
	}{
		"a populator": {func(f *facts) { f.sourceErr = fmt.Errorf("data source x: %w", volumerules.ErrPopulator) },
			[]finding.Severity{finding.Waiting}},
		"unread": {func(f *facts) { f.source = &sourceFact{Source: from} }, nil},
	} {
		e := &explanation{facts: claimOf("5Gi")}
		test.change(e.facts)
		explainDataSource(e)
		var got []finding.Severity
		for _, f := range e.findings {
			got = append(got, f.Severity)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %+v", name, e.findings)
		}
	}
}

func TestProcess(t *testing.T) {
	page := statusz.Page{Program: "storage-controller", Now: now,
		Roles: []statusz.Role{{Name: "provisioner", Lease: &election.Status{Lease: "ns/l", Holder: "other"}}},
		Driver: &csiclient.Status{NotReady: "connection refused",
			Limits: []pressure.Limit{{Method: "CreateVolume", Limit: 4, Waiting: 7, Since: now.Add(-time.Minute), Reason: "slow"}},
			Running: []csiclient.Call{{Method: "CreateVolume", Volume: "pvc-1", Began: now.Add(-5 * time.Second)},
				{Method: "CreateVolume", Volume: "pvc-2"}},
			Failed: []csiclient.Call{{Method: "CreateVolume", Volume: "pvc-1", Began: now.Add(-time.Minute), Took: time.Second,
				Code: "Internal", Error: "a\nb"}, {Method: "CreateVolume", Volume: "pvc-1", Error: "older"}}},
		Loops: []workloop.Status{
			{Name: "claims", Failing: []workloop.Failing{{Key: "ns/c", Stage: "indeterminate", Attempts: 4, Error: "no space",
				Next: now.Add(90 * time.Second)},
				{Key: "ns/d", Error: "of another"}},
				Running: []workloop.Running{{Key: "ns/c", Since: now.Add(-time.Second)}}},
			{Name: "volumes", Failing: []workloop.Failing{{Key: "ns/c", Error: "of another loop"}}},
		}}
	text := func(f *facts) string {
		var b strings.Builder
		e := &explanation{facts: f}
		explainProcess(e, []string{"provisioner"}, inQueues("ns/c", "claims"), "pvc-1", "")
		for _, x := range e.findings {
			fmt.Fprintln(&b, x.Severity, x.Message)
		}
		return b.String()
	}
	const want = `ok The provisioner at u is a standby: "other" holds Lease ns/l. Query that replica.
blocked The driver is not ready: connection refused.
waiting CreateVolume for "pvc-1" has been in flight for 5s.
failing CreateVolume for "pvc-1" failed 59s ago after 1s with Internal: a b.
waiting An attempt has been in progress for 1s (queue claims).
waiting CreateVolume has been limited to 4 calls at a time for 60s, and others wait: 7. Cause: slow.
failing 4 failed attempts in a row (queue claims, stage indeterminate), next attempt in 90s: no space.
`
	if got := text(&facts{now: now, process: &statusPage{url: "u", page: page}}); got != want {
		t.Errorf("got:\n%s", got)
	}
	idle := &statusPage{url: "u", page: statusz.Page{Program: "x"}}
	if got := text(&facts{process: idle}); !strings.Contains(got, "reports no running or failed attempt for this object.") {
		t.Errorf("an idle process: %s", got)
	}
	many := workloop.Status{Name: "claims", Failing: make([]workloop.Failing, 100), Failures: 2500}
	for queue, want := range map[string]string{
		"claims":  "unknown The process at u shows 100 of 2500 keys in back-off in queue claims, and none of this object.\n",
		"volumes": "ok The process at u reports no running or failed attempt for this object.\n",
	} {
		many.Name = queue
		cut := &statusPage{url: "u", page: statusz.Page{Program: "x", Loops: []workloop.Status{many}}}
		if got := text(&facts{process: cut}); got != want {
			t.Errorf("more failures than the page lists: %s", got)
		}
	}
	refused := &statusPage{url: "u", err: errors.New("refused")}
	if got := text(&facts{process: refused}); got != "unknown Cannot read the status page at u: refused.\n" {
		t.Errorf("a process that does not listen: %s", got)
	}
	if got := text(&facts{}); got != "" {
		t.Errorf("not requested: %s", got)
	}
}

// TestAttempts: each queue has keys of its own form.
func TestAttempts(t *testing.T) {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}}
	pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "k", Operator: corev1.NodeSelectorOpIn, Values: []string{"host"}}},
	}}}}
	lost := []lostNode{{LostNode: nodecleanup.LostNode{Node: "n", Value: "host"}, driver: "drv"}}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
	explainN := func(f *facts) Report { return explainNode(f, "n") }
	for queue, tt := range map[string]struct {
		key     string
		explain []func(*facts) Report
	}{
		"claims":                       {"ns/c", []func(*facts) Report{explainClaim}},
		"clone-protection":             {"PersistentVolumeClaim ns/c", []func(*facts) Report{explainClaim}},
		"drv-pvc":                      {"ns/c expand", []func(*facts) Report{explainClaim}},
		"nodecontroller-pvc-finalizer": {"ns/c", []func(*facts) Report{explainClaim}},
		"nodecontroller-resize-nudge":  {"ns/c", []func(*facts) Report{explainClaim}},
		"lostnodes":                    {"drv", []func(*facts) Report{explainVolume, explainN}},
	} {
		for i, explain := range tt.explain {
			for _, key := range []string{tt.key, "another"} {
				loop := workloop.Status{Name: queue, Failing: []workloop.Failing{{Key: key, Error: "forbidden"}}}
				process := &statusPage{page: statusz.Page{Now: now, Loops: []workloop.Status{loop}}}
				r := explain(&facts{now: now, driver: "drv", process: process, lost: lost, claim: apiread.Found(claim),
					volume: apiread.Found(pv)})
				if got := fmt.Sprint(r.Findings); strings.Contains(got, "forbidden") != (key == tt.key) {
					t.Errorf("%s, %d, key %s: %s", queue, i, key, got)
				}
			}
		}
	}
}

// TestNothingKnown explains objects without any other fact.
func TestNothingKnown(t *testing.T) {
	f := &facts{now: now, claim: apiread.Found(&corev1.PersistentVolumeClaim{}), volume: apiread.Found(&corev1.PersistentVolume{}),
		attachment: apiread.Found(&storagev1.VolumeAttachment{}), node: apiread.Found(&corev1.Node{})}
	for _, r := range []Report{explainClaim(f), explainVolume(f), explainAttachment(f), explainNode(f, "n"), explainNode(&facts{}, "n")} {
		if r.Next == "" || r.State == "" || r.Finalizers == nil || r.Events == nil {
			t.Errorf("got %+v", r)
		}
	}
}

func TestAges(t *testing.T) {
	for d, want := range map[time.Duration]string{-time.Hour: "0s", 1500 * time.Millisecond: "1s", 61 * time.Second: "61s",
		3*time.Hour + 5*time.Minute: "3h5m", 50 * time.Hour: "2d2h"} {
		if got := (&facts{now: now}).age(now.Add(-d)); got != want {
			t.Errorf("%v: %s", d, got)
		}
	}
}
