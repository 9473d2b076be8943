// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// contentKey identifies a content. The UID gives a recreated object of the same name a back-off of its own.
type contentKey struct {
	Name string
	UID  types.UID
}

// String returns the name, for logs and /statusz.
func (k contentKey) String() string { return k.Name }

// loop reconciles the contents of one kind between acquiring and releasing the Lease.
type loop struct {
	c              *Controller
	term           types.UID // of this process
	kind           *kind
	watches        *watches
	calls          calls
	writer, status writer // of contents
	classes        resource
	objects        *kube.TermCache[*content]
	ledger         *intent.Ledger[types.UID, memory]
	queue          *workloop.Loop[contentKey]
	handles        keylock.Locks[string] // of snapshots that are written to a status
}

// runLoop reconciles until ctx ends and returns after the last worker has stopped. Meanwhile, running is the loop.
func (c *Controller) runLoop(ctx context.Context, k *kind, w *watches, calls calls, running *atomic.Pointer[loop]) error {
	api := c.clients[w.version]
	l := &loop{
		c: c, term: uuid.NewUUID(), kind: k, watches: w, calls: calls, classes: api.classes,
		writer: writer{api.contents, false}, status: writer{api.contents, true}, objects: kube.NewTermCache(w.contents),
		ledger: intent.NewLedger[types.UID, memory](election.MayCall),
	}
	l.queue = workloop.New(workloop.Config{
		Name: k.queue, RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + workloop.APIGrace,
	}, c.deps.Queues, l.sync)
	defer l.queue.Stop()
	registrations := l.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "snapshotter caches"); err != nil {
		return err
	}
	running.Store(l)
	defer running.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { l.queue.Run(ctx, int(c.cfg.WorkerThreads)) })
	wg.Go(func() { workloop.Every(ctx, c.cfg.ResyncPeriod, l.resync) })
	wg.Wait()
	return context.Cause(ctx)
}

// maxSteps bounds the steps of one sync. A creation takes up to five, a deletion during a creation up to nine.
const maxSteps = 20

// sync runs the steps that [driver.decide] returns until nothing is left to do.
func (l *loop) sync(ctx context.Context, key contentKey) (time.Time, error) {
	var r reads
	for i := range maxSteps {
		s := l.gather(key, r)
		if s.content == nil {
			l.forgetUnsent(ctx, key, s.call.State)
			return time.Time{}, nil
		}
		log := klog.FromContext(ctx).WithValues(l.kind.logKey, key.Name)
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
		err := l.apply(traced, s, step, &r)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("reconciling %q: not finished after %d steps", key.Name, maxSteps)
}

// gather reads the caches, including own writes that the watch has not delivered yet.
func (l *loop) gather(key contentKey, r reads) state {
	s := state{reads: r, term: l.term, now: time.Now(), call: l.ledger.Get(key.UID)}
	c, fresh, ok := l.objects.Fresh(key.Name)
	if !ok || c.UID != key.UID {
		c, fresh = orphanOf(s.call), true
		if c == nil {
			return s
		}
		s.orphan = true
		if !r.ofOrphan { // another driver may have it since that read
			s.read = election.Moment{}
		}
	}
	s.content, s.live, s.class, s.call = c, fresh, r.class, c.call(s.call)
	if class, ok := l.watches.classes.Get(c.class); ok && c.class != "" {
		s.class = class
	}
	if c.member() {
		s.groupReady, s.groupFound = l.c.groupReadiness(c.groupHandle())
	}
	handle := c.deletedHandle(s.call)
	if isNew := s.call.Payload.answer != nil && c.known().handle == ""; handle != "" && (isNew || c.terminating()) {
		s.other = l.other(c, handle)
	}
	return s
}

// other returns another content of the driver that names a snapshot, first one that is not being deleted, or nil. Own writes count.
func (l *loop) other(c *content, handle string) (found *content) {
	for _, o := range l.objects.ByIndex(byHandle, handle) {
		if o.UID != c.UID && o.driver == c.driver && (found == nil || found.leaving()) {
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
		if o.known().ready {
			return groupIsReady, true
		}
	}
	return groupNotReady, len(groups) > 0
}
