package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"runtime"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// delayedWriter forwards a watch, but every chunk of it late.
type delayedWriter struct {
	http.ResponseWriter
	ctx   context.Context
	delay time.Duration
}

func (w delayedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w delayedWriter) Write(data []byte) (int, error) {
	select {
	case <-time.After(w.delay):
	case <-w.ctx.Done():
	}
	return w.ResponseWriter.Write(data)
}

// delayWatch delivers the watch events of a resource late.
func (f *fixture) delayWatch(resource string, delay time.Duration) {
	f.Helper()
	f.watch = kubetest.Proxy(f.T, f.watch, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.URL.Query().Get("watch") != "" && strings.HasSuffix(r.URL.Path, "/"+resource) {
			w = delayedWriter{w, r.Context(), delay}
		}
		pass.ServeHTTP(w, r)
	})
}

// staleWatch serves a resource as it is now, and delays the watch until release is called.
func (f *fixture) staleWatch(resource string) (release func()) {
	f.Helper()
	released := make(chan struct{})
	var list *httptest.ResponseRecorder
	before := f.watch
	f.watch = kubetest.Proxy(f.T, before, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		query := r.URL.Query()
		switch {
		case !strings.HasSuffix(r.URL.Path, "/"+resource):
		case query.Get("sendInitialEvents") != "": // so that the informer lists
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
			return
		case query.Get("watch") != "":
			select {
			case <-released:
			case <-r.Context().Done():
				return
			}
		default:
			for k, v := range list.Header() {
				w.Header()[k] = v
			}
			w.WriteHeader(list.Code)
			_, _ = w.Write(list.Body.Bytes())
			return
		}
		pass.ServeHTTP(w, r)
	})
	list = f.fetch("/api/v1/" + resource)
	return func() { close(released) }
}

func (f *fixture) fetch(path string) *httptest.ResponseRecorder {
	f.Helper()
	result := httptest.NewRecorder()
	body, err := f.client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").DoRaw(f.Context())
	f.must(err)
	result.Header().Set("Content-Type", "application/json")
	_, _ = result.Write(body)
	return result
}

// TestCustomResourcesOfTheLastClaim is B1: the cache does not know yet that the last claim is being deleted.
func TestCustomResourcesOfTheLastClaim(t *testing.T) {
	f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeMissingGrace = time.Hour })
	records := f.installLogicalVolumes()
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	f.logicalVolume(records, "lv", "n")
	f.delayWatch("persistentvolumeclaims", 300*time.Millisecond)
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.nodeGone("n")
	f.claimDeleted("a")
	if err := gone(records, "lv")(t.Context()); err != nil {
		t.Errorf("the Node is released before its custom resource: %v", err)
	}
}

// TestApprovalIsForOneLoss is B2: the node returns, and another process begins.
func TestApprovalIsForOneLoss(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
	f.node("n")
	f.bound("a", "n")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.nodeMissing("n")
	f.nodeApproved("n")
	f.claimDeleted("a")
	f.node("n")
	f.event("PersistentVolume", f.name("pv-a"), reasonReturned, "")
	f.stop()
	f.start()
	_, pvc := f.bound("b", "n")
	f.observed("b")
	f.deleteNode("n")
	f.passed(time.Now(), 2*shortGrace)
	f.untouched(pvc)
	f.nodeMissing("n")
}

// TestStaleCacheReleasesNoHold is B3: a new leader still has the Node in its cache.
func TestStaleCacheReleasesNoHold(t *testing.T) {
	f := scenario(t, nil)
	claims := ten(f)
	f.start()
	f.observed("c2")
	f.deleteNode("n1")
	f.claimDeleted("c1")
	watch := f.watch
	release := f.staleWatch("nodes") // as before n2 is deleted
	stale := f.watch
	f.watch = watch
	f.deleteNode("n2")
	f.nodeHeld("n2")
	f.stop()
	f.watch = stale
	f.start()
	f.passed(time.Now(), shortGrace)
	f.nodeHeld("n2")
	release()
	f.passed(time.Now(), 2*shortGrace)
	f.nodeHeld("n2")
	f.untouched(claims[1])
	if returned := f.events("PersistentVolume", f.name("pv-c2"), reasonReturned); len(returned) > 0 {
		t.Errorf("it was said to be back: %q", returned)
	}
}

// TestLimitOutlivesTheLeader is B4: the nodes that were cleaned up count for the next leader too.
func TestLimitOutlivesTheLeader(t *testing.T) {
	f := scenario(t, nil)
	claims := ten(f)
	f.start()
	f.observed("c1")
	f.deleteNode("n1")
	f.claimDeleted("c1")
	f.stop()
	f.start()
	f.observed("c2")
	f.deleteNode("n2")
	f.nodeHeld("n2")
	f.passed(time.Now(), 2*shortGrace)
	f.untouched(claims[1])
}

