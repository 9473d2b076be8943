// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// logicalVolume is "lv" on node "n" with class "ssd": 1Gi, or less than that if it has no LVM volume or is being expanded.
func logicalVolume(change func(*topolvm.LogicalVolume)) apiread.Result[*topolvm.LogicalVolume] {
	const gi = 1 << 30
	lv := &topolvm.LogicalVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "lv", UID: "id", Annotations: map[string]string{}},
		Spec:       topolvm.Spec{NodeName: "n", Size: gi, DeviceClass: "ssd"}, Status: topolvm.Status{VolumeID: "id", CurrentSize: gi},
	}
	change(lv)
	return apiread.Found(lv)
}

func waits(lv *topolvm.LogicalVolume) { lv.Status = topolvm.Status{} }
func grows(lv *topolvm.LogicalVolume) { lv.Spec.Size *= 2 }
func deleted(lv *topolvm.LogicalVolume) {
	lv.DeletionTimestamp = ptr.To(metav1.NewTime(now.Add(-time.Hour)))
}

// nodeWith is "n" with a condition Ready and the capacity annotation of a class.
func nodeWith(ready corev1.ConditionStatus, class string) apiread.Result[*corev1.Node] {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{"capacity.topolvm.io/" + class: "4096"}}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	return apiread.Found(node)
}

