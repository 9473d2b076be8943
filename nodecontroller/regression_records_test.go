package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// lookedForRecords has the controller look at an absent node, whose grace is over, once
// more, here and now.
func (f *fixture) lookedForRecords(node string) {
	f.Helper()
	f.seenGone(node)
	begin := time.Now()
	_, err := f.term().syncNode(f.Context(), f.name(node)) // from when on its grace counts at the latest
	f.must(err)
	f.passed(begin, 2*f.cfg.NodeMissingGrace)
	_, err = f.term().syncNode(f.Context(), f.name(node))
	f.must(err)
}

// there checks that custom resources still are, and that nothing has asked them to go.
func (f *fixture) there(records dynamic.NamespaceableResourceInterface, names ...string) {
	f.Helper()
	for _, name := range names {
		obj, err := records.Get(f.Context(), name, metav1.GetOptions{})
		if err != nil || obj.GetDeletionTimestamp() != nil || len(obj.GetFinalizers()) == 0 {
			f.Errorf("custom resource %s: %v, %v", name, obj, err)
		}
	}
}

// recordsLeft is the number of custom resources that exist.
func recordsLeft(records dynamic.NamespaceableResourceInterface) (int, error) {
	list, err := records.List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	return len(list.Items), nil
}

func (f *fixture) optOutNamespace() {
	f.Helper()
	_, err := f.client.CoreV1().Namespaces().Patch(f.Context(), f.ns, types.MergePatchType, annotationsPatch(map[string]any{f.ann.cleanup: disabled}), metav1.PatchOptions{})
	f.must(err)
}

// unclaimed is a volume of a node whose claim is gone.
func (f *fixture) unclaimed(name, node string) {
	f.Helper()
	pv := f.volume("pv-"+name, []string{node}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: f.ns, Name: name, UID: "old"}
	})
	f.phase(pv, corev1.VolumeReleased)
}

// TestRecordsOfVolumesThatStay has custom resources of nodes whose volumes somebody wants
// to keep: they may be what the driver finds the data by.
func TestRecordsOfVolumesThatStay(t *testing.T) {
	t.Run("of_a_node_that_is_deleted", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupRetain = RetainSkip })
		records := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.node("m", f.cfg.NodeFinalizer)
		_, kept := f.boundTo("a", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = disabled })
		_, retained := f.boundTo("r", []string{"m"}, func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}, nil)
		f.logicalVolume(records, "lva", "n")
		f.logicalVolume(records, "lvr", "m")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.seen("pv-r", placeHealthy)
		f.deleteNode("n")
		f.deleteNode("m")
		f.nodeGone("n")
		f.nodeGone("m")
		f.untouched(kept, retained)
		f.there(records, "lva", "lvr")
		f.lookedForRecords("n")
		f.lookedForRecords("m")
		f.there(records, "lva", "lvr")
	})
	t.Run("of_a_namespace_that_has_opted_out", func(t *testing.T) {
		f := scenario(t, parity)
		records := f.installLogicalVolumes()
		f.optOutNamespace()
		f.node("n")
		f.unclaimed("a", "n")
		f.logicalVolume(records, "lv", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n")
		f.seen("pv-a", placeOrphan)
		f.term().namespaces.forgetAll() // as in a term that has just begun
		f.lookedForRecords("n")
		f.there(records, "lv")
	})
	t.Run("that_nobody_has_opted_in", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupScope = ScopeOptIn })
		records := f.installLogicalVolumes()
		f.node("n")
		f.unclaimed("a", "n")
		f.logicalVolume(records, "lv", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n")
		f.seen("pv-a", placeOrphan)
		f.lookedForRecords("n")
		f.there(records, "lv")
		f.patchClass("c", map[string]any{f.ann.cleanup: enabled})
		f.lookedForRecords("n")
		kubetest.Eventually(t, "the record of what was opted in is gone", gone(records, "lv"))
	})
}

