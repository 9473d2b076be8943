package nodecontroller

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// labelled makes a ready node with the driver on it whose label is the ID that the driver
// has for it, and not its name.
func (f *fixture) labelled(name, id string) {
	f.Helper()
	f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{
		Name: f.name(name), Labels: map[string]string{f.key: f.name(id)}, Driver: f.driver, NodeID: f.name(id), TopologyKeys: []string{f.key},
	}))
}

// zoned makes one whose label is not its own.
func (f *fixture) zoned(name, zone string) {
	f.Helper()
	f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{
		Name: f.name(name), Labels: map[string]string{f.key: f.name(zone)}, Driver: f.driver, TopologyKeys: []string{f.key},
	}))
}

// keyIs waits until the controller knows the topology key of the driver as key.
func (f *fixture) keyIs(key string) {
	f.Helper()
	t := f.term()
	kubetest.Eventually(f.T, fmt.Sprintf("the topology key is %q", key), func(context.Context) error {
		if got := t.index.topologyKey(); got != key {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
}

// reviewed has the controller look at what it looks at every few minutes.
func (f *fixture) reviewed() {
	t := f.term()
	t.review(t.volumeQueue.Resync, t.nodeQueue.Resync)
}

// twoHeld is a controller in which the claims c1 and c2 of two lost nodes are held, and
// which has counted both for as long as it does.
func twoHeld(t *testing.T) (f *fixture, claims []*corev1.PersistentVolumeClaim) {
	t.Helper()
	f = scenario(t, func(f *fixture) { f.cfg.NodeCleanupWindow = shortGrace })
	claims = ten(f)
	f.start()
	f.seen("pv-c2", placeHealthy)
	f.deleteNode("n1")
	f.deleteNode("n2")
	f.held("c1", true)
	f.held("c2", true)
	return f, claims
}

func TestTopologyKeyIsUnknown(t *testing.T) {
	t.Run("holds_stay", func(t *testing.T) {
		f, claims := twoHeld(t)
		// The second volume goes, so that the count alone would let the first one go on.
		f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), f.name("pv-c2"), metav1.DeleteOptions{}))
		f.patchVolume("pv-c2", `{"metadata":{"finalizers":null}}`)
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("new"), Driver: f.driver, TopologyKeys: []string{"new-" + f.key}}))
		f.keyIs("")
		f.looks("pv-c1")
		f.held("c1", true)
		f.gauge(breakerOpen, 1)
		f.deleteNode("new")
		f.keyIs(f.key)
		f.staysFor(2*shortGrace, "pv-c1", placeOrphan, claims[0])
		f.held("c1", true)
		if pv := f.getVolume("pv-c1"); !f.isMissing(pv) {
			t.Errorf("the clock and the name are gone: %v", pv.Annotations)
		}
		if returned := f.events("PersistentVolume", f.name("pv-c1"), reasonReturned); len(returned) > 0 {
			t.Errorf("told of a return: %q", returned)
		}
	})
	t.Run("nodes_keep_their_finalizer", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
		f.node("n")
		f.bound("a", "n")
		f.start()
		f.finalizers("n", f.cfg.NodeFinalizer)
		for _, n := range []string{"n", "keep"} {
			_, err := f.client.StorageV1().CSINodes().Patch(t.Context(), f.name(n), types.MergePatchType, []byte(`{"spec":{"drivers":[]}}`), metav1.PatchOptions{})
			f.must(err)
		}
		f.keyIs("")
		begin := time.Now()
		_, err := f.term().syncNode(t.Context(), f.name("n")) // from when on it is known to be without the driver
		f.must(err)
		f.passed(begin, 2*f.cfg.UnregisteredGrace)
		_, err = f.term().syncNode(t.Context(), f.name("n"))
		f.must(err)
		f.finalizers("n", f.cfg.NodeFinalizer)
	})
	t.Run("zone", func(t *testing.T) {
		f := scenario(t, nil)
		f.patchNode("keep", `{"metadata":{"labels":{"`+f.key+`":"other-zone"}}}`)
		f.zoned("z1", "z")
		f.zoned("z2", "z")
		_, pvc := f.bound("a", "z")
		f.start()
		f.term()
		f.event("CSIDriver", f.driver, reasonSkipped, "TopologyKeyUnknown")
		f.deleteNode("z1")
		f.deleteNode("z2")
		f.seenGone("z2")
		f.passed(time.Now(), 2*shortGrace)
		f.looks("pv-a")
		f.untouched(pvc)
		f.keyIs("")
		f.stop()
		f.start() // and nobody remembers that two nodes had one value
		f.term()
		f.passed(time.Now(), 2*shortGrace)
		f.looks("pv-a")
		f.untouched(pvc)
	})
}