// TestFinalizerPathNeedsNoSystemNamespace is B9.
func TestFinalizerPathNeedsNoSystemNamespace(t *testing.T) {
	f := scenario(t, nil)
	f.denied(http.MethodGet, "/namespaces/"+metav1.NamespaceSystem)
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.claimDeleted("a")
	f.nodeGone("n")
}

// TestNodeWithoutLabelIsReported is B10: a driver node that lacks its label may be the lost one.
func TestNodeWithoutLabelIsReported(t *testing.T) {
	f := scenario(t, nil)
	_, pvc := f.bound("a", "n")
	f.node("bare")
	f.patchNode("bare", fmt.Sprintf(`{"metadata":{"labels":{"%s":null}}}`, f.key))
	f.start()
	f.eventWith(f.name("bare"))
	f.passed(time.Now(), 2*shortGrace)
	f.untouched(pvc)
	f.patchNode("bare", fmt.Sprintf(`{"metadata":{"labels":{"%s":%q}}}`, f.key, f.name("bare")))
	f.claimDeleted("a")
}

// eventWith waits for an event of the driver about any object whose text has part.
func (f *fixture) eventWith(part string) {
	f.Helper()
	kubetest.Eventually(f.T, "an event with "+part, func(ctx context.Context) error {
		list, err := f.client.CoreV1().Events("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Source.Component == f.driver && strings.Contains(e.Message, part) {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// requestsSince returns the numbers of reads and writes.
func (f *fixture) counted() (reads, writes int) {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	for _, s := range f.requests.sent {
		if s.writes() {
			writes++
		} else {
			reads++
		}
	}
	return reads, writes
}

// TestCostOfWaiting is B6: volumes of one node that wait cost little.
func TestCostOfWaiting(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
	for i := range 200 {
		f.bound(fmt.Sprintf("c%d", i), "n")
	}
	f.start()
	f.nodeMissing("n")
	f.passed(time.Now(), 2*shortGrace)
	f.stop()
	if reads, writes := f.counted(); reads > 50 || writes > 5 {
		t.Errorf("%d reads and %d writes", reads, writes)
	}
}

// TestCostOfTheCommand is B7.
func TestCostOfTheCommand(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupQPS, f.cfg.NodeCleanupBurst = 1000, 1000 })
	for i := range 30 {
		f.bound(fmt.Sprintf("c%d", i), "n")
	}
	var out strings.Builder
	f.must(Cleanup(t.Context(), f.cfg, f.recorded(), CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out))
	lists := len(f.asked("GET nodes")) + len(f.asked("GET csinodes"))
	reads, writes := f.counted()
	t.Logf("30 volumes: %d lists of nodes, %d reads, %d writes", lists, reads, writes)
	if lists > 6 {
		t.Errorf("%d lists of nodes for 30 volumes", lists)
	}
}

// TestReleaseByPassageOfTime is B5, as far as today's state machine is concerned.
func TestReleaseByPassageOfTime(t *testing.T) {
	p := testPolicy()
	p.outOfService = true
	s := lostClaim(p)
	s.volume.Annotations[p.ann.hold] = heldByBreak
	s.member = membership{place: placeFenced, fencedSince: testNow}
	if got := p.decide(s); got.action == doForget {
		t.Errorf("%v removes %v", got.action, got.change.RemoveAnnotations)
	}
}

// TestDepartedNodesAreForgotten is B8.
func TestDepartedNodesAreForgotten(t *testing.T) {
	d := newDeparted("x")
	for i := range 1000 {
		d.left(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i), UID: types.UID(fmt.Sprint(i)), Annotations: map[string]string{"x": disabled}}})
	}
	if n := len(d.nodes); n > 0 {
		t.Errorf("%d nodes without the driver are kept", n)
	}
}

// TestNothingIsLeftOfATerm is B12.
func TestNothingIsLeftOfATerm(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerTimeout = time.Hour })
	f.denied(http.MethodDelete, "/persistentvolumeclaims/a")
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	f.start()
	f.observed("a")
	term := weak.Make(f.term())
	f.deleteNode("n")
	f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, "denied")
	f.stop()
	f.c = nil
	kubetest.Eventually(t, "the term is collected", func(context.Context) error {
		if runtime.GC(); term.Value() != nil {
			return errors.New("it is reachable")
		}
		return nil
	})
}