// TestOptOutOfANodeOutlivesIt has a node that has said no, and that is gone.
func TestOptOutOfANodeOutlivesIt(t *testing.T) {
	f := scenario(t, parity)
	records := f.installLogicalVolumes()
	f.node("n", f.cfg.NodeFinalizer)
	f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
	pvc := f.selecting("a", "n")
	f.logicalVolume(records, "lv", "n")
	f.start()
	f.seenNode("n", false)
	f.deleteNode("n")
	f.nodeGone("n")
	f.lookedForRecords("n")
	f.untouched(pvc)
	f.there(records, "lv")
	if f.event("PersistentVolumeClaim", "a", reasonSkipped, "when it went"); f.term().ledger.isPending(keyOfClaims(f.name("n"))) {
		t.Error("the breaker counts what nobody wants cleaned up")
	}

	// The next leader in this process knows, and so does a standby.
	later, err := f.c.newTerm()
	f.must(err)
	defer later.close()
	if closed, err := later.gatesOfAbsent(t.Context(), f.name("n")); err != nil || len(closed) != 1 || closed[0].gate != gateScope {
		t.Errorf("got %v, %v", closed, err)
	}

	f.node("n") // it is back, and says nothing
	f.seenNode("n", false)
	f.deleteNode("n")
	f.lookedForRecords("n")
	f.claimDeleted("a")
	kubetest.Eventually(t, "the record is gone", gone(records, "lv"))
}

// fourGone has four of five nodes gone at once, of which nothing but what each of make
// leaves behind tells.
func fourGone(t *testing.T, change func(f *fixture), make func(f *fixture, node string)) *fixture {
	t.Helper()
	f := scenario(t, change)
	nodes := []string{"n1", "n2", "n3", "n4"}
	for _, n := range nodes {
		f.node(n)
	}
	f.start()
	f.seenNode("n4", false)
	for _, n := range nodes {
		make(f, n)
	}
	for _, n := range nodes {
		f.deleteNode(n)
	}
	return f
}

func TestBreakerCountsRecords(t *testing.T) {
	var records dynamic.NamespaceableResourceInterface
	f := fourGone(t, func(f *fixture) {
		parity(f)
		f.cfg.NodeCleanupResourceSweep = shortGrace
		records = f.installLogicalVolumes()
	}, func(f *fixture, node string) { f.logicalVolume(records, "lv"+node, node) })
	f.event("CSIDriver", f.driver, reasonBreakerOpen, "")
	f.gauge(breakerOpen, 1)
	for _, n := range []string{"n1", "n2", "n3", "n4"} {
		f.lookedForRecords(n)
	}
	left, err := recordsLeft(records)
	f.must(err)
	if left < 3 {
		t.Errorf("%d records of 4 are left without an approval", left)
	}
	f.approve(f.name("n1")+","+f.name("n2")+","+f.name("n3")+","+f.name("n4"), "")
	kubetest.Eventually(t, "all records are gone", func(context.Context) error {
		left, err := recordsLeft(records)
		if left > 0 {
			err = fmt.Errorf("%d are left", left)
		}
		return err
	})
	f.gauge(breakerOpen, 0)
}

func TestBreakerHoldsUnboundClaims(t *testing.T) {
	claims := map[string]*corev1.PersistentVolumeClaim{}
	f := fourGone(t, func(f *fixture) { f.cfg.NodeCleanupUnbound = UnboundDelete }, func(f *fixture, node string) {
		claims[node] = f.selecting("c"+node, node)
	})
	f.event("CSIDriver", f.driver, reasonBreakerOpen, "")
	f.gauge(breakerOpen, 1)
	// Three are dealt with by hand, so that the count alone would let the last one go on.
	for _, n := range []string{"n2", "n3", "n4"} {
		f.must(f.client.CoreV1().PersistentVolumeClaims(f.ns).Delete(t.Context(), "c"+n, metav1.DeleteOptions{}))
		term := f.term()
		kubetest.Eventually(t, "the claim is seen as gone", func(context.Context) error {
			if term.ledger.has(keyOfClaims(f.name(n))) {
				return errors.New("it is not")
			}
			return nil
		})
	}
	f.lookedForRecords("n1")
	f.untouched(claims["n1"])
	f.gauge(breakerOpen, 1)
	f.approve(f.name("n1"), "")
	f.claimDeleted("cn1")
	f.gauge(breakerOpen, 0)
	if n := len(f.events("CSIDriver", f.driver, reasonBreakerOpen)); n != 1 {
		t.Errorf("told %d times of one trip", n)
	}
}

