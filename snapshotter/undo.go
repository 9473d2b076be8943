// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// deleted handles the last state of a content.
func (l *loop) deleted(c *content) {
	undo := false
	l.ledger.Update(c.UID, func(s intent.State, m *memory) {
		undo = l.mustUndo(c, entry{State: s, Payload: *m})
		if undo {
			m.orphan = c
		}
	})
	if undo {
		l.queue.Add(keyOf(c))
		return
	}
	l.missed(c)
}

// missed handles an earlier state of a content that was deleted. Its policy may have become Retain since.
func (l *loop) missed(c *content) {
	l.queue.Forget(keyOf(c))
	l.forget(context.Background(), keyOf(c))
	l.wakeSharing(c)
}

// forget drops the memory of a deleted content.
func (l *loop) forget(ctx context.Context, key contentKey) {
	e := l.ledger.Take(key.UID)
	if !e.State.MayHaveEffect() || e.Payload.releasing {
		return
	}
	handle, name := "", requestWith(e.Args, key.UID).Name
	if e.Payload.answer != nil {
		handle = e.Payload.answer.handle
	}
	klog.FromContext(ctx).Info("Content was deleted before its snapshot. Delete the snapshot at the storage system if it is not needed",
		"content", key.Name, "snapshotHandle", handle, "snapshotName", name)
	reason := l.kind.deleted
	l.c.deps.Events.Event(l.kind.reference(key), warning, reason, kube.Message(fmt.Sprintf("This content was deleted or given to another "+
		"driver during %s: the %s %q (handle %q) may remain. Delete it at the storage system if it is not needed",
		l.kind.create, l.kind.noun, name, handle)))
}

// forgetUnsent drops the memory of a deleted content, unless its call, which was in the state last, may have an effect: the handler of
// its deletion decides about that.
func (l *loop) forgetUnsent(ctx context.Context, key contentKey, last intent.State) {
	if !last.MayHaveEffect() {
		l.forget(ctx, key)
	}
}

// mustUndo reports whether the call e of c, whose last state before its deletion is c, is undone: it may have an effect, or is planned
// and sent before the next sync, and a late write of an earlier leader may have removed the finalizer. A snapshot that was known before
// the deletion began is not deleted then, nor one that another content names: an administrator may have removed the finalizer to keep it.
func (l *loop) mustUndo(c *content, e entry) bool {
	handle := c.deletedHandle(e)
	return c.leaving() && c.policy == snapshotv1.VolumeSnapshotContentDelete && (handle == "" || l.other(c, handle) == nil) &&
		e.State.InProgress() && !e.Payload.releasing && e.Payload.undoable
}

// orphanOf returns the last state of a content that does not exist any more and whose call e is undone, or nil. Its deletion continues as
// that of a content that exists, but nothing is written to it.
func orphanOf(e entry) *content {
	if e.State == intent.Planned { // nothing was sent
		return nil
	}
	return e.Payload.orphan
}

// confirmOrphan reads c, which the cache lacks, and forgets it if it exists: a watch by labels also ends with a label, and this cache with
// a change of the driver.
func (l *loop) confirmOrphan(ctx context.Context, c *content) error {
	live, err := l.writer.Get(ctx, c.Name, metav1.GetOptions{})
	switch {
	case err == nil && live.UID == c.UID:
		l.forget(ctx, keyOf(c))
	case err != nil && !kube.IsNotFound(err):
		return fmt.Errorf("reading the content: %w", err)
	}
	return nil
}
