package explain

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/provisioner"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestNextIsOfTheWorstFinding(t *testing.T) {
	for name, test := range map[string]struct {
		findings findings
		want     string
	}{
		"nothing":                         {nil, "rest"},
		"nothing that has a next step":    {findings{{Blocked, "a", "", ""}}, "rest"},
		"something is not known":          {findings{{Unknown, "a", "", ""}, {Fine, "b", "", ""}}, "As far as could be found out: rest"},
		"the worst":                       {findings{{Waiting, "a", "", "one"}, {Blocked, "b", "", "two"}, {Failing, "c", "", "three"}}, "two"},
		"the first of equals":             {findings{{Failing, "a", "", "one"}, {Failing, "b", "", "two"}}, "one"},
		"one without a step does not win": {findings{{Waiting, "a", "", "one"}, {Blocked, "b", "", ""}}, "one"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.findings.next("rest"); got != test.want {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestWhoRemovesAFinalizer(t *testing.T) {
	for name, test := range map[string]struct{ kind, finalizer, by, when string }{
		"of claims":                {KindClaim, "kubernetes.io/pvc-protection", "kube-controller-manager", "no pod"},
		"of volumes":               {KindVolume, "kubernetes.io/pv-protection", "kube-controller-manager", "not bound"},
		"of the provisioner":       {KindVolume, "external-provisioner.volume.kubernetes.io/finalizer", "the provisioner", "DeleteVolume"},
		"of the attacher on a PV":  {KindVolume, "external-attacher/d-example-com", "the attacher of driver d.example.com", "no VolumeAttachment"},
		"of the attacher on a VA":  {KindAttachment, "external-attacher/d-example-com", "the attacher of driver d.example.com", "ControllerUnpublishVolume"},
		"of another attacher":      {KindVolume, "external-attacher/other", "written other there", "no VolumeAttachment"},
		"of a clone":               {KindClaim, "provisioner.storage.kubernetes.io/cloning-protection", "the provisioner", "clone"},
		"of a doubt":               {KindClaim, "storage-controller.io/provisioning", "storage-controller", "final answer"},
		"of a snapshot":            {KindClaim, "snapshot.storage.kubernetes.io/pvc-as-source-protection", "the snapshot controller", "snapshot"},
		"of nodes":                 {KindNode, "d.example.com/node", "the nodecontroller for driver d.example.com", "cleaned up"},
		"of TopoLVM":               {KindNode, "topolvm.io/node", "topolvm-controller", "cleaned up"},
		"of claims of the driver":  {KindClaim, "d.example.com/pvc", "the nodecontroller for driver d.example.com", "pods"},
		"of somebody else":         {KindClaim, "example.org/backup", "unknown: belongs to example.org", "its owner"},
		"of somebody without name": {KindClaim, "backup", "unknown: belongs to whoever has added it", "its owner"},
	} {
		t.Run(name, func(t *testing.T) {
			got := finalizersOf(test.kind, []string{test.finalizer}, "d.example.com")
			if len(got) != 1 || !strings.Contains(got[0].By, test.by) || !strings.Contains(got[0].When, test.when) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestWhoHoldsALease(t *testing.T) {
	lease := func(holder string, renewed time.Duration, managers ...string) coordinationv1.Lease {
		l := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l"}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: ptr.To[int32](15), RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-renewed)))}}
		for i, m := range managers { // a later one has written later
			l.ManagedFields = append(l.ManagedFields, metav1.ManagedFieldsEntry{Manager: m, Time: ptr.To(metav1.NewTime(now.Add(time.Duration(i) * time.Second)))})
		}
		return l
	}
	for name, test := range map[string]struct {
		lease    coordinationv1.Lease
		severity Severity
		want     string
	}{
		"ours":                       {lease("pod", time.Second, "csi-provisioner", "storage-controller"), Fine, `is "pod", a storage-controller, which holds`},
		"back to the sidecar":        {lease("pod", time.Second, "storage-controller", "csi-provisioner"), Fine, "an old sidecar (csi-provisioner)"},
		"another program":            {lease("pod", time.Second, "kubectl-edit"), Fine, "another program (kubectl-edit)"},
		"nobody noted who writes it": {lease("pod", time.Second), Fine, "not known what program"},
		"released":                   {lease("", time.Second), Blocked, "Nobody holds Lease ns/l"},
		"run out":                    {lease("pod", 15*time.Second), Blocked, "was renewed 15s ago for the last time"},
		"just in time":               {lease("pod", 14*time.Second), Fine, "which holds"},
	} {
		t.Run(name, func(t *testing.T) {
			f := &facts{now: now}
			got := f.aboutLease(leaseFact{role: roleProvisioner, driver: "d", name: "l", leases: have([]coordinationv1.Lease{test.lease})})
			if len(got) != 1 || got[0].Severity != test.severity || !strings.Contains(got[0].Sentence, test.want) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// claimOf is a claim with a request, in a class, with facts about both.
func claimOf(size string) *facts {
	class := "fast"
	return &facts{now: now, driver: "d",
		claim: have(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}, Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
		}}),
		class:     have(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: "d"}),
		csiDriver: have(&storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)}}),
	}
}

func TestCapacity(t *testing.T) {
	capacity := func(zone, size, largest string) storagev1.CSIStorageCapacity {
		c := storagev1.CSIStorageCapacity{StorageClassName: "fast", Capacity: ptr.To(resource.MustParse(size))}
		if zone != "" {
			c.NodeTopology = &metav1.LabelSelector{MatchLabels: map[string]string{"zone": zone}}
		}
		if largest != "" {
			c.MaximumVolumeSize = ptr.To(resource.MustParse(largest))
		}
		return c
	}
	node := have(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"zone": "a"}}})
	for name, test := range map[string]struct {
		have     []storagev1.CSIStorageCapacity
		selected string
		severity Severity
		want     string
	}{
		"room":                           {[]storagev1.CSIStorageCapacity{capacity("a", "9Gi", "")}, "", Fine, "There is room in the cluster"},
		"room elsewhere only":            {[]storagev1.CSIStorageCapacity{capacity("b", "9Gi", ""), capacity("a", "1Gi", "")}, "n", Failing, `not enough room for node "n"`},
		"no object for the node":         {[]storagev1.CSIStorageCapacity{capacity("b", "9Gi", "")}, "n", Failing, "no CSIStorageCapacity"},
		"no object":                      {nil, "", Failing, "no CSIStorageCapacity"},
		"the largest volume counts":      {[]storagev1.CSIStorageCapacity{capacity("a", "9Gi", "2Gi")}, "n", Failing, "for one volume is 2Gi"},
		"without topology it is nowhere": {[]storagev1.CSIStorageCapacity{capacity("", "9Gi", "")}, "", Failing, "no CSIStorageCapacity"},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.capacities, f.node = have(test.have), node
			got := f.aboutCapacity(test.selected)
			if len(got) != 1 || got[0].Severity != test.severity || !strings.Contains(got[0].Sentence, test.want) {
				t.Errorf("got %+v", got)
			}
		})
	}
	f := claimOf("5Gi") // a driver that publishes nothing has no room to be told of
	f.capacities, f.csiDriver.value = have([]storagev1.CSIStorageCapacity(nil)), &storagev1.CSIDriver{}
	if got := f.aboutCapacity(""); len(got) != 0 {
		t.Errorf("got %+v", got)
	}
}

