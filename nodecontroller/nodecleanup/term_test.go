// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestOptedOutNodesAreForgotten: of 1,000 Nodes that had opted out when they were deleted, the records keep
// those that have a volume of the driver, and the process no more than these after an hour.
func TestOptedOutNodesAreForgotten(t *testing.T) {
	const all, kept = 1000, 10
	synctest.Test(t, func(t *testing.T) {
		r := newActors().begin(0)
		p := r.replicas[0]
		r.w.createNode("keep", "keep", false)
		p.restart(r.w, r.settings)
		r.lead(p)
		r.checkLost(r.term)
		deleted := func(host string) {
			r.w.createNode(host, host, true)
			r.w.editNode(host, func(n *corev1.Node) { n.Annotations = map[string]string{p.c.policy.annotation: disabled} })
			r.w.deleteNode(host)
			p.catchUp(r.w)
			r.sync(r.term, host) // writes the record, and releases the Node
			if r.w.nodes[host] != nil {
				t.Fatalf("Node %s is not released", host)
			}
			r.w.removeCSINode(host)
			p.catchUp(r.w)
			r.sync(r.term, host)
		}
		for i := range all {
			host := fmt.Sprint("n", i)
			if i < kept {
				r.w.bind(fmt.Sprint("c", i), host)
			}
			deleted(host)
		}
		time.Sleep(lastSeenAge + time.Second) // of the clock of synctest
		r.checkLost(r.term)
		deleted("last")
		records, _ := r.term.records.all()
		if len(records) != kept || len(r.term.hosts) != kept || len(p.c.index.deleted) > kept+1 {
			t.Errorf("%d records, %d hosts in the memory of the term, %d in that of the process", len(records), len(r.term.hosts),
				len(p.c.index.deleted))
		}
		for _, n := range records {
			if !n.OptedOut || len(r.w.volumes) != kept {
				t.Errorf("the record is %+v, %d volumes are left", n, len(r.w.volumes))
			}
		}
		if r.failure != nil {
			t.Error(r.failure)
		}
	})
}

// TestNamespaceIsReadForEachCheck: the annotation of a Namespace that was read between two checks is known at the second.
func TestNamespaceIsReadForEachCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newActors().begin(0)
		p := r.replicas[0]
		p.restart(r.w, r.settings)
		r.lead(p)
		read := func() *corev1.Namespace {
			ns, err := r.term.namespace(t.Context(), "ns")
			if err != nil {
				t.Fatal(err)
			}
			return ns
		}
		old := read()
		r.w.namespace = old.DeepCopy()
		if read() != old {
			t.Error("it is read again at once")
		}
		time.Sleep(r.settings.LookInterval * 9 / 10) // of the clock of synctest
		if read() == old {
			t.Error("it is not read again")
		}
	})
}

// TestNothingOfATermIsLeft: neither a timer nor a handler keeps a term alive after Run has returned, although
// a Node waits for its timeout then.
func TestNothingOfATermIsLeft(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerTimeout = time.Hour, 2*time.Hour })
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	f.onlyWrites()
	p := f.prepare(f.user)
	f.process = p
	ctx, end := context.WithCancelCause(f.Context())
	done := make(chan error, 1)
	go func() { done <- p.c.Run(ctx) }()
	f.deleteNode("n")
	f.untilRecord("n", "exists", func(n *LostNode) bool { return n != nil })
	term, queue := weak.Make(p.c.term.Load()), weak.Make(p.c.term.Load().queue)
	over := errors.New("the Lease is lost")
	end(over)
	if err := <-done; !errors.Is(err, over) {
		t.Errorf("Run returned %v", err)
	}
	f.patchNode("n", `{"metadata":{"labels":{"changed":"true"}}}`) // whose handler runs
	f.observedNodes()
	f.eventually("the term is not referenced", func(context.Context) error {
		runtime.GC()
		if term.Value() != nil || queue.Value() != nil {
			return errors.New("the term or its queue can be reached")
		}
		return nil
	})
}

// joining is a cluster with lost volumes, in which nodes join.
func joining(volumes int) (c *Controller, w *world, requests *[]string) {
	a := newActors()
	r := a.begin(0)
	requests = &[]string{}
	for i := range volumes {
		r.w.bind(fmt.Sprint("c", i), fmt.Sprint("lost", i%10))
	}
	r.w.createNode("keep", "keep", false)
	a.replicas[0].restart(r.w, r.settings)
	r.w.interleave = func(request string) { *requests = append(*requests, request) }
	return a.replicas[0].c, r.w, requests
}

