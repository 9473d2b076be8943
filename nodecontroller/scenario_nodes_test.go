package nodecontroller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// parity is what the profile topolvm sets, for a driver of another name.
func parity(f *fixture) {
	f.cfg.NodeCleanupUnbound, f.cfg.NodeCleanupRetain = UnboundDelete, RetainClaim
	f.cfg.NodeCleanupResource = []string{"resource=" + logicalVolumes(f).Resource + ".v1." + logicalVolumes(f).Group +
		",node-field=spec.nodeName,finalizer=" + f.driver + "/logicalvolume,mark=" + f.driver + "/pendingdeletion=true,when=node-terminating"}
}

// logicalVolumes is a kind of its own for each scenario: the sweep of one must not meet
// the records of another.
func logicalVolumes(f *fixture) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: f.driver, Version: "v1", Resource: "logicalvolumes"}
}

// installLogicalVolumes makes that kind.
func (f *fixture) installLogicalVolumes() dynamic.NamespaceableResourceInterface {
	f.Helper()
	r := logicalVolumes(f)
	body, err := json.Marshal(map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": r.Resource + "." + r.Group},
		"spec": map[string]any{
			"group": r.Group, "scope": "Cluster", "names": map[string]any{"kind": "LogicalVolume", "plural": r.Resource},
			"versions": []any{map[string]any{"name": r.Version, "served": true, "storage": true, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}},
		},
	})
	f.must(err)
	f.must(f.client.Discovery().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Content-Type", "application/json").Body(body).Do(f.Context()).Error())
	client, err := dynamic.NewForConfig(f.cp.Config())
	f.must(err)
	kubetest.Eventually(f.T, "LogicalVolumes are served", func(ctx context.Context) error {
		_, err := client.Resource(r).List(ctx, metav1.ListOptions{})
		return err
	})
	return client.Resource(r)
}

func (f *fixture) logicalVolume(client dynamic.NamespaceableResourceInterface, name, node string) *unstructured.Unstructured {
	f.Helper()
	r := logicalVolumes(f)
	obj := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": r.GroupVersion().String(), "kind": "LogicalVolume", "metadata": map[string]any{"name": name, "finalizers": []any{f.driver + "/logicalvolume"}},
		"spec": map[string]any{"nodeName": f.name(node)},
	}}
	obj, err := client.Create(f.Context(), obj, metav1.CreateOptions{})
	f.must(err)
	return obj
}

func (f *fixture) selecting(name, node string) *corev1.PersistentVolumeClaim {
	f.Helper()
	return f.claim(name, func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Annotations = map[string]string{storagehelpers.AnnSelectedNode: f.name(node)}
	})
}

func gone(client dynamic.NamespaceableResourceInterface, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := client.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("it is there"))
	}
}

// marked checks how a record was when it went: marked, and with nothing that holds it.
func (f *fixture) marked(records dynamic.NamespaceableResourceInterface, was *unstructured.Unstructured) {
	f.Helper()
	w, err := records.Watch(f.Context(), metav1.ListOptions{ResourceVersion: was.GetResourceVersion()})
	f.must(err)
	defer w.Stop()
	last := was
	for e := range w.ResultChan() {
		if obj, ok := e.Object.(*unstructured.Unstructured); ok && obj.GetName() == was.GetName() {
			if last = obj; e.Type == watch.Deleted {
				break
			}
		}
	}
	if last.GetAnnotations()[f.driver+"/pendingdeletion"] != "true" || len(last.GetFinalizers()) > 0 {
		f.Errorf("it was deleted as %v", last)
	}
}

// cleanedUp waits until claim a and the record of node n are gone, which has begun at begin,
// and checks that the record of another node is what it was.
func (f *fixture) cleanedUp(records dynamic.NamespaceableResourceInterface, record, other *unstructured.Unstructured, begin time.Time) {
	f.Helper()
	f.nodeGone("n")
	f.claimDeleted("a")
	kubetest.Eventually(f.T, "the record is gone", gone(records, "lv"))
	f.soon("all is gone", begin, 10*time.Second)
	f.marked(records, record)
	is, err := records.Get(f.Context(), "other", metav1.GetOptions{})
	f.must(err)
	if is.GetResourceVersion() != other.GetResourceVersion() {
		f.Errorf("the record of another node: %v", is)
	}
}