func TestSources(t *testing.T) {
	grant := func(from, name string) map[string]any {
		return map[string]any{"spec": map[string]any{"from": []any{map[string]any{"group": "", "kind": "PersistentVolumeClaim", "namespace": from}},
			"to": []any{map[string]any{"group": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name}}}}
	}
	object := func(spec, status map[string]any) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": "s", "namespace": "other", "uid": "u"}, "spec": spec, "status": status}
	}
	bound := object(nil, map[string]any{"boundVolumeSnapshotContentName": "c", "readyToUse": true})
	ref := map[string]any{"name": "s", "namespace": "other", "uid": "u"}
	block := map[string]any{"driver": "d", "volumeSnapshotRef": ref, "sourceVolumeMode": "Block"}
	handle := map[string]any{"snapshotHandle": "h"}
	from := provisioner.Source{Kind: "VolumeSnapshot", Namespace: "other", Name: "s"}
	for name, test := range map[string]struct {
		source   sourceFact
		severity Severity
		want     string
	}{
		"no grant":        {sourceFact{Source: from, grants: have([]map[string]any{grant("stranger", "s")})}, Blocked, "No ReferenceGrant in namespace \"other\" allows claims of namespace \"ns\" to use VolumeSnapshot other/s."},
		"a grant":         {sourceFact{Source: from, grants: have([]map[string]any{grant("ns", "s")})}, Fine, "A ReferenceGrant in namespace \"other\" allows the claim"},
		"grants unknown":  {sourceFact{Source: from, grants: known[[]map[string]any]{asked: true, why: "not known: no permission to x"}}, Unknown, "is not known: no permission to x."},
		"no such kind":    {sourceFact{Source: from, snapshot: known[map[string]any]{asked: true, unserved: true}}, Blocked, "this cluster has no such kind"},
		"no content":      {sourceFact{Source: from, snapshot: have(bound), content: known[map[string]any]{asked: true}}, Failing, "The VolumeSnapshotContent of VolumeSnapshot other/s does not exist."},
		"mode conversion": {sourceFact{Source: from, snapshot: have(bound), content: have(object(block, handle))}, Failing, "cannot be restored: volume mode Filesystem of the claim differs from Block of the snapshot"},
		"foreign":         {sourceFact{Source: from, snapshot: have(bound), content: have(object(map[string]any{"driver": "e", "volumeSnapshotRef": ref}, handle))}, Failing, `it is one of driver "e", not of "d".`},
		"ready":           {sourceFact{Source: from, snapshot: have(bound), content: have(object(map[string]any{"driver": "d", "volumeSnapshotRef": ref}, handle))}, Fine, "is restored from VolumeSnapshot other/s, which is ready."},
		"not ready":       {sourceFact{Source: from, snapshot: have(object(nil, map[string]any{"boundVolumeSnapshotContentName": "c"})), content: have(object(map[string]any{"driver": "d", "volumeSnapshotRef": ref}, handle))}, Failing, "it is not ready to use yet."},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.claim.value.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
			f.source = &test.source
			for _, got := range f.aboutSource() {
				if got.Severity == test.severity && strings.Contains(got.Sentence, test.want) {
					return
				}
			}
			t.Errorf("got %+v", f.aboutSource())
		})
	}
	f := claimOf("5Gi")
	f.sourceErr = fmt.Errorf("data source x: %w", provisioner.ErrPopulator)
	if got := f.aboutSource(); len(got) != 1 || got[0].Severity != Waiting {
		t.Errorf("a populator: %+v", got)
	}
}

