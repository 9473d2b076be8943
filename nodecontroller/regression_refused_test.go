package nodecontroller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// denied has every request of a method for objects whose path ends with suffix refused, as
// an admission webhook would. It returns how often that was.
func (f *fixture) denied(method, suffix string) *atomic.Int32 {
	f.Helper()
	n := new(atomic.Int32)
	f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method != method || !strings.HasSuffix(r.URL.Path, suffix) {
			pass.ServeHTTP(w, r)
			return
		}
		n.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"admission webhook denied the request","code":403}`))
	})
	return n
}

// atLeast waits until n has a value.
func (f *fixture) atLeast(n *atomic.Int32, want int32) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%d requests were refused", want), func(context.Context) error {
		if got := n.Load(); got < want {
			return fmt.Errorf("it is %d", got)
		}
		return nil
	})
}

// full has no room for another annotation: the API server refuses every note on it.
func full(pv *corev1.PersistentVolume) {
	pv.Annotations["x.y/z"] = strings.Repeat("x", 256*1024-150)
}

// unnamed is a released volume whose claimRef is not the name of a claim.
func (f *fixture) unnamed(name, node, namespace string) {
	f.Helper()
	pv := f.volume(name, []string{node}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: namespace, Name: "a", UID: "old"}
	})
	f.phase(pv, corev1.VolumeReleased)
}

// TestRefusedVolumeOfANode has one volume or claim of a node that is deleted be refused
// whatever is tried: the others have their turn all the same.
func TestRefusedVolumeOfANode(t *testing.T) {
	patient := func(f *fixture) { f.cfg.NodeFinalizerTimeout = 5 * time.Minute }
	t.Run("no_note_fits", func(t *testing.T) {
		f := scenario(t, patient)
		f.node("n", f.cfg.NodeFinalizer)
		_, kept := f.boundTo("a", []string{"n"}, full, nil)
		f.bound("b", "n")
		f.bound("c", "n")
		f.start()
		for _, pv := range []string{"pv-a", "pv-b", "pv-c"} {
			f.seen(pv, placeHealthy)
		}
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("b")
		f.claimDeleted("c")
		f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, "refuses")
		f.untouched(kept)
		f.finalizers("n", f.cfg.NodeFinalizer) // until the timeout: it may still be written
	})
	t.Run("the_opt_out_reaches_the_others", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerTimeout = 2 * shortGrace })
		f.node("n", f.cfg.NodeFinalizer)
		f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.cleanup: disabled})))
		f.boundTo("a", []string{"n"}, full, nil)
		_, b := f.bound("b", "n")
		_, c := f.bound("c", "n")
		f.start()
		for _, pv := range []string{"pv-a", "pv-b", "pv-c"} {
			f.seen(pv, placeHealthy)
		}
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.nodeGone("n")
		for _, pv := range []string{"pv-b", "pv-c"} {
			if got := f.getVolume(pv).Annotations[f.ann.cleanup]; got != disabled {
				t.Errorf("%s says %q when its node is let go", pv, got)
			}
		}
		f.stop() // with what it remembers
		f.must(f.client.StorageV1().CSINodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.start()
		f.staysFor(2*shortGrace, "pv-b", placeOrphan, b, c)
	})
	t.Run("no_claim_goes", func(t *testing.T) {
		f := scenario(t, patient)
		refused := f.denied(http.MethodDelete, "/persistentvolumeclaims/a")
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("a", "n")
		f.bound("b", "n")
		f.bound("c", "n")
		f.start()
		for _, pv := range []string{"pv-a", "pv-b", "pv-c"} {
			f.seen(pv, placeHealthy)
		}
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("b")
		f.claimDeleted("c")
		f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, "admission webhook denied")
		f.atLeast(refused, 2)
	})
	t.Run("the_driver_is_called_for_it", func(t *testing.T) {
		f := scenario(t, patient)
		f.node("n", f.cfg.NodeFinalizer)
		pv, kept := f.bound("a", "n")
		f.bound("b", "n")
		f.bound("c", "n")
		done, ok := f.locks.TryExclusive(pv.Spec.CSI.VolumeHandle)
		if !ok {
			t.Fatal("the lock is taken")
		}
		f.start()
		for _, pv := range []string{"pv-a", "pv-b", "pv-c"} {
			f.seen(pv, placeHealthy)
		}
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("b")
		f.claimDeleted("c")
		f.untouched(kept)
		done()
		f.claimDeleted("a")
		f.nodeGone("n")
	})
	t.Run("its_claim_cannot_be", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); patient(f) })
		records := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.unnamed("pv-bad", "n", "")
		f.logicalVolume(records, "r", "n")
		f.start()
		f.seen("pv-bad", placeHealthy)
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.nodeGone("n")
		kubetest.Eventually(t, "the record is gone", gone(records, "r"))
	})
}

// TestRefusedOfAnAbsentNode does the same for what is left of a node that is gone.
func TestRefusedOfAnAbsentNode(t *testing.T) {
	swept := func(f *fixture) { parity(f); f.cfg.NodeCleanupResourceSweep = time.Second }
	t.Run("a_claim_without_a_volume", func(t *testing.T) {
		f := scenario(t, swept)
		records := f.installLogicalVolumes()
		refused := f.denied(http.MethodDelete, "/persistentvolumeclaims/a")
		for _, claim := range []string{"a", "b", "c"} {
			f.selecting(claim, "n")
		}
		f.logicalVolume(records, "r", "n")
		f.start()
		f.claimDeleted("b")
		f.claimDeleted("c")
		kubetest.Eventually(t, "the record is gone", gone(records, "r"))
		f.atLeast(refused, 2)
	})
	t.Run("a_custom_resource", func(t *testing.T) {
		f := scenario(t, swept)
		records := f.installLogicalVolumes()
		refused := f.denied(http.MethodPatch, "/logicalvolumes/ra")
		for _, name := range []string{"ra", "rb", "rc"} {
			f.logicalVolume(records, name, "n")
		}
		f.start()
		kubetest.Eventually(t, "the others are gone", gone(records, "rb"))
		kubetest.Eventually(t, "the others are gone", gone(records, "rc"))
		f.atLeast(refused, 2)
		f.there(records, "ra")
	})
	t.Run("a_volume_whose_claim_cannot_be", func(t *testing.T) {
		f := scenario(t, nil)
		for i, ns := range []string{"", "x/y", ".."} {
			f.unnamed(fmt.Sprint("pv-bad-", i), "n", ns)
		}
		refusing := f.refusing()
		kept := f.boundIn(refusing, "a", "n")
		f.start()
		for i := range 3 {
			f.event("PersistentVolume", f.name(fmt.Sprint("pv-bad-", i)), reasonSkipped, "NotBound: no claim can be called")
		}
		if said := f.term().namespaces.optedOut(&corev1.ObjectReference{Namespace: refusing}); said == "" {
			t.Error("it is not known which namespace has opted out")
		}
		f.untouched(kept)
		if n := f.failures(); n > 0 {
			t.Errorf("%v failures", n)
		}
	})
	t.Run("a_namespace_that_cannot_be_read", func(t *testing.T) {
		f := scenario(t, nil)
		ns := []string{f.refusing(), f.refusing()}
		slices.Sort(ns)
		refused := f.denied(http.MethodGet, "/namespaces/"+ns[0])
		f.boundIn(ns[0], "a", "n")
		f.boundIn(ns[1], "b", "n")
		f.start()
		f.event("PersistentVolume", f.name("pv-b"), reasonSkipped, "Namespace "+ns[1])
		f.atLeast(refused, 1)
		term := f.term()
		term.namespaces.forgetAll() // as in a term that has just begun
		term.readNamespaces(t.Context())
		if term.namespaces.optedOut(&corev1.ObjectReference{Namespace: ns[1]}) == "" {
			t.Error("it is not known that the other has opted out")
		}
	})
	t.Run("one_that_keeps_no_record_is_asked_for_once", func(t *testing.T) {
		f := scenario(t, swept)
		f.installLogicalVolumes()
		f.cfg.NodeCleanupResourceSweep = 0
		f.boundTo("a", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = disabled })
		f.node("n")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n")
		f.seen("pv-a", placeOrphan)
		f.seenGone("n")
		term := f.term()
		kubetest.Eventually(t, "nothing is left to do", func(context.Context) error {
			if len(f.asked("GET logicalvolumes")) == 0 || term.memory.has(term.memory.absent, f.name("n")) {
				return fmt.Errorf("the list was read %d times", len(f.asked("GET logicalvolumes")))
			}
			return nil
		})
		if n := len(f.asked("GET csidrivers/" + f.driver)); n > 0 { // which is one of all that the gates ask for
			t.Errorf("the approval was read %d times", n)
		}
	})
}

// TestRefusedDeletionOfAVolume has the deletion of a volume refused: what is told of it is
// that it is going to be removed, and once.
func TestRefusedDeletionOfAVolume(t *testing.T) {
	f := scenario(t, volumes)
	refused := f.denied(http.MethodDelete, "/persistentvolumes/"+f.name("pv-a"))
	pv := f.released(nil)
	f.start()
	f.atLeast(refused, 3)
	f.event("PersistentVolume", pv.Name, reasonForceRemoved, "is about to be removed without its driver")
	f.event("PersistentVolume", pv.Name, reasonBlocked, "admission webhook denied")
	if n := f.told("PersistentVolume", pv.Name, reasonForceRemoved); n != 1 {
		t.Errorf("told %d times", n)
	}
	kubetest.Eventually(t, "it is on its way out, and forbidden", func(context.Context) error {
		if all := f.term().ledger.tally(); all.orphaned[stateForce] != 1 || all.blocked[gateForbidden] != 1 {
			return fmt.Errorf("it is %v", all)
		}
		return nil
	})
}

// TestUnwritableVolume has a volume of a lost node on which nothing can be written.
func TestUnwritableVolume(t *testing.T) {
	change := func(f *fixture) { f.cfg.NodeCleanupWindow = shortGrace }
	t.Run("does_not_use_up_what_may_be_lost", func(t *testing.T) {
		f := scenario(t, change)
		ten(f)
		f.boundTo("z", []string{"never"}, full, nil)
		f.start()
		f.event("PersistentVolume", f.name("pv-z"), reasonBlocked, "refuses")
		f.lostIs(0)
		f.deleteNode("n1")
		f.claimDeleted("c1")
		if told := f.events("CSIDriver", f.driver, reasonBreakerOpen); len(told) > 0 {
			t.Errorf("the breaker is open: %v", told)
		}
	})
	t.Run("counts_once_it_is_written", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Minute })
		ten(f)
		pv, _ := f.boundTo("z", []string{"never"}, full, nil)
		f.start()
		f.event("PersistentVolume", pv.Name, reasonBlocked, "refuses")
		f.lostIs(0)
		f.deleteNode("n1")
		f.untilVolume("pv-c1", "is missing its node", f.isMissing)
		_, err := f.client.CoreV1().PersistentVolumes().Patch(t.Context(), pv.Name, types.MergePatchType, annotationsPatch(map[string]any{"x.y/z": nil}), metav1.PatchOptions{})
		f.must(err)
		f.lostIs(2)
		held := func(pv *corev1.PersistentVolume) bool { return pv != nil && pv.Annotations[f.ann.hold] != "" }
		f.untilVolume("pv-z", "is held", held)
		f.untilVolume("pv-c1", "is held", held)
	})
}

// TestFailedVolume has a volume in phase Failed, which nobody takes it out of.
func TestFailedVolume(t *testing.T) {
	f := scenario(t, func(f *fixture) { volumes(f); f.cfg.NodeCleanupWindow = shortGrace })
	ten(f)
	pv := f.volume("pv-f", []string{"never"}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: f.ns, Name: "f", UID: "old"}
	})
	f.phase(pv, corev1.VolumeFailed)
	f.start()
	f.event("PersistentVolume", pv.Name, reasonBlocked, "in phase Failed")
	f.lostIs(0)
	f.deleteNode("n1")
	f.claimDeleted("c1")
}

// TestNodesUnheardOf has a node return that the cache does not hear of: the API server
// is asked less and less often about its volume.
func TestNodesUnheardOf(t *testing.T) {
	f := scenario(t, nil)
	f.watchEndsFor("nodes")
	f.bound("a", "n")
	f.node("n")
	f.deleteNode("n")
	f.start()
	f.seen("pv-a", placeOrphan)
	f.node("n")
	looks := func() int { return len(f.asked("GET persistentvolumes/pv-a")) }
	kubetest.Eventually(t, "the cache is known to be behind", func(context.Context) error {
		if r := f.term().memory.get(f.getVolume("pv-a").UID); r.patience == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	before := looks()
	f.passed(time.Now(), 15*time.Second)
	if n := looks() - before; n > 3 { // after 2, 6 and 14 seconds
		t.Errorf("%d looks", n)
	}
}

// TestPatience has the cache lag behind at times that follow one another.
func TestPatience(t *testing.T) {
	m, now := newMemory(), testNow
	for i, want := range []time.Duration{soon, 2 * soon, 4 * soon, 8 * soon, 16 * soon, later, later} {
		if got := m.patience("v", now); got != want {
			t.Errorf("look %d is after %v, want %v", i, got, want)
		}
		now = now.Add(want)
	}
	if got := m.patience("other", now); got != soon {
		t.Errorf("another volume is looked at after %v", got)
	}
	if got := m.patience("v", now.Add(3*later)); got != soon {
		t.Errorf("long after, it is %v", got)
	}
}

// TestDriverLeavesAllNodes takes the driver off all nodes, so that nobody reports its key.
func TestDriverLeavesAllNodes(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
	f.labelled("n", "id")
	f.bound("a", "id")
	f.start()
	f.finalizers("n", f.cfg.NodeFinalizer)
	f.finalizers("keep", f.cfg.NodeFinalizer)
	for _, n := range []string{"n", "keep"} {
		_, err := f.client.StorageV1().CSINodes().Patch(t.Context(), f.name(n), types.MergePatchType, []byte(`{"spec":{"drivers":[]}}`), metav1.PatchOptions{})
		f.must(err)
	}
	f.finalizers("keep") // where no volume is
	f.passed(time.Now(), 2*f.cfg.UnregisteredGrace)
	_, err := f.term().syncNode(t.Context(), f.name("n"))
	f.must(err)
	f.finalizers("n", f.cfg.NodeFinalizer)
	f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), f.name("pv-a"), metav1.DeleteOptions{}))
	_, err = f.client.CoreV1().PersistentVolumes().Patch(t.Context(), f.name("pv-a"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	f.must(err)
	kubetest.Eventually(t, "the node is let go", func(ctx context.Context) error {
		if _, err := f.term().syncNode(ctx, f.name("n")); err != nil { // what comes by itself within a minute
			return err
		}
		node, err := f.client.CoreV1().Nodes().Get(ctx, f.name("n"), metav1.GetOptions{})
		if err == nil && len(node.Finalizers) > 0 {
			err = fmt.Errorf("it has %v", node.Finalizers)
		}
		return err
	})
}

// TestKindThatIsNotInstalled is told once, and at the verbosity that everybody has.
func TestKindThatIsNotInstalled(t *testing.T) {
	f := scenario(t, parity)
	c := f.prepare(f.user).c
	config := ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0))
	logger := ktesting.NewLogger(ktesting.NopTL{}, config)
	for range 3 {
		f.must(c.eachResource(klog.NewContext(t.Context(), logger), c.resources[0], nil))
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(said, "There is no such kind"); n != 1 || !strings.Contains(said, "logicalvolumes") {
		t.Errorf("the log is %q", said)
	}
}

// TestSkippedSaysWhy has the event name the reason, which is constant, before the case.
func TestSkippedSaysWhy(t *testing.T) {
	f := scenario(t, nil)
	retain := func(pv *corev1.PersistentVolume) {
		pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	}
	f.node("n", f.cfg.NodeFinalizer)
	f.boundTo("a", []string{"n"}, retain, nil)
	f.boundTo("b", []string{"gone"}, retain, nil)
	f.start()
	f.seen("pv-a", placeHealthy)
	f.deleteNode("n")
	for _, pv := range []string{"pv-a", "pv-b"} {
		f.event("PersistentVolume", f.name(pv), reasonSkipped, "Nothing is cleaned up: Retain: its reclaim policy is Retain")
	}
}

// TestCleanupGoesOn has the command meet one claim that it may not delete.
func TestCleanupGoesOn(t *testing.T) {
	t.Run("after_a_claim_that_is_refused", func(t *testing.T) {
		f := scenario(t, nil)
		for _, name := range []string{"a", "b", "c"} {
			f.bound(name, "n")
		}
		f.denied(http.MethodDelete, "/persistentvolumeclaims/b")
		var out bytes.Buffer
		err := Cleanup(t.Context(), f.cfg, f.prepare(f.user).c.deps.Client, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out)
		if err == nil || errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), f.ns+"/b") {
			t.Errorf("it ends with %v", err)
		}
		f.claimDeleted("a")
		f.claimDeleted("c")
	})
	t.Run("after_a_volume_that_cannot_be_read", func(t *testing.T) {
		f := scenario(t, nil)
		for _, name := range []string{"a", "b", "c"} {
			f.bound(name, "n")
		}
		f.denied(http.MethodGet, "/persistentvolumes/"+f.name("pv-b"))
		client := f.prepare(f.user).c.deps.Client
		var out bytes.Buffer
		request := CleanupRequest{Driver: f.driver, Node: f.name("n")}
		if err := Cleanup(t.Context(), f.cfg, client, request, &out); err == nil || errors.Is(err, ErrRefused) || strings.Count(out.String(), "delete claim") != 2 || !strings.Contains(out.String(), "not known") {
			t.Errorf("the plan ends with %v, and is %s", err, &out)
		}
		request.Yes = true
		if err := Cleanup(t.Context(), f.cfg, client, request, &out); err == nil || errors.Is(err, ErrRefused) {
			t.Errorf("it ends with %v", err)
		}
		f.claimDeleted("a")
		f.claimDeleted("c")
	})
	t.Run("and_forgets_what_was_refused_and_is_gone", func(t *testing.T) {
		f := scenario(t, nil)
		pv, _ := f.boundTo("a", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = disabled })
		var reads atomic.Int32
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumes/"+pv.Name) && reads.Add(1) == 2 { // after the plan
				f.must(f.client.CoreV1().PersistentVolumes().Delete(r.Context(), pv.Name, metav1.DeleteOptions{}))
				_, _ = f.client.CoreV1().PersistentVolumes().Patch(r.Context(), pv.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
			}
			pass.ServeHTTP(w, r)
		})
		var out bytes.Buffer
		f.must(Cleanup(t.Context(), f.cfg, f.prepare(f.user).c.deps.Client, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out))
		if !strings.Contains(out.String(), "has the annotation") {
			t.Errorf("the plan is %s", &out)
		}
	})
}