func TestNodecontrollerScenarioNodes(t *testing.T) {
	t.Run("007_claims_and_resources", func(t *testing.T) {
		f := scenario(t, parity)
		records := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.selecting("a", "n")
		record := f.logicalVolume(records, "lv", "n")
		other := f.logicalVolume(records, "other", "keep")
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH logicalvolumes/lv", "DELETE logicalvolumes/lv", "PATCH nodes/n")
		f.start()
		f.seenNode("n", false)
		begin := time.Now()
		f.deleteNode("n")
		f.cleanedUp(records, record, other, begin)
	})
	t.Run("008_skip", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.SkipNodeFinalize = true })
		records := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		pvc, record := f.selecting("a", "n"), f.logicalVolume(records, "lv", "n")
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeGone("n")
		f.untouched(pvc)
		is, err := records.Get(t.Context(), "lv", metav1.GetOptions{})
		f.must(err)
		if is.GetResourceVersion() != record.GetResourceVersion() {
			t.Errorf("the record was changed: %v", is)
		}
	})
	t.Run("009_other_class", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		other := f.claim("other", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Annotations = map[string]string{storagehelpers.AnnSelectedNode: f.name("n")}
			*pvc.Spec.StorageClassName = "of-nobody"
		})
		none := f.claim("none", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Annotations = map[string]string{storagehelpers.AnnSelectedNode: f.name("n")}
			pvc.Spec.StorageClassName = nil
		})
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeGone("n")
		f.untouched(other, none)
	})
	t.Run("010_affinity_mismatch", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		f.node("m")
		pv, pvc := f.boundTo("a", []string{"m"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[storagehelpers.AnnSelectedNode] = f.name("n") })
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeGone("n")
		f.event("PersistentVolumeClaim", "a", reasonSkipped, "AffinityMismatch")
		f.untouched(pv, pvc)
	})
	t.Run("011_086_bound_pair_and_its_pod", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("a", "n")
		pod := f.pod("p", "a", f.name("n"))
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeGone("n")
		f.claimDeleted("a")
		f.untouched(pod)
		f.untilVolume("pv-a", "names the node", func(pv *corev1.PersistentVolume) bool {
			return pv.Annotations[f.ann.lostNode] == f.name("n") && pv.Annotations[f.ann.lostNodeUID] != "" && pv.DeletionTimestamp == nil
		})
		if len(f.getClaim("a").Finalizers) != 1 {
			t.Error("the protection of the claim is not the controller's to remove")
		}
	})
	t.Run("012_finalizer_twice", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer, "x.example.com/other", f.cfg.NodeFinalizer)
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		kubetest.Eventually(t, "only the other finalizer is left", func(ctx context.Context) error {
			node, err := f.client.CoreV1().Nodes().Get(ctx, f.name("n"), metav1.GetOptions{})
			if err == nil && !slices.Equal(node.Finalizers, []string{"x.example.com/other"}) {
				err = fmt.Errorf("finalizers %v", node.Finalizers)
			}
			return err
		})
	})
	t.Run("013_manage", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
		f.node("n")
		f.node("m") // without a volume
		pv := f.volume("v", []string{"n"}, nil)
		f.onlyWrites("PATCH nodes/keep", "PATCH nodes/n", "PATCH nodes/m")
		f.start()
		f.finalizers("n", f.cfg.NodeFinalizer)
		f.finalizers("m", f.cfg.NodeFinalizer)
		begin := time.Now()
		for _, n := range []string{"n", "m"} {
			_, err := f.client.StorageV1().CSINodes().Patch(t.Context(), f.name(n), "application/merge-patch+json", []byte(`{"spec":{"drivers":[]}}`), metav1.PatchOptions{})
			f.must(err)
		}
		kubetest.Eventually(t, "the driver is seen leaving", func(context.Context) error {
			if f.term().index.hasDriver(f.name("n")) {
				return errors.New("it is there")
			}
			return nil
		})
		f.passed(begin, shortGrace+time.Second)
		f.finalizers("m")
		if writes := f.asked("PATCH nodes/m"); writes[len(writes)-1].Sub(begin) < shortGrace {
			t.Errorf("removed %v after the driver had left, want %v at least", writes[len(writes)-1].Sub(begin), shortGrace)
		}
		_, err := f.term().syncNode(t.Context(), f.name("n"))
		f.must(err)
		f.finalizers("n", f.cfg.NodeFinalizer) // its volume is there
		f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		_, err = f.client.CoreV1().PersistentVolumes().Patch(t.Context(), pv.Name, "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		f.must(err)
		f.finalizers("n")
	})
	t.Run("014_manage_terminating", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
		f.node("n", "x.example.com/other")
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		node, err := f.client.CoreV1().Nodes().Get(t.Context(), f.name("n"), metav1.GetOptions{})
		f.must(err)
		f.onlyWrites("PATCH nodes/keep")
		f.start()
		f.finalizers("keep", f.cfg.NodeFinalizer)
		f.seenNode("n", true)
		_, err = f.term().syncNode(t.Context(), f.name("n"))
		f.must(err)
		f.untouched(node)
		// The server refuses such a patch, so the Node alone does not tell whether one came.
		if n := len(f.asked("PATCH nodes/n")); n > 0 {
			t.Errorf("%d patches were sent", n)
		}
		if n := f.failures(); n > 0 {
			t.Errorf("%v errors were counted", n)
		}
	})
	t.Run("015_wait_for_others", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerWaitForOthers = true })
		f.node("n", f.cfg.NodeFinalizer, "x.example.com/drain")
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.seenNode("n", true)
		_, err := f.term().syncNode(t.Context(), f.name("n"))
		f.must(err)
		f.untouched(pvc)
		f.finalizers("n", f.cfg.NodeFinalizer, "x.example.com/drain")
		f.patchNode("n", fmt.Sprintf(`{"metadata":{"finalizers":["%s"]}}`, f.cfg.NodeFinalizer))
		f.nodeGone("n")
		f.claimDeleted("a")
	})
	t.Run("015_only_a_ready_node_waits_for_others", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerWaitForOthers = true })
		f.node("n", f.cfg.NodeFinalizer, "x.example.com/drain")
		f.patchNode("n", `{"status":{"conditions":[{"type":"Ready","status":"Unknown","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
		f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("a")
		f.finalizers("n", "x.example.com/drain")
	})
	t.Run("016_timeout", func(t *testing.T) {
		f := scenario(t, func(f *fixture) {
			f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerTimeout, f.cfg.NodeMissingGrace = time.Hour, 5*time.Second, time.Hour
		})
		f.node("n", f.cfg.NodeFinalizer)
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		begin := time.Now()
		f.nodeGone("n")
		if d := time.Since(begin); d < 4*time.Second || d > 8*time.Second {
			t.Errorf("gone after %v", d)
		}
		f.event("Node", f.name("n"), reasonTimeout, "5s")
		f.seen("pv-a", placeOrphan)
		f.looks("pv-a")
		f.untouched(pvc)
	})
	t.Run("017_opt_out_outlives_the_node", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeDeleteGrace = time.Hour })
		f.node("n", f.cfg.NodeFinalizer)
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "PATCH nodes/n")
		// A process that dies between the two must not have let the node go first.
		var early atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/nodes/"+f.name("n")) {
				pv, err := f.client.CoreV1().PersistentVolumes().Get(r.Context(), f.name("pv-a"), metav1.GetOptions{})
				early.CompareAndSwap(false, err != nil || pv.Annotations[f.ann.cleanup] != disabled)
			}
			pass.ServeHTTP(w, r)
		})
		f.start()
		f.deleteNode("n")
		f.untilVolume("pv-a", "names the node", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.lostNode] != "" })
		f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
		f.nodeGone("n")
		if early.Load() {
			t.Error("the node was let go before its volume said that it has opted out")
		}
		f.untilVolume("pv-a", "is excepted", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.cleanup] == disabled })
		f.staysFor(shortGrace, "pv-a", placeOrphan, pvc)
	})
	t.Run("018_controller_starts_later", func(t *testing.T) {
		f := scenario(t, parity)
		records := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.selecting("a", "n")
		f.bound("b", "n")
		record := f.logicalVolume(records, "lv", "n")
		f.deleteNode("n")
		begin := time.Now()
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH logicalvolumes/lv", "DELETE logicalvolumes/lv", "PATCH persistentvolumes/pv-b", "DELETE persistentvolumeclaims/b", "PATCH nodes/n")
		f.start()
		f.nodeGone("n")
		f.claimDeleted("a")
		f.claimDeleted("b")
		kubetest.Eventually(t, "the record is gone", gone(records, "lv"))
		f.soon("all is gone", begin, 10*time.Second)
		f.marked(records, record)
	})
	t.Run("019_remove_finalizers", func(t *testing.T) {
		f := scenario(t, nil)
		for _, n := range []string{"a", "b", "c"} {
			f.node(n, f.cfg.NodeFinalizer, "x.example.com/other")
		}
		var out strings.Builder
		api := f.recorded()
		f.must(RemoveFinalizers(t.Context(), f.cfg, api, true, &out))
		for _, n := range []string{"a", "b", "c"} {
			f.finalizers(n, f.cfg.NodeFinalizer, "x.example.com/other")
		}
		f.must(RemoveFinalizers(t.Context(), f.cfg, api, false, &out))
		for _, n := range []string{"a", "b", "c"} {
			f.finalizers(n, "x.example.com/other")
		}
		f.onlyWrites("PATCH nodes/a", "PATCH nodes/b", "PATCH nodes/c")
		if got := strings.Count(out.String(), "\n"); got != 6 {
			t.Errorf("output %q", &out)
		}
	})
	t.Run("019_remove_finalizers_while_managed", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
		f.node("n")
		f.start()
		f.finalizers("n", f.cfg.NodeFinalizer)
		f.finalizers("keep", f.cfg.NodeFinalizer)
		lease, holder := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: f.cfg.LeaderElectionID, Namespace: f.ns}}, "replica-1"
		lease.Spec.HolderIdentity, lease.Spec.RenewTime = &holder, &metav1.MicroTime{Time: time.Now()}
		_, err := f.client.CoordinationV1().Leases(f.ns).Create(t.Context(), lease, metav1.CreateOptions{})
		f.must(err)
		var out strings.Builder
		err = RemoveFinalizers(t.Context(), f.cfg, f.client, false, &out)
		for _, want := range []string{"finalizer " + f.cfg.NodeFinalizer + " is back on 2 nodes", f.name("n"), "Lease " + f.ns + "/" + f.cfg.LeaderElectionID + ` is held by "replica-1"`, "--node-finalizer-mode=remove", "put there by nodecontroller.test"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %s", err, want)
			}
		}
	})
	t.Run("020_kind_not_installed", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		f.selecting("a", "n")
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.seenNode("n", false)
		begin := time.Now()
		f.deleteNode("n")
		f.nodeGone("n")
		f.claimDeleted("a")
		f.soon("all is gone", begin, 10*time.Second)
	})
	t.Run("087_breaker_is_open", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("x", "gone-x")
		f.bound("y", "gone-y")
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-x", "PATCH persistentvolumes/pv-y", "PATCH persistentvolumes/pv-a", "PATCH nodes/n")
		f.start()
		f.gauge("storage_controller_breaker_open", 1)
		begin := time.Now()
		f.deleteNode("n")
		f.nodeGone("n")
		f.soon("the node is gone", begin, 10*time.Second)
		pv := f.getVolume("pv-a")
		if pv.Annotations[f.ann.hold] != heldByBreak || pv.Annotations[f.ann.lostNode] != f.name("n") {
			t.Errorf("annotations %v", pv.Annotations)
		}
		f.event("Node", f.name("n"), reasonSkipped, "held")
		f.untouched(pvc)
	})
	t.Run("088_leaked_resources", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupResourceSweep = time.Second })
		records := f.installLogicalVolumes()
		kept := f.logicalVolume(records, "kept", "keep")
		f.logicalVolume(records, "leaked", "never")
		f.onlyWrites("PATCH logicalvolumes/leaked", "DELETE logicalvolumes/leaked")
		f.start()
		kubetest.Eventually(t, "the record is gone", gone(records, "leaked"))
		found := f.asked("GET logicalvolumes")[0]
		if d := f.asked("DELETE logicalvolumes/leaked")[0].Sub(found); d < shortGrace {
			t.Errorf("deleted %v after it was found, want %v at least", d, shortGrace)
		}
		is, err := records.Get(t.Context(), "kept", metav1.GetOptions{})
		f.must(err)
		if is.GetResourceVersion() != kept.GetResourceVersion() {
			t.Errorf("the record of a node that exists: %v", is)
		}
	})
}