// TestLogicalVolumes: the findings name what topolvm-node does next, and what keeps it from that.
func TestLogicalVolumes(t *testing.T) {
	ready := nodeWith(corev1.ConditionTrue, "ssd")
	leaving := nodeWith(corev1.ConditionTrue, "ssd")
	leaving.Value.DeletionTimestamp = &metav1.Time{Time: now}
	failing := func(lv *topolvm.LogicalVolume) { lv.Status.Code, lv.Status.Message = 8, "no space" }
	released := &corev1.PersistentVolume{Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased},
		Spec: corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete}}
	retained := released.DeepCopy()
	retained.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	pending := &corev1.PersistentVolumeClaim{}
	pending.Annotations = map[string]string{"volume.kubernetes.io/selected-node": "n"}
	bound := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v"}}
	snapshot := &snapshotFact{snapshot: apiread.Found(&snapshotv1.VolumeSnapshot{})}
	unserved := apiread.Result[*topolvm.LogicalVolume]{Missing: true, Unserved: true}
	missing := apiread.Result[*topolvm.LogicalVolume]{Missing: true}
	lost := &logicalFact{lv: missing, handle: "id"}
	const works, lv = "Node \"n\" of the LogicalVolume is Ready, and has 4Ki available", "LogicalVolume lv on node n of device class ssd "
	for name, tt := range map[string]struct {
		facts facts
		want  []finding.Finding // with the begins of the texts
	}{
		"another driver": {facts{}, nil},
		"exists": {facts{logical: &logicalFact{lv: logicalVolume(func(*topolvm.LogicalVolume) {})}}, []finding.Finding{
			{Severity: finding.OK, Message: lv + "exists: requested size 1Gi, current size 1Gi."}}},
		"waits": {facts{logical: &logicalFact{lv: logicalVolume(waits), node: ready}},
			[]finding.Finding{{Severity: finding.OK, Message: works},
				{Severity: finding.Waiting, Message: lv + "has no LVM volume yet", Next: `topolvm-node on node "n" creates the LVM volume.`}}},
		"the size is not reported": {facts{logical: &logicalFact{node: ready,
			lv: logicalVolume(func(lv *topolvm.LogicalVolume) { lv.Status.CurrentSize = 0 })}},
			[]finding.Finding{{Severity: finding.OK, Message: works},
				{Severity: finding.Waiting, Message: lv + "has no LVM volume yet", Next: "topolvm-node"}}},
		"waits for a node that is not Ready": {facts{logical: &logicalFact{lv: logicalVolume(waits),
			node: nodeWith(corev1.ConditionUnknown, "ssd")}}, []finding.Finding{
			{Severity: finding.Failing, Message: `The LogicalVolume waits for topolvm-node on node "n", which is not Ready.`,
				Next: `Bring node "n" back`},
			{Severity: finding.Waiting, Message: lv, Next: "topolvm-node"}}},
		"waits for a node without the class": {facts{logical: &logicalFact{lv: logicalVolume(waits),
			node: nodeWith(corev1.ConditionTrue, "hdd")}}, []finding.Finding{
			{Severity: finding.Failing, Message: `Node "n" of the LogicalVolume reports no capacity of its device class.`, Next: "Check that"},
			{Severity: finding.Waiting, Message: lv, Next: "topolvm-node"}}},
		"waits for a node that does not exist": {facts{logical: &logicalFact{lv: logicalVolume(waits),
			node: apiread.Result[*corev1.Node]{Missing: true}}}, []finding.Finding{
			{Severity: finding.Failing, Message: `Node "n" of the LogicalVolume does not exist.`, Next: "Bring the node back"},
			{Severity: finding.Waiting, Message: lv, Next: "topolvm-node"}}},
		"waits for a node that is being deleted": {facts{logical: &logicalFact{lv: logicalVolume(waits), node: leaving}}, []finding.Finding{
			{Severity: finding.Waiting, Message: `Node "n" of the LogicalVolume is being deleted.`, Next: "The node cleanup"},
			{Severity: finding.Waiting, Message: lv, Next: "topolvm-node"}}},
		"waits for a node that cannot be read": {facts{logical: &logicalFact{lv: logicalVolume(waits)}}, []finding.Finding{
			{Severity: finding.Waiting, Message: lv, Next: "topolvm-node"}}},
		"the creation failed": {facts{logical: &logicalFact{node: ready,
			lv: logicalVolume(func(lv *topolvm.LogicalVolume) { waits(lv); failing(lv) })}},
			[]finding.Finding{{Severity: finding.OK, Message: works},
				{Severity: finding.Failing,
					Message: lv + "has no LVM volume yet (requested size 1Gi, current size 0). topolvm-node failed with " +
						"code ResourceExhausted: no space", Next: "The driver deletes the LogicalVolume, and creates it again. Fix"}}},
		"expands": {facts{logical: &logicalFact{lv: logicalVolume(grows), node: ready}},
			[]finding.Finding{{Severity: finding.OK, Message: works},
				{Severity: finding.Waiting, Message: lv + "is being expanded: requested size 2Gi, current size 1Gi",
					Next: "topolvm-node"}}},
		"the expansion failed": {facts{logical: &logicalFact{node: ready,
			lv: logicalVolume(func(lv *topolvm.LogicalVolume) { grows(lv); failing(lv) })}},
			[]finding.Finding{{Severity: finding.OK, Message: works},
				{Severity: finding.Failing, Message: lv + "is being expanded", Next: "Retries automatically. Fix"}}},
		"an earlier expansion failed": {facts{logical: &logicalFact{node: ready, lv: logicalVolume(failing)}}, []finding.Finding{
			{Severity: finding.OK, Message: lv + "exists"}}},
		"is deleted": {facts{logical: &logicalFact{lv: logicalVolume(deleted), node: nodeWith(corev1.ConditionTrue, "hdd")}},
			[]finding.Finding{
				{Severity: finding.Waiting, Message: lv + "has been Terminating for 60m", Next: `topolvm-node on node "n" removes`}}},
		"is deleted by the node cleanup": {facts{driver: topolvm.Driver, logical: &logicalFact{
			lv: logicalVolume(func(lv *topolvm.LogicalVolume) { lv.Annotations["topolvm.io/pendingdeletion"] = "true" })}},
			[]finding.Finding{
				{Severity: finding.Waiting, Message: "The node cleanup deletes LogicalVolume lv", Next: "The node cleanup"}}},
		"not requested": {facts{claim: apiread.Found(pending), logical: &logicalFact{lv: missing}}, []finding.Finding{
			{Severity: finding.Waiting, Message: `LogicalVolume "" does not exist`}}},
		"of a snapshot": {facts{snapshot: snapshot, logical: &logicalFact{lv: missing}}, []finding.Finding{
			{Severity: finding.Waiting, Message: `LogicalVolume "" does not exist`}}},
		"no PersistentVolume": {facts{claim: apiread.Found(bound), logical: &logicalFact{lv: missing}}, nil},
		"lost": {facts{logical: lost}, []finding.Finding{
			{Severity: finding.Blocked, Message: "No LogicalVolume has the ID id", Next: "Recreate"}}},
		"a lost snapshot": {facts{snapshot: snapshot, logical: lost}, []finding.Finding{
			{Severity: finding.Blocked, Message: "No LogicalVolume", Next: "Recreate"}}},
		"lost, and retained": {facts{volume: apiread.Found(retained), logical: lost}, []finding.Finding{
			{Severity: finding.Blocked, Message: "No LogicalVolume", Next: "Recreate"}}},
		"deleted, as intended": {facts{volume: apiread.Found(released), logical: lost}, []finding.Finding{
			{Severity: finding.OK, Message: "LogicalVolume with ID id does not exist any more."}}},
		"no CustomResourceDefinition": {facts{logical: &logicalFact{handle: "id", lv: unserved}}, []finding.Finding{
			{Severity: finding.Blocked, Message: "The cluster does not serve LogicalVolumes", Next: "Install"}}},
	} {
		t.Run(name, func(t *testing.T) {
			tt.facts.now = now
			if tt.facts.driver == "" {
				tt.facts.driver = topolvm.Driver
			}
			e := &explanation{facts: &tt.facts}
			explainLogicalVolume(e)
			if len(e.findings) != len(tt.want) {
				t.Fatalf("got %+v", e.findings)
			}
			for i, want := range tt.want {
				got := e.findings[i]
				isNext := strings.HasPrefix(got.Next, want.Next) && (got.Next == "") == (want.Next == "")
				if got.Severity != want.Severity || !strings.HasPrefix(got.Message, want.Message) || !isNext {
					t.Errorf("got %+v, want %+v", got, want)
				}
			}
		})
	}
}