// join calls the handlers for a node that gets its label after it has joined, and for a lost volume and its claim.
func join(c *Controller, w *world, i int) {
	name := fmt.Sprint("new", i)
	w.createNode(name, "", true)
	bare := w.nodes[name]
	c.nodeChanged(bare)
	c.csiNodeChanged(w.csiNodes[name], true)
	w.editNode(name, func(n *corev1.Node) { n.Labels = map[string]string{worldKey: name} })
	c.nodeUpdated(bare, w.nodes[name])
	c.claimChanged(w.claims["c0"])
	c.enqueueLost(c.index.setVolume("pv-c0", w.volumes["pv-c0"]))
}

// collect replaces the queue of a term by one that reconciles nothing. enqueued ends it and returns its keys.
func collect(t *term) (enqueued func() []string) {
	var keys []string
	ctx, cancel := context.WithCancel(context.Background())
	waiting := 0
	t.queue = workloop.New(workloop.Config{Name: "test"}, t.c.deps.Queues, func(_ context.Context, key string) (time.Time, error) {
		if keys = append(keys, key); len(keys) == waiting {
			cancel()
		}
		return time.Time{}, nil
	})
	return func() []string {
		if waiting = t.queue.Len(); waiting == 0 {
			cancel()
		}
		t.queue.Run(ctx, 1)
		return keys
	}
}

// TestHandlersOnlyEnqueue: a handler updates the index and enqueues hosts. It sends no request, reads no
// volume of a lost node, and does not evaluate the breaker.
func TestHandlersOnlyEnqueue(t *testing.T) {
	c, w, requests := joining(1000)
	term := c.newTerm(func(error) {})
	var gathered []string
	term.observer.gather = func(_ context.Context, value string) (host, error) {
		gathered = append(gathered, value)
		return host{value: value}, nil
	}
	c.term.Store(term)
	enqueued := collect(term)
	for i := range 100 {
		join(c, w, i)
	}
	c.index.dropNode(w.nodes["new0"], "", time.Now())
	if len(*requests) > 0 || len(gathered) > 0 || len(term.hosts) > 0 || term.tripped.Load() {
		t.Errorf("the handlers sent %q, gathered %q and remember %d hosts", *requests, gathered, len(term.hosts))
	}
	waiting := term.queue.Len()
	keys := enqueued()
	// those of 100 nodes that joined, that of the volume, and that of the ConfigMap
	if joined := strings.Count(strings.Join(keys, " "), "new"); waiting != 102 || joined != 100 {
		t.Errorf("%d hosts were enqueued, %d of nodes: %q", waiting, joined, keys)
	}
}

// TestEnqueuedByNodeUpdates: one update may contain several changes of a Node.
func TestEnqueuedByNodeUpdates(t *testing.T) {
	for name, tc := range map[string]struct {
		mode   FinalizerMode
		driver bool
		change func(n *corev1.Node)
		want   string
	}{
		"heartbeat": {FinalizerRemove, true, func(*corev1.Node) {}, "[]"},
		"recreated with another label": {FinalizerRemove, true, func(n *corev1.Node) {
			n.UID, n.Labels = "another", map[string]string{worldKey: "h2"}
		}, "[h1 h2 n]"},
		// The controller has added it, and another client has removed it.
		"our finalizer is missing":      {FinalizerManage, true, func(*corev1.Node) {}, "[h1 n]"},
		"no driver needs our finalizer": {FinalizerManage, false, func(*corev1.Node) {}, "[]"},
		"a Node that is being deleted": {FinalizerManage, true, func(n *corev1.Node) {
			n.DeletionTimestamp, n.Finalizers = &metav1.Time{}, []string{"other"}
		}, "[]"},
		"our finalizer is there": {FinalizerManage, true, func(n *corev1.Node) { n.Finalizers = []string{worldDriver + "/node"} }, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			c, w, _ := joining(0)
			c.policy.NodeFinalizerMode = tc.mode
			w.createNode("n", "h1", false)
			old := w.nodes["n"]
			if !strings.HasPrefix(name, "recreated") { // both versions have the change
				tc.change(old)
			}
			c.nodeChanged(old)
			if tc.driver {
				c.csiNodeChanged(w.csiNodes["n"], true)
			}
			w.editNode("n", tc.change)
			term := c.newTerm(func(error) {})
			c.term.Store(term)
			enqueued := collect(term)
			c.nodeUpdated(old, w.nodes["n"])
			if got := fmt.Sprint(sorted(enqueued())); got != tc.want {
				t.Errorf("enqueued are %s, want %s", got, tc.want)
			}
		})
	}
}

