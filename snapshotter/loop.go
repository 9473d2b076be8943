// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// contentKey identifies a content. The UID gives a recreated object of the same name a back-off of
// its own.
type contentKey struct {
	Name string
	UID  types.UID
}

// String returns the name, for logs and /statusz.
func (k contentKey) String() string { return k.Name }

// loopDeps holds what differs between the loops of snapshots and of groups.
type loopDeps[T, C object] struct {
	name    string
	kind    *kind
	watches *watches[T, C]
	writer  kube.Writer[T] // of objects
	status  kube.Writer[T] // of their status
	classes classReader[C]
	content func(T) *content
	class   func(C) *class
	calls   calls
	gauges  *atomic.Pointer[gauges]
}

// classReader reads classes from the API server.
type classReader[C object] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (C, error)
}

// loop reconciles the contents of one resource between acquiring and releasing the Lease.
type loop[T, C object] struct {
	handlers[T, C]
	objects *kube.TermCache[T]
	handles keylock.Locks[string] // of snapshots that are written to a status
}

// runLoop reconciles until ctx ends and returns after the last worker has stopped.
func runLoop[T, C object](ctx context.Context, c *Controller, deps loopDeps[T, C]) error {
	l := &loop[T, C]{objects: kube.NewTermCache(deps.watches.contents)}
	l.loopDeps, l.c = deps, c
	l.ledger = intent.NewLedger[types.UID, memory](func(ctx context.Context) error {
		return election.MayCallNow(ctx, election.Moment{})
	})
	l.queue = workloop.New(workloop.Config{
		Name: deps.name, RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + workloop.APIGrace,
	}, c.deps.Queues, l.sync)
	defer l.queue.Stop()
	registrations := l.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "snapshotter caches"); err != nil {
		return err
	}
	deps.gauges.Store(&gauges{l.count})
	defer deps.gauges.Store(nil)
	if deps.name == queueContents {
		wake := l.wake
		c.wakeMembers.Store(&wake)
		defer c.wakeMembers.Store(nil)
	}
	var wg sync.WaitGroup
	wg.Go(func() { l.queue.Run(ctx, c.cfg.WorkerThreads) })
	wg.Go(func() { l.resync(ctx) })
	wg.Wait()
	return context.Cause(ctx)
}

// maxSteps bounds the steps of one sync. A creation takes up to five, a deletion during a creation
// up to nine.
const maxSteps = 20

// sync runs the steps that [driver.decide] returns until nothing is left to do.
func (l *loop[T, C]) sync(ctx context.Context, key contentKey) (time.Time, error) {
	var r reads
	for i := range maxSteps {
		obj, s := l.gather(key, r)
		if s.content == nil {
			switch {
			case !s.call.State.MayHaveEffect():
				l.forget(ctx, key)
			case s.call.Payload.orphan != nil:
				return time.Time{}, l.undo(ctx, key, s.call)
			}
			return time.Time{}, nil // else the watch delivers its deletion
		}
		log := klog.FromContext(ctx).WithValues(logKey(s.content), key.Name)
		step := l.c.driver.decide(s)
		log.V(2).Info("Decided", "action", step.action, "reason", step.reason)
		switch {
		case step.action == doNothing && i == 0 && !step.next.IsZero(): // the last check may have failed
			return step.next, workloop.Waiting{}
		case step.action == doNothing:
			return step.next, nil
		}
		operation := "CreateSnapshot"
		if s.content.terminating() {
			operation = "DeleteSnapshot"
		}
		traced, end := tracing.StartSpan(tracing.WithOperation(klog.NewContext(ctx, log), operation, key.UID), step.action.String())
		err := l.apply(traced, obj, s, step, &r)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("reconciling %q: not finished after %d steps", key.Name, maxSteps)
}

// logKey returns the key of c in log lines.
func logKey(c *content) string {
	if c.group {
		return "volumeGroupSnapshotContent"
	}
	return "volumeSnapshotContent"
}

// gather reads the caches, including own writes that the watch has not delivered yet.
func (l *loop[T, C]) gather(key contentKey, r reads) (T, state) {
	s := state{reads: r, now: time.Now(), call: l.ledger.Get(key.UID)}
	obj, fresh, ok := l.objects.Fresh(key.Name)
	if !ok || obj.GetUID() != key.UID {
		return obj, s
	}
	s.content, s.live = l.content(obj), fresh
	s.class = r.class
	if class, ok := l.watches.classes.Get(s.content.class); ok && s.content.class != "" {
		s.class = l.class(class)
	}
	if s.content.member() {
		s.groupReady, s.groupFound = l.c.groupReadiness(s.content.groupHandle())
	}
	handle := s.content.deletedHandle(s.call.Payload)
	if isNew := s.call.Payload.answer != nil && s.content.known().handle == ""; handle != "" && (isNew || s.content.terminating()) {
		s.other = l.other(s.content, handle)
	}
	return obj, s
}

// other returns another content of the driver that names a snapshot, first one that is not being deleted, or nil. Own writes count.
func (l *loop[T, C]) other(c *content, handle string) (found *content) {
	for _, obj := range append(l.objects.Written(), l.watches.contents.ByIndex(byHandle, handle)...) {
		newest, ok := l.objects.Get(obj.GetName())
		if !ok || newest.GetUID() == c.uid() {
			continue
		}
		if o := l.content(newest); o.driver == c.driver && o.namedHandle() == handle && (found == nil || found.leaving()) {
			found = o
		}
	}
	return found
}

// groupReadiness returns the readiness of the group with that handle, and whether its content is in the cache.
func (c *Controller) groupReadiness(handle string) (_ groupReadiness, found bool) {
	w, _, _ := c.groups.Get()
	switch {
	case c.groupsOff() != nil:
		return groupUnknown, false
	case w == nil: // they are opened, or the API server does not list them at the moment
		return groupNotReady, false
	}
	groups := w.contents.ByIndex(byGroup, handle)
	for _, o := range groups {
		if groupContent(o).known().ready {
			return groupIsReady, true
		}
	}
	return groupNotReady, len(groups) > 0
}
