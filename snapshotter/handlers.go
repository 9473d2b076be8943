// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"maps"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// handlers fill the queue of a [loop] with the contents that need a sync.
type handlers[T, C object] struct {
	loopDeps[T, C]
	c      *Controller
	queue  *workloop.Loop[contentKey]
	ledger *intent.Ledger[types.UID, memory]
}

// register adds the event handlers.
func (h *handlers[T, C]) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	registrations.Add(h.watches.contents.Handle(kube.Handlers[T]{Add: h.added, Update: h.updated, Delete: h.deleted, Missed: h.missed}))
	registrations.Add(h.watches.classes.Handle(kube.Handlers[C]{
		Add: h.classChanged,
		Update: func(old, class C) {
			a, b := h.class(old), h.class(class)
			if a.driver != b.driver || !maps.Equal(a.parameters, b.parameters) {
				h.classChanged(class)
			}
		},
	}))
	return registrations
}

func keyOf(c *content) contentKey { return contentKey{c.meta.Name, c.meta.UID} }

// unfinished reports whether c needs a sync.
func (h *handlers[T, C]) unfinished(c *content) bool {
	switch h.c.driver.rowOf(c, h.ledger.Get(c.uid())) {
	case notResponsible, deletionDone:
		return false
	case waitForGroup:
		return c.terminating()
	case complete:
		return c.has(c.creating) || c.terminating()
	}
	return true
}

func (h *handlers[T, C]) added(obj T) {
	c := h.content(obj)
	if h.unfinished(c) {
		h.queue.Add(keyOf(c))
	}
	h.wakeMembers(c)
}

// wakeMembers enqueues the members of a group that is ready.
func (h *handlers[T, C]) wakeMembers(c *content) {
	if wake := h.c.wakeMembers.Load(); wake != nil && c.group && c.known().ready {
		(*wake)(c.known().handle)
	}
}

// wake enqueues the members of the group with that handle.
func (h *handlers[T, C]) wake(handle string) {
	for _, obj := range h.watches.contents.ByIndex(byGroup, handle) {
		h.added(obj)
	}
}

// updated enqueues a content that has changed in a way that may change the outcome of a failed
// attempt. Other changes, above all the own ones, leave the back-off alone.
func (h *handlers[T, C]) updated(old, obj T) {
	before, after := h.content(old), h.content(obj)
	if before.uid() != after.uid() { // deleted and recreated while the watch was interrupted
		h.missed(old)
	}
	if h.unfinished(after) && (before.uid() != after.uid() || h.matters(before, after)) {
		h.queue.Add(keyOf(after))
	}
	if after.leaving() && !before.leaving() {
		h.wakeSharing(after)
	}
	if !before.known().ready {
		h.wakeMembers(after)
	}
}

// matters reports whether a change ends a back-off.
func (h *handlers[T, C]) matters(before, after *content) bool {
	e := h.ledger.Get(after.uid())
	same := before.driver == after.driver && before.policy == after.policy && before.class == after.class &&
		before.handle == after.handle && equality.Semantic.DeepEqual(before.ref, after.ref)
	switch {
	case !same,
		before.meta.Annotations[before.secretName] != after.meta.Annotations[after.secretName],
		before.meta.Annotations[before.secretNamespace] != after.meta.Annotations[after.secretNamespace],
		before.has(before.secretName) != after.has(after.secretName),
		before.has(before.secretNamespace) != after.has(after.secretNamespace):
		return true
	case before.has(before.creating) && !after.has(after.creating) && (after.indeterminate(e) || unanswered(e.State)):
		return true // by another writer: this process removes it after a definite result
	case !before.has(before.creating) && after.has(after.creating) && after.known().handle != "" && !after.terminating():
		return true // restored by another writer; during a deletion, this process sets it for a check
	case after.known().ready && after.has(after.creating):
		return true // the watch may have skipped the version without it
	}
	return before.terminating() != after.terminating() || h.c.driver.rowOf(before, e) != h.c.driver.rowOf(after, e)
}

// deleted handles the last state of a content. A write of an earlier leader, which took effect late, may have removed the finalizer
// while a call may have an effect: the deletion continues without the content.
func (h *handlers[T, C]) deleted(obj T) {
	c := h.content(obj)
	e := h.ledger.Get(c.uid())
	if e.State.MayHaveEffect() && !e.Payload.releasing && c.leaving() && c.policy == snapshotv1.VolumeSnapshotContentDelete {
		h.ledger.Update(c.uid(), func(_ intent.State, m *memory) { m.orphan = c })
		h.queue.Add(keyOf(c))
		return
	}
	h.missed(obj)
}

// missed handles an earlier state of a content that was deleted. Its policy may have become Retain since.
func (h *handlers[T, C]) missed(obj T) {
	c := h.content(obj)
	h.queue.Forget(keyOf(c))
	h.forget(context.Background(), keyOf(c))
	h.wakeSharing(c)
}

// forget drops the memory of a deleted content.
func (h *handlers[T, C]) forget(ctx context.Context, key contentKey) {
	e := h.drop(key.UID)
	if !e.State.MayHaveEffect() || e.Payload.releasing {
		return
	}
	handle, name := "", requestWith(e.Args, key.UID).Name
	if e.Payload.answer != nil {
		handle = e.Payload.answer.handle
	}
	klog.FromContext(ctx).Info("Content was deleted before its snapshot. Delete the snapshot at the storage system if it is not needed",
		"content", key.Name, "snapshotHandle", handle, "snapshotName", name)
	reason := h.kind.deleted
	h.c.deps.Events.Event(h.kind.reference(key), warning, reason, kube.Message(fmt.Sprintf("This content was deleted or given to "+
		"another driver during %s: the %s %q (handle %q) may remain. Delete it at the storage system if it is not needed",
		h.kind.create, h.kind.noun, name, handle)))
}

// wakeSharing enqueues the contents that may wait until c does not name their snapshot.
func (h *handlers[T, C]) wakeSharing(c *content) {
	for _, obj := range h.watches.contents.ByIndex(byHandle, c.namedHandle()) {
		if o := h.content(obj); o.leaving() && o.uid() != c.uid() {
			h.added(obj)
		}
	}
}

// classChanged enqueues the contents that may wait for the class.
func (h *handlers[T, C]) classChanged(class C) {
	for _, obj := range h.watches.contents.ByIndex(byClass, class.GetName()) {
		h.added(obj)
	}
}

// resync enqueues everything unfinished at the interval --resync-period.
func (h *handlers[T, C]) resync(ctx context.Context) {
	if h.c.cfg.ResyncPeriod == 0 {
		return
	}
	tick := time.NewTicker(h.c.cfg.ResyncPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, obj := range h.watches.contents.List() {
			if c := h.content(obj); h.unfinished(c) {
				h.queue.Resync(keyOf(c))
			}
		}
	}
}