// TestReadsEnqueueTheCheck: the handler takes a version of the ConfigMap that a read has adopted for an own write.
func TestReadsEnqueueTheCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		read func(ctx context.Context, t *term) error
		want int
	}{
		"before a deletion": {func(ctx context.Context, t *term) error { return t.records.confirm(ctx) }, 1},
		"after a conflict": {func(ctx context.Context, t *term) error {
			return t.records.change(ctx, func(s recordSet) {
				if s.annotations[AnnotationApprove] == "" {
					s.annotations["changed"] = "true"
				}
			})
		}, 1},
		"by the check": {func(ctx context.Context, t *term) error { _, err := t.checkLost(ctx); return err }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newActors().begin(0)
			r.hosts["b"] = &truth{}
			r.replicas[0].restart(r.w, r.settings)
			r.lead(r.replicas[0])
			r.checkLost(r.term)
			collect(r.term)
			r.as(r.term, func(ctx context.Context) (time.Time, error) {
				if err := r.term.records.confirm(ctx); err != nil || r.term.queue.Len() > 0 {
					t.Errorf("an unchanged ConfigMap: %v, %d keys", err, r.term.queue.Len())
				}
				r.approve("b", 2)
				if err := tc.read(ctx, r.term); err != nil {
					t.Error(err)
				}
				return time.Time{}, nil
			})
			if n := r.term.queue.Len(); n != tc.want || r.term.records.version() != r.w.stored.ResourceVersion {
				t.Errorf("%d keys, want %d, of version %s", n, tc.want, r.term.records.version())
			}
		})
	}
}

// TestClockIsSetForward: no time that was not checked counts for the grace. A due host is cleaned up after the next check only.
func TestClockIsSetForward(t *testing.T) {
	for name, forward := range map[string]time.Duration{"by_the_grace": 16 * time.Minute, "a_little": time.Minute} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newActors().begin(0)
				r.w.createNode("keep", "keep", false)
				r.w.bind("a", "lost")
				r.replicas[0].restart(r.w, r.settings)
				r.lead(r.replicas[0])
				r.checkLost(r.term)
				r.sync(r.term, "lost")
				for range 3 {
					time.Sleep(5*time.Minute - 10*time.Second) // of the clock of synctest
					r.checkLost(r.term)
				}
				before, _ := r.term.records.get("lost")
				time.Sleep(forward)
				enqueued := collect(r.term)
				r.sync(r.term, "lost")
				deleted, keys := r.w.claims["a"].DeletionTimestamp != nil, fmt.Sprintf("%q", enqueued())
				r.term.queue.Stop()
				r.checkLost(r.term)
				after, _ := r.term.records.get("lost")
				if gap := forward > r.settings.ClockGap; deleted == gap || (keys == `[""]`) != gap || before.Since.Equal(after.Since) == gap {
					t.Errorf("claim deleted: %v, enqueued %s, records %+v, %+v", deleted, keys, before, after)
				}
			})
		})
	}
}

// TestResourcesBeforeTheFirstCheck: the first check enqueues a host of which a sweep has found custom resources before.
func TestResourcesBeforeTheFirstCheck(t *testing.T) {
	r := newActors().begin(0)
	r.replicas[0].restart(r.w, r.settings)
	r.lead(r.replicas[0])
	r.term.remember("resources", func(m *memory) { m.resource = true })
	r.term.remember("volumes", func(*memory) {})
	r.sync(r.term, "resources") // which waits for the first check
	enqueued := collect(r.term)
	r.checkLost(r.term)
	if keys := enqueued(); fmt.Sprint(keys) != "[resources]" {
		t.Errorf("the check has enqueued %q", keys)
	}
}

// BenchmarkHandlers is the time of a node that joins, in a cluster with 1,000 lost volumes.
func BenchmarkHandlers(b *testing.B) {
	c, w, _ := joining(1000)
	for i := range b.N {
		join(c, w, i)
	}
}