// TestUnreadableLogicalVolume: one that cannot be decoded may be the one with the ID, which is not reported as lost.
func TestUnreadableLogicalVolume(t *testing.T) {
	other := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"uid": "other"}}}
	unreadable := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"uid": "id"}, "spec": "a text"}}
	for _, tt := range []struct {
		all     apiread.Result[[]*unstructured.Unstructured]
		missing bool
	}{
		{apiread.Found([]*unstructured.Unstructured{other}), true},
		{apiread.Found([]*unstructured.Unstructured{unreadable, other}), false},
		{apiread.Result[[]*unstructured.Unstructured]{}, false}, // the list failed
	} {
		if got := withID(tt.all, "id"); got.Missing != tt.missing || got.Found {
			t.Errorf("%+v", got)
		}
	}
}

// TestLogicalVolumeIsRead: it is found by the name of the claim's volume, or else by the handle, with few requests. Without the permission
// it is unknown.
func TestLogicalVolumeIsRead(t *testing.T) {
	cp := kubetest.Get(t)
	topolvmtest.Install(t, cp.Client(), topolvm.Driver)
	ns, ctx, client := kubetest.Namespace(t, cp), t.Context(), cp.Client()
	lvs, err := topolvm.NewClient(cp.Config(), topolvm.Driver)
	if err != nil {
		t.Fatal(err)
	}
	if err := kubetest.CreateNode(ctx, client, kubetest.NodeSpec{Name: ns + "-node", Labels: map[string]string{
		topolvm.TopologyKey(topolvm.Driver): ns + "-value"}}); err != nil {
		t.Fatal(err)
	}
	class := ns + "-class"
	_, err = client.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class},
		Provisioner: topolvm.Driver}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	gibibyte := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	claim, err := client.CoreV1().PersistentVolumeClaims(ns).Create(ctx, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Annotations: map[string]string{
			"volume.kubernetes.io/storage-provisioner": topolvm.Driver}},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class, AccessModes: modes,
			Resources: corev1.VolumeResourceRequirements{Requests: gibibyte}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	create := func(name string) *topolvm.LogicalVolume {
		t.Helper()
		lv, err := lvs.Create(ctx, &topolvm.LogicalVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: topolvm.Spec{Name: name, NodeName: ns + "-value", Size: 1 << 30}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return lv
	}
	var lists atomic.Int32
	var refused atomic.Bool
	cfg := kubetest.Proxy(t, cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if strings.HasSuffix(r.URL.Path, "/logicalvolumes") {
			lists.Add(1)
		}
		if refused.Load() && strings.Contains(r.URL.Path, "/logicalvolumes") {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		pass.ServeHTTP(w, r)
	})
	shows := func(kind, name string, wantLists int32, want string) {
		t.Helper()
		lists.Store(0)
		report, err := Explain(ctx, clientsOf(t, cfg), Request{Kind: kind, Namespace: ns, Name: name})
		if err != nil {
			t.Fatal(err)
		}
		text := report.Text()
		want = strings.ReplaceAll(want, "SCENE", ns)
		if !strings.Contains(text, want) || lists.Load() != wantLists {
			t.Errorf("%d lists, missing: %s\n%s", lists.Load(), want, text)
		}
	}
	name := "pvc-" + string(claim.UID)
	shows(KindClaim, "data", 0, `LogicalVolume "`+name+`" does not exist`)
	lv := create(name)
	shows(KindClaim, "data", 0, "LogicalVolume "+name+" on node SCENE-value of the default device class has no LVM volume yet")
	shows(KindClaim, "data", 0, `failing  node        Node "SCENE-node" of the LogicalVolume reports no capacity of its device class.`)
	imported := create(ns + "-imported")
	for name, handle := range map[string]string{ns + "-a": string(lv.UID), ns + "-b": string(imported.UID), ns + "-c": "gone"} {
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
		pv.Spec.Capacity, pv.Spec.AccessModes = gibibyte, modes
		pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: topolvm.Driver, VolumeHandle: handle}
		if _, err := client.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	shows(KindVolume, ns+"-a", 1, "LogicalVolume "+name+" on node")
	shows(KindVolume, ns+"-b", 1, "LogicalVolume SCENE-imported on node")
	shows(KindVolume, ns+"-c", 1, "blocked  volume      No LogicalVolume has the ID gone")
	refused.Store(true)
	shows(KindClaim, "data", 0, `unknown  volume      Cannot get LogicalVolume "`+name+`": permission denied.`)
}
