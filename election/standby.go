// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// watchLease watches one Lease, from its present state.
type watchLease func(ctx context.Context) (watch.Interface, error)

// watchOf returns the watch of the Lease of lock.
func watchOf(lock *resourcelock.LeaseLock) watchLease {
	return func(ctx context.Context) (watch.Interface, error) {
		return lock.Client.Leases(lock.LeaseMeta.Namespace).Watch(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, lock.LeaseMeta.Name).String(),
		})
	}
}

// standbyLock lets a standby acquire the Lease when it is released or expires. client-go would read it only after once to 2.2 times the
// retry period, which is also the time between two renewals.
type standbyLock struct {
	*observedLock
	watch  watchLease
	period time.Duration // between two reads without a watch

	seen     <-chan watch.Event // nil: the Lease is not watched
	unwatch  context.CancelFunc
	reported atomic.Bool   // a failed watch was logged
	last     holding       // as last read or watched
	since    time.Time     // when it was first seen in this state
	duration time.Duration // after which it expires in this state
	waited   bool          // Get has waited since the last write
	acquired metav1.Time   // after a wait; zero: as client-go says
}

// Get waits until this replica may acquire the Lease, or has acquired it. A Lease of another replica that was not renewed for its
// duration is returned without its holder. The Update that follows fails if the Lease has changed since this read.
func (l *standbyLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	for {
		record, raw, err := l.observedLock.Get(ctx)
		if err != nil {
			return record, raw, err
		}
		if _, acquired := l.written(); acquired || record.HolderIdentity == l.Identity() || record.HolderIdentity == "" {
			l.stop()
			return record, raw, nil
		}
		l.see(record)
		if l.rest() <= 0 {
			l.stop()
			record.HolderIdentity = ""
			return record, raw, nil
		}
		l.waited = true
		err = l.await(ctx)
		if err != nil {
			return nil, nil, err
		}
	}
}

// Update acquires or renews the Lease. client-go has taken the time before Get has waited, and keeps it as the time of the acquisition.
func (l *standbyLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	acquired := l.acquired
	if l.waited {
		acquired = metav1.Now()
		record.RenewTime = acquired
	}
	if !acquired.IsZero() {
		record.AcquireTime = acquired
	}
	err := l.observedLock.Update(ctx, record)
	if err == nil {
		l.waited, l.acquired = false, acquired
	}
	return err
}

// holding is a state of a Lease, which the next renewal changes.
type holding struct {
	holder  string
	renewed int64 // in Unix nanoseconds
}

// see records a state of the Lease, which another replica holds.
func (l *standbyLock) see(record *resourcelock.LeaderElectionRecord) {
	now := holding{record.HolderIdentity, record.RenewTime.UnixNano()}
	if now != l.last {
		l.last, l.since = now, time.Now()
	}
	l.duration = time.Duration(record.LeaseDurationSeconds) * time.Second
}

// rest returns the time until the Lease expires.
func (l *standbyLock) rest() time.Duration { return l.duration - time.Since(l.since) }

// await returns when the Lease should be read: it was released or deleted, has expired, or its watch has ended.
func (l *standbyLock) await(ctx context.Context) error {
	for {
		if l.seen == nil {
			l.follow(ctx)
		}
		wait, seen := l.rest(), l.seen
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
			return nil
		case event, watched := <-seen:
			switch {
			case !watched:
				l.stop()
				return l.pause(ctx)
			case !l.isHeld(event):
				return nil
			}
		}
	}
}

// pause waits before the next watch: an API server that ends each at once must not be asked without a pause.
func (l *standbyLock) pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(min(l.rest(), l.period)):
		return nil
	}
}

// follow begins to watch the Lease. A watch that cannot be opened, or hangs, delays nothing else.
func (l *standbyLock) follow(ctx context.Context) {
	ctx, l.unwatch = context.WithCancel(ctx)
	seen := make(chan watch.Event)
	l.seen = seen
	failed := func(err error) {
		if ctx.Err() == nil && l.reported.CompareAndSwap(false, true) {
			klog.FromContext(ctx).Info("Watching the Lease failed, reading it instead", "lease", l.Describe(), "every", l.period,
				"err", err)
		}
	}
	go func() {
		defer close(seen)
		watcher, err := l.watch(ctx)
		if err != nil {
			failed(err)
			return
		}
		defer watcher.Stop()
		for event := range watcher.ResultChan() {
			if event.Type == watch.Error {
				failed(apierrors.FromObject(event.Object))
				return
			}
			select {
			case seen <- event:
			case <-ctx.Done():
				return
			}
		}
	}()
}

// isHeld reports whether the Lease of event is held by another replica, and records its state then.
func (l *standbyLock) isHeld(event watch.Event) bool {
	lease, ok := event.Object.(*coordinationv1.Lease)
	if !ok || event.Type == watch.Deleted {
		return false
	}
	record := resourcelock.LeaseSpecToLeaderElectionRecord(&lease.Spec)
	if record.HolderIdentity == "" || record.HolderIdentity == l.Identity() {
		return false
	}
	l.holder.Store(record.HolderIdentity)
	l.see(record)
	return true
}

// stop ends the watch.
func (l *standbyLock) stop() {
	if l.seen != nil {
		l.unwatch()
		l.seen = nil
	}
}