// TestOptOutWhileTheKeyIsUnknown has a node go that has opted out, while nobody knows which
// volumes are on it.
func TestOptOutWhileTheKeyIsUnknown(t *testing.T) {
	rival := func(f *fixture) {
		f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{Name: f.name("new"), Driver: f.driver, TopologyKeys: []string{"new-" + f.key}}))
		f.keyIs("")
	}
	for name, finalizer := range map[string]bool{"with_our_finalizer": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, nil)
			f.node("n")
			if finalizer {
				f.patchNode("n", `{"metadata":{"finalizers":["`+f.cfg.NodeFinalizer+`"]}}`)
			}
			f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
			_, pvc := f.bound("a", "n")
			f.start()
			f.seen("pv-a", placeHealthy)
			rival(f)
			f.deleteNode("n")
			f.nodeGone("n")
			f.seenGone("n")
			f.deleteNode("new")
			f.keyIs(f.key)
			f.staysFor(2*shortGrace, "pv-a", placeOrphan, pvc)
			f.untilVolume("pv-a", "has the opt-out of its node", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.cleanup] == disabled })
		})
	}
	t.Run("and_the_key_is_set", func(t *testing.T) { // as the event advises
		f := scenario(t, nil)
		f.node("n", f.cfg.NodeFinalizer)
		f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
		_, pvc := f.bound("a", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		rival(f)
		f.deleteNode("n")
		f.nodeGone("n")
		f.stop()
		f.cfg.TopologyNodeKey = f.key
		f.start()
		f.staysFor(2*shortGrace, "pv-a", placeOrphan, pvc)
	})
	t.Run("volume_that_is_saved_later", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
		f.start()
		f.seenNode("n", false)
		f.deleteNode("n")
		f.seenGone("n")
		_, pvc := f.bound("a", "n")
		f.staysFor(2*shortGrace, "pv-a", placeOrphan, pvc)
	})
	t.Run("one_of_two_nodes", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMinNodes = 5 })
		f.node("n", f.cfg.NodeFinalizer)
		f.node("m", "example.com/other")
		f.patchNode("m", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
		_, pvc := f.boundTo("a", []string{"n", "m"}, nil, nil)
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("m")
		f.seenNode("m", true)
		f.deleteNode("n")
		f.nodeGone("n")
		f.untouched(pvc)
		f.untilVolume("pv-a", "has the opt-out of the node", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.cleanup] == disabled })
		f.patchNode("m", `{"metadata":{"finalizers":null}}`)
		f.nodeGone("m")
		f.staysFor(2*shortGrace, "pv-a", placeOrphan, pvc)
	})
}

// TestRecordsOfAnotherName has custom resources that belong to volumes although these do
// not name their node as the driver does now.
func TestRecordsOfAnotherName(t *testing.T) {
	t.Run("node_that_was_renamed", func(t *testing.T) {
		f := scenario(t, parity)
		records := f.installLogicalVolumes()
		f.labelled("old", "id")
		_, pvc := f.bound("a", "id")
		f.logicalVolume(records, "lv", "old")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("old")
		f.labelled("renamed", "id")
		f.lookedForRecords("old")
		f.seen("pv-a", placeHealthy)
		f.untouched(pvc)
		f.there(records, "lv")
	})
	t.Run("volume_with_another_key", func(t *testing.T) {
		f := scenario(t, parity)
		records := f.installLogicalVolumes()
		f.node("n")
		_, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = "legacy-" + f.key
		}, nil)
		f.logicalVolume(records, "lv", "n")
		f.start()
		f.seenNode("n", false)
		f.deleteNode("n")
		f.lookedForRecords("n")
		f.untouched(pvc)
		f.there(records, "lv")
	})
}

// TestRecordsAreJudgedLive has a class opt out that the cache does not know of.
func TestRecordsAreJudgedLive(t *testing.T) {
	f := scenario(t, parity)
	f.watch = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.URL.Query().Get("watch") == "" || !strings.Contains(r.URL.Path, "storageclasses") {
			pass.ServeHTTP(w, r)
			return
		}
		if r.URL.Query().Get("sendInitialEvents") != "" { // list, then
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
			return
		}
		<-r.Context().Done()
	})
	records := f.installLogicalVolumes()
	f.node("n")
	f.unclaimed("a", "n")
	f.logicalVolume(records, "lv", "n")
	f.start()
	f.seen("pv-a", placeHealthy)
	f.patchClass("c", map[string]any{f.ann.cleanup: disabled})
	f.deleteNode("n")
	f.seen("pv-a", placeOrphan)
	f.lookedForRecords("n")
	f.there(records, "lv")
}