// seenGone waits until the caches know that a node is gone.
func (f *fixture) seenGone(name string) {
	f.Helper()
	t := f.term()
	kubetest.Eventually(f.T, "node "+name+" is seen as gone", func(context.Context) error {
		if node, ok := t.nodes.Get(f.name(name)); ok {
			return fmt.Errorf("it is seen as %v", node)
		}
		return nil
	})
}

func TestHoldOutlivesAnOptOut(t *testing.T) {
	f, claims := twoHeld(t)
	f.patchClass("c", map[string]any{f.ann.cleanup: disabled})
	f.untilVolume("pv-c1", "has no clock", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.missing] == "" })
	f.untilVolume("pv-c2", "has no clock", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.missing] == "" })
	f.annotateClaim("c2", map[string]any{f.ann.cleanup: disabled})
	f.patchClass("c", map[string]any{f.ann.cleanup: nil})
	f.untilVolume("pv-c1", "is missing again", f.isMissing)
	f.staysFor(2*shortGrace, "pv-c1", placeOrphan, claims[0])
	f.held("c1", true)
	f.approve(f.name("n1"), "")
	f.claimDeleted("c1")
}

func TestReturn(t *testing.T) {
	t.Run("under_its_name_with_another_label", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 2 * shortGrace })
		f.labelled("n", "id-1")
		_, pvc := f.bound("a", "id-1")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n")
		f.untilVolume("pv-a", "is missing", f.isMissing)
		f.labelled("n", "id-2")
		f.untilVolume("pv-a", "has no clock", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.missing] == "" })
		f.event("PersistentVolume", f.name("pv-a"), reasonReturned, "")
		f.looks("pv-a") // settles, and keeps the name by which the node is known
		if pv := f.getVolume("pv-a"); pv.Annotations[f.ann.lostNode] != f.name("n") {
			t.Errorf("the name of its node is gone: %v", pv.Annotations)
		}
		f.passed(time.Now(), f.cfg.NodeMissingGrace)
		f.deleteNode("n")
		again := time.Now()
		f.untilVolume("pv-a", "is missing again", f.isMissing)
		f.untouched(pvc)
		f.claimDeleted("a")
		if d := time.Since(again); d < f.cfg.NodeMissingGrace-time.Second { // the clock has whole seconds
			t.Errorf("deleted %v after the second loss", d)
		}
	})
	t.Run("that_could_not_be_noted", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 3 * shortGrace })
		var fail atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if fail.Load() && r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "persistentvolumes") {
				http.Error(w, "later", http.StatusInternalServerError)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.node("n")
		f.bound("a", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n")
		f.untilVolume("pv-a", "is missing", f.isMissing)
		begin := time.Now()
		fail.Store(true)
		f.node("n")
		f.seen("pv-a", placeHealthy)
		f.passed(begin, 2*shortGrace)
		f.deleteNode("n")
		again := time.Now()
		f.seen("pv-a", placeOrphan)
		fail.Store(false)
		f.claimDeleted("a")
		if d := time.Since(again); d < f.cfg.NodeMissingGrace-time.Second {
			t.Errorf("deleted %v after the second loss", d)
		}
	})
}

