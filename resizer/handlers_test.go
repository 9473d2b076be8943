// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestRecreatedObjects: an interrupted watch delivers the deletion and the recreation of an object as one update.
func TestRecreatedObjects(t *testing.T) {
	class := func(uid types.UID) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "gold", UID: uid}}
	}
	pod := func(uid types.UID, claim string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: uid}, Spec: corev1.PodSpec{
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
		}}
	}
	for name, tt := range map[string]struct {
		stage  string // of the claim c1
		update func(*term)
		want   int // keys in the queue
	}{
		"class":              {stageClassMissing, func(t *term) { t.classHandlers().Update(class("1"), class("2")) }, 1},
		"class, not missing": {stageInfeasible, func(t *term) { t.classHandlers().Update(class("1"), class("2")) }, 0},
		"class, labeled":     {stageClassMissing, func(t *term) { t.classHandlers().Update(class("1"), class("1")) }, 0},
		"pod":                {stageInUse, func(t *term) { t.podHandlers().Update(pod("1", "c1"), pod("2", "c2")) }, 1},
		"pod, other claim":   {stageInUse, func(t *term) { t.podHandlers().Update(pod("1", "c2"), pod("2", "c1")) }, 0},
		"pod, labeled":       {stageInUse, func(t *term) { t.podHandlers().Update(pod("1", "c1"), pod("1", "c1")) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			term := &term{ledger: newLedger(), queue: workloop.New(workloop.Config{Name: "test"},
				workloop.NewMetrics(prometheus.NewRegistry()), func(context.Context, key) (time.Time, error) { return time.Time{}, nil })}
			defer term.queue.Stop()
			k := key{"ns", "c1", "u", modify}
			_, _, _ = term.ledger.Apply(k, change{Set: func(m *operationMemory) { m.stage = tt.stage }})
			tt.update(term)
			if n := term.queue.Len(); n != tt.want {
				t.Errorf("%d keys, want %d", n, tt.want)
			}
		})
	}
}

// claimWatch is the proxy of a watch of claims that a test interrupts.
type claimWatch struct {
	mu      sync.Mutex
	cancel  []context.CancelFunc
	running sync.WaitGroup
	resumed chan struct{} // nil: not interrupted
}

func (c *claimWatch) serve(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	query := r.URL.Query()
	if r.URL.Path != "/api/v1/persistentvolumeclaims" || query.Get("watch") == "" {
		pass.ServeHTTP(w, r)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	c.mu.Lock()
	if resumed := c.resumed; resumed != nil {
		c.mu.Unlock()
		select {
		case <-resumed:
		case <-ctx.Done():
		}
		http.Error(w, "too old resource version", http.StatusGone) // a list follows
		return
	}
	c.cancel = append(c.cancel, cancel)
	c.running.Add(1)
	c.mu.Unlock()
	defer c.running.Done()
	pass.ServeHTTP(w, r.WithContext(ctx))
}

// start runs the resizer with this watch.
func (c *claimWatch) start(f *fixture) {
	f.Helper()
	f.Watch = kubetest.Proxy(f.T, f.ControlPlane.Config(), c.serve)
	f.start()
}

// delivers returns when the watch has delivered a claim.
func (c *claimWatch) delivers(f *fixture, claim string) {
	f.Helper()
	kubetest.Eventually(f.T, "the watch delivers the claim", func(context.Context) error {
		newest := f.claim(claim)
		if cached, ok := f.c.claims.Get(kube.Key(newest)); !ok || cached.ResourceVersion != newest.ResourceVersion {
			return errors.New("it has not")
		}
		return nil
	})
}

// interrupt returns when no event can be delivered any more.
func (c *claimWatch) interrupt() {
	c.mu.Lock()
	c.resumed = make(chan struct{})
	for _, cancel := range c.cancel {
		cancel()
	}
	c.mu.Unlock()
	c.running.Wait()
}

// resume has the resizer list the claims.
func (c *claimWatch) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.resumed)
	c.resumed = nil
}

// resizerScenarioAhead: the resizer acts on versions of a claim that the watch has not delivered.
func resizerScenarioAhead(t *testing.T) {
	t.Run("node_is_infeasible_again_while_the_watch_is_interrupted", func(t *testing.T) {
		f, watch, once := newFixture(t, expands, nil), &claimWatch{}, sync.Once{}
		watch.start(f)
		f.create("c1", nil)
		f.request("c1", "9Gi")
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		k, term := keyOf(f.claim("c1"), expand), f.c.term.Load()
		f.api.refuse(func(r *http.Request) *http.Response {
			if isWrite(r, "/status") {
				once.Do(watch.interrupt)
			}
			return nil
		})
		f.nodeFails("c1")
		f.Wait(expandMethod, 2)
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		kubetest.Eventually(t, "the resizer waits for the node", func(context.Context) error {
			if term.queue.Processing(k) {
				return errors.New("the claim is being processed")
			}
			return nil
		})
		f.nodeFails("c1")
		watch.resume()
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		f.called("9Gi 9Gi 9Gi")
		watch.delivers(f, "c1")
	})
	t.Run("earlier_leader_calls_while_the_watch_is_interrupted", func(t *testing.T) {
		f, watch := newFixture(t, modifies, nil), &claimWatch{}
		watch.start(f)
		f.classes()
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		watch.delivers(f, "c1")
		watch.interrupt()
		f.status("c1", func(c *corev1.PersistentVolumeClaim) { startModification(c, f.Unique("bronze"), time.Now()) })
		watch.resume()
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		f.modified("9 1 9")
	})
	t.Run("event_during_a_read", func(t *testing.T) {
		f := scenario(t, both, slowly)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" M=Pending/ P=2Gi PRE=1Gi "+waitNode)
		term, before := f.c.term.Load(), f.claim("c1")
		f.patch("c1", `{"metadata":{"labels":{"a":"b"}}}`)
		f.create("c2", nil) // when its request is handled, all events of c1 are
		f.request("c2", "2Gi")
		f.reaches("c2", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		k := keyOf(before, modify)
		processing := func(want bool) func(context.Context) error {
			return func(context.Context) error {
				for _, o := range []operation{expand, modify} {
					if term.queue.Processing(keyOf(before, o)) != want {
						return fmt.Errorf("whether operation %v is processed is not %t", o, want)
					}
				}
				return nil
			}
		}
		kubetest.Eventually(t, "both operations wait", processing(false))
		a := &attempt{t: term, key: k}
		a.lock() // so that both are in progress until the end
		defer func() { a.unlock() }()
		f.Must(a.readClaim(t.Context(), before))
		kubetest.Eventually(t, "both operations are enqueued", processing(true))
	})
}