func TestNamespaceThatRefusesIsRemembered(t *testing.T) {
	f := scenario(t, nil)
	f.optOutNamespace()
	f.node("n")
	_, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Annotations[f.ann.cleanup] = disabled }, nil)
	f.start()
	f.seen("pv-a", placeHealthy)
	_, err := f.term().refresh(t.Context(), f.term().look(f.name("pv-a")), false)
	f.must(err)
	if f.term().namespaces.optedOut(&corev1.ObjectReference{Namespace: f.ns}) == "" {
		t.Error("the volume has opted out itself, and so its namespace is forgotten")
	}
	f.untouched(pvc)
}

// TestOnlyTheFinalizerPath leaves the orphans alone, and does not count them.
func TestOnlyTheFinalizerPath(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupPaths = []string{PathFinalizer} })
	f.node("g")
	_, kept := f.bound("g", "g")
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	f.start()
	f.seen("pv-g", placeHealthy)
	f.seen("pv-a", placeHealthy)
	f.deleteNode("g")
	f.staysFor(2*shortGrace, "pv-g", placeOrphan, kept)
	if _, st := f.term().gather(f.name("pv-g")); st.action.destroys() {
		t.Errorf("decided on %s", st.action)
	}
	f.deleteNode("n")
	f.claimDeleted("a")
	f.nodeGone("n")
	f.untouched(kept)
}

// TestNodeThatWasLetGo has somebody take our finalizer away while the node goes.
func TestNodeThatWasLetGo(t *testing.T) {
	f := scenario(t, nil)
	f.node("n", "example.com/other")
	f.bound("a", "n")
	f.start()
	f.seen("pv-a", placeHealthy)
	f.deleteNode("n")
	f.seenNode("n", true)
	node, _ := f.term().nodes.Get(f.name("n"))
	if closed, err := f.term().gatesOfNode(t.Context(), node); err != nil || len(closed) != 1 || closed[0].reason != "NodeReleased" {
		t.Errorf("got %v, %v", closed, err)
	}
	f.patchNode("n", `{"metadata":{"finalizers":null}}`)
}

// TestFencedNodeHasOptedOut has a node that is fenced and declared lost, and says no.
func TestFencedNodeHasOptedOut(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupOutOfService = true })
	f.node("n")
	f.patchNode("n", `{"status":{"conditions":[{"type":"Ready","status":"False","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
	f.patchNode("n", `{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","value":"x","effect":"NoSchedule","timeAdded":"2020-01-01T00:00:00Z"}]}}`)
	f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.localData: dataLost, f.ann.cleanup: disabled})))
	_, pvc := f.bound("a", "n")
	f.start()
	f.staysFor(2*shortGrace, "pv-a", placeFenced, pvc)
	f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: nil})))
	f.claimDeleted("a")
}

// TestNextLeaderKnowsWhoOptedOut has a node with volumes go while nobody leads, so that
// nothing is written on them.
func TestNextLeaderKnowsWhoOptedOut(t *testing.T) {
	f := scenario(t, nil)
	f.labelled("n", "id")
	f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
	_, pvc := f.bound("a", "id")
	p := f.prepare(f.user)
	kubetest.Eventually(t, "the node is seen", func(context.Context) error {
		if _, ok := p.c.nodes.Get(f.name("n")); !ok {
			return errors.New("it is not")
		}
		return nil
	})
	f.deleteNode("n")
	kubetest.Eventually(t, "the node is seen as gone", func(context.Context) error {
		if !p.c.departed.optedOut(f.name("n")) {
			return errors.New("it is not")
		}
		return nil
	})
	f.c = p.c
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.c.Run(ctx) }()
	f.staysFor(2*shortGrace, "pv-a", placeOrphan, pvc)
	f.untilVolume("pv-a", "says that its node has opted out", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.cleanup] == disabled })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