func TestNodesThatGoOneAfterTheOther(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerTimeout = time.Hour, 2*time.Hour })
	f.node("n", f.cfg.NodeFinalizer)
	f.node("m", f.cfg.NodeFinalizer)
	f.boundTo("a", []string{"n", "m"}, nil, nil)
	f.start()
	f.seen("pv-a", placeHealthy)
	f.deleteNode("n")
	f.deleteNode("m")
	both := func(pv *corev1.PersistentVolume) bool {
		return pv.Annotations[f.ann.lostNode] == f.name("m")+nodeListMark+f.name("n")
	}
	f.untilVolume("pv-a", "names both", both)
	f.patchNode("m", `{"metadata":{"finalizers":null}}`)
	f.nodeGone("m")
	f.seenGone("m")
	_, err := f.term().syncNode(t.Context(), f.name("n"))
	f.must(err)
	if pv := f.getVolume("pv-a"); !both(pv) {
		t.Errorf("the node that went first is forgotten: %v", pv.Annotations)
	}
}

func TestCleanupCommand(t *testing.T) {
	t.Run("host_name", func(t *testing.T) {
		f := scenario(t, nil)
		_, pvc := f.bound("a", "host")
		f.patchVolume("pv-a", string(annotationsPatch(map[string]any{f.ann.lostNode: f.name("n")})))
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("nb")}))
		f.patchNode("nb", `{"status":{"addresses":[{"type":"Hostname","address":"`+f.name("host")+`"}]}}`, "status")
		var out bytes.Buffer
		err := Cleanup(t.Context(), f.cfg, f.client, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out)
		if !errors.Is(err, ErrRefused) {
			t.Errorf("got %v, %s", err, out.String())
		}
		f.untouched(pvc)
	})
	t.Run("what_is_to_be_left_is_refused", func(t *testing.T) {
		f := scenario(t, nil)
		_, pvc := f.boundTo("a", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = disabled })
		var out bytes.Buffer
		err := Cleanup(t.Context(), f.cfg, f.client, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out)
		if !errors.Is(err, ErrRefused) {
			t.Errorf("got %v, %s", err, out.String())
		}
		f.untouched(pvc)
	})
	t.Run("zone", func(t *testing.T) {
		f := scenario(t, nil)
		f.patchNode("keep", `{"metadata":{"labels":{"`+f.key+`":"other-zone"}}}`)
		f.zoned("z1", "z")
		f.zoned("z2", "z")
		_, pvc := f.bound("a", "n")
		var out bytes.Buffer
		err := Cleanup(t.Context(), f.cfg, f.client, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out)
		if err == nil || !strings.Contains(err.Error(), "--topology-node-key") {
			t.Errorf("got %v, %s", err, out.String())
		}
		f.untouched(pvc)
	})
}

// TestOtherClusterInALaterTerm has another cluster answer when the second term begins.
func TestOtherClusterInALaterTerm(t *testing.T) {
	f := scenario(t, nil)
	var other atomic.Bool
	f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if !other.Load() || r.URL.Path != "/api/v1/namespaces/"+metav1.NamespaceSystem {
			pass.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(corev1.Namespace{
			TypeMeta: metav1.TypeMeta{Kind: "Namespace", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: "other"},
		})
	})
	p := f.prepare(f.user)
	for _, want := range []bool{true, false} {
		term, err := p.c.newTerm()
		f.must(err)
		defer term.close()
		term.reader.identify(t.Context())
		if same, err := term.reader.sameCluster(t.Context()); err != nil || same != want {
			t.Errorf("got %t, %v, want %t", same, err, want)
		}
		other.Store(true)
	}
}