func TestProcess(t *testing.T) {
	page := statusz.Page{Program: "storage-controller", Now: now,
		Roles: []statusz.Role{{Name: "provisioner", Lease: &election.Status{Lease: "ns/l", Holder: "other"}}},
		Driver: &csiclient.Status{NotReady: "the socket is gone",
			Running: []csiclient.Call{{Method: "CreateVolume", Volume: "pvc-1", Began: now.Add(-5 * time.Second)}, {Method: "CreateVolume", Volume: "pvc-2"}},
			Failed:  []csiclient.Call{{Method: "CreateVolume", Volume: "pvc-1", Began: now.Add(-time.Minute), Took: time.Second, Code: "Internal", Error: "a\nb"}, {Method: "CreateVolume", Volume: "pvc-1", Error: "older"}}},
		Loops: []workloop.Status{
			{Name: "claims", Failing: []workloop.Failing{{Key: "ns/c", Attempts: 4, Error: "no room", Next: now.Add(90 * time.Second)}, {Key: "ns/d", Error: "of another"}},
				Running: []workloop.Running{{Key: "ns/c", Since: now.Add(-time.Second)}}},
			{Name: "volumes", Failing: []workloop.Failing{{Key: "ns/c", Error: "of another loop"}}},
		}}
	text := func(f *facts) string {
		var b strings.Builder
		for _, x := range f.aboutProcess([]string{"provisioner"}, []string{"claims"}, "ns/c", "pvc-1", "") {
			fmt.Fprintln(&b, x.Severity, x.Sentence)
		}
		return b.String()
	}
	const want = `fine The process at u does not hold the Lease ns/l of its provisioner, which "other" does: ask that one.
blocked The process has no connection to the driver: the socket is gone.
waiting CreateVolume for "pvc-1" is under way for 5s.
failing CreateVolume for "pvc-1" failed 59s ago after 1s with Internal: a b.
waiting An attempt is under way for 1s (claims).
failing 4 attempts in a row failed (claims), the last one with: no room. The next try is in 1m30s.
`
	if got := text(&facts{now: now, process: &processFact{url: "u", page: page}}); got != want {
		t.Errorf("got:\n%s", got)
	}
	if got := text(&facts{process: &processFact{url: "u", page: statusz.Page{Program: "x"}}}); !strings.Contains(got, "works on nothing for the object") {
		t.Errorf("an idle process: %s", got)
	}
	if got := text(&facts{process: &processFact{url: "u", err: errors.New("refused")}}); got != "unknown The process at u could not be asked: refused.\n" {
		t.Errorf("one that is not there: %s", got)
	}
	if got := text(&facts{}); got != "" {
		t.Errorf("nobody asked: %s", got)
	}
}

// TestNothingKnown has every read forbidden: what is said must not depend on luck.
func TestNothingKnown(t *testing.T) {
	f := &facts{now: now, claim: have(&corev1.PersistentVolumeClaim{}), volume: have(&corev1.PersistentVolume{}), attachment: have(&storagev1.VolumeAttachment{}), node: have(&corev1.Node{})}
	for _, r := range []Report{reportClaim(f), reportVolume(f), reportAttachment(f), reportNode(f, "n"), reportNode(&facts{}, "n")} {
		if r.Next == "" || r.State == "" || r.Finalizers == nil || r.Events == nil {
			t.Errorf("got %+v", r)
		}
	}
}

func TestAges(t *testing.T) {
	for d, want := range map[time.Duration]string{-time.Second: "0s", 1500 * time.Millisecond: "1s", 61 * time.Second: "1m1s", 3*time.Hour + 5*time.Minute: "3h5m", 50 * time.Hour: "2d2h"} {
		if got := age(d); got != want {
			t.Errorf("%v: %s", d, got)
		}
	}
}