// TestRefresh has the API server give a volume another affinity than the cache has.
func TestRefresh(t *testing.T) {
	refreshed := func(t *testing.T, change func(f *fixture, e *corev1.NodeSelectorRequirement)) (*fixture, snapshot) {
		f := scenario(t, nil)
		var changed atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if !changed.Load() || r.URL.Path != "/api/v1/persistentvolumes/"+f.name("pv-a") {
				pass.ServeHTTP(w, r)
				return
			}
			r.Header.Set("Accept", "application/json")
			r.Header.Del("Accept-Encoding")
			answer := httptest.NewRecorder()
			pass.ServeHTTP(answer, r)
			var pv corev1.PersistentVolume
			if err := json.Unmarshal(answer.Body.Bytes(), &pv); err != nil {
				t.Error(err)
			}
			change(f, &pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0])
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(pv)
		})
		f.node("n")
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("nb")}))
		f.patchNode("nb", `{"status":{"addresses":[{"type":"Hostname","address":"`+f.name("host")+`"}]}}`, "status")
		f.bound("a", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		term := f.term()
		kubetest.Eventually(t, "the host name is known", func(context.Context) error {
			if len(term.index.nodesNamed([]string{f.name("host")})) == 0 {
				return errors.New("it is not")
			}
			return nil
		})
		s := term.look(f.name("pv-a"))
		if s.claim == nil {
			t.Fatal("the claim is not seen")
		}
		changed.Store(true)
		live, err := term.refresh(t.Context(), s, true)
		f.must(err)
		return f, live
	}
	t.Run("a_claim_that_was_not_read_is_not_gone", func(t *testing.T) {
		f, live := refreshed(t, func(_ *fixture, e *corev1.NodeSelectorRequirement) { e.Key = "other" })
		if live.member.place != placeElsewhere {
			t.Errorf("got %+v", live.member)
		}
		if _, ok := f.term().claims.Get(f.ns + "/a"); !ok {
			t.Error("the claim is taken for gone")
		}
	})
	t.Run("host_names_of_new_values", func(t *testing.T) {
		f, live := refreshed(t, func(f *fixture, e *corev1.NodeSelectorRequirement) { e.Values = []string{f.name("host")} })
		if !slices.Equal(live.member.aliases, []string{f.name("nb")}) {
			t.Errorf("got %+v", live.member)
		}
	})
}

func TestOptInLater(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupUnbound, f.cfg.NodeCleanupScope = UnboundDelete, ScopeOptIn })
	f.node("n")
	f.selecting("a", "n")
	f.start()
	f.seenNode("n", false)
	f.deleteNode("n")
	f.event("PersistentVolumeClaim", "a", reasonSkipped, "Scope")
	f.patchClass("c", map[string]any{f.ann.cleanup: enabled})
	f.reviewed()
	f.claimDeleted("a")
}

func TestWhoOptsIn(t *testing.T) {
	a := annotationsOf(testDriver)
	for kind, want := range map[string]bool{"PersistentVolumeClaim": true, "StorageClass": true, "PersistentVolume": false, "Namespace": false, "Node": false} {
		says := func(value string) wishes {
			return a.wishesOf(map[string]metav1.Object{kind: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x", Annotations: map[string]string{a.cleanup: value}}}})
		}
		if w := says(enabled); (w.optIn != "") != want {
			t.Errorf("%s: opts in by %q, want that: %t", kind, w.optIn, want)
		}
		if w := says(disabled); w.optOut == "" {
			t.Errorf("%s does not opt out", kind)
		}
	}
}

// TestClockThatNobodyKeptUp has a node come back and go again while the controller only
// reports, and may not remove what it wrote before.
func TestClockThatNobodyKeptUp(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace, f.cfg.ClockGap = 4*shortGrace, 2*shortGrace })
	f.node("n")
	f.bound("a", "n")
	f.start()
	f.seen("pv-a", placeHealthy)
	f.deleteNode("n")
	f.untilVolume("pv-a", "has a clock that is kept up", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.seenMissing] != "" })
	f.stop()
	f.cfg.NodeCleanup = CleanupReport
	stopped := time.Now()
	f.start()
	f.node("n")
	f.seen("pv-a", placeHealthy)
	f.passed(stopped, f.cfg.NodeMissingGrace)
	f.deleteNode("n")
	gone := time.Now()
	f.seen("pv-a", placeOrphan)
	f.stop()
	f.cfg.NodeCleanup = CleanupClaims
	f.start()
	f.claimDeleted("a")
	if d := time.Since(gone); d < f.cfg.NodeMissingGrace-time.Second { // which is written in whole seconds
		t.Errorf("the claim is deleted %v after the node went", d)
	}
}
