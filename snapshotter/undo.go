// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// mustUndo reports whether the call e of c, whose last state before its deletion is c, is undone: it may have an effect, or is planned
// and sent before the next sync, and a late write of an earlier leader may have removed the finalizer. A snapshot that was known before
// the deletion began is not deleted then, nor one that another content names: an administrator may have removed the finalizer to keep it.
func (l *loop) mustUndo(c *content, e entry) bool {
	handle, called := c.deletedHandle(e), e.Payload.called
	return c.leaving() && c.policy == snapshotv1.VolumeSnapshotContentDelete && (handle == "" || l.other(c, handle) == nil) &&
		e.State.InProgress() && !e.Payload.releasing && called != nil && (called.known().handle == "" || called.leaving())
}

// undo deletes the snapshot of a content that does not exist any more. If the outcome of its CreateSnapshot is unknown, the call is
// repeated first.
func (l *loop) undo(ctx context.Context, key contentKey, e entry) error {
	c, request := e.Payload.called, requestWith(e.Args, key.UID)
	log := klog.FromContext(ctx).WithValues(c.logKey, key.Name, "snapshotName", request.Name)
	failed := func(err error) error {
		log.Error(err, "Content was deleted before its snapshot. The deletion is retried while this process leads")
		l.event(c, warning, c.deleted, fmt.Sprintf("Failed to delete %s: the content was deleted before it: %v. "+
			"Check the storage system for the %[1]s %[3]q, which may remain", c.noun, err, request.Name))
		return err
	}
	if exists, err := l.stillExists(ctx, c); exists || err != nil {
		return err
	}
	secrets, err := l.c.orphanSecrets(ctx, c)
	if err != nil {
		return failed(err)
	}
	if e.State.Unanswered() {
		err := l.send(ctx, c, e, request, secrets)
		final, is := errors.AsType[failedCall](err)
		switch {
		case is && final.ended && c.known().handle == "":
			l.ledger.Take(key.UID)
			if final.remains != "" {
				l.event(c, warning, c.deleted, final.remains)
			}
			return nil
		case err != nil && !(is && final.ended):
			return failed(err)
		}
		e = l.ledger.Get(key.UID)
	}
	if err := l.happened(key.UID, intent.Reject, nil); err != nil {
		return err
	}
	for _, a := range c.undone(e.Payload.answer) {
		if other := l.other(c, a.handle); other != nil {
			l.event(c, warning, c.deleted, fmt.Sprintf("%s returned the %s %q of %s %q, which is kept. Check both at the storage system",
				c.create, c.noun, a.handle, other.kind.name, other.Name))
			continue
		}
		exists, err := l.undoOne(ctx, c, a, secrets)
		switch {
		case err != nil:
			return failed(fmt.Errorf("deleting the %s %q: %w", c.noun, a.handle, err))
		case exists:
			return nil
		}
		log.Info("Snapshot of a deleted content deleted", "snapshotHandle", a.handle)
	}
	l.ledger.Take(key.UID)
	return nil
}

// undone returns the snapshots that are deleted with c, which does not exist any more: that of the last response, and that of the status.
func (c *content) undone(last *answer) (all []answer) {
	if last != nil {
		all = append(all, *last)
	}
	if known := c.known(); known.handle != "" && (last == nil || last.handle != known.handle) {
		all = append(all, answer{handle: known.handle, snapshots: known.snapshots})
	}
	return all
}

// undoOne deletes one snapshot of c, unless c exists.
func (l *loop) undoOne(ctx context.Context, c *content, a answer, secrets map[string]string) (exists bool, err error) {
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	members := handlesOf(a.snapshots)
	if len(members) == 0 {
		if members, err = l.calls.members(call, a.handle, secrets); err != nil {
			return false, err
		}
	}
	read := election.Now()
	// Again: the calls of the driver may have taken long.
	if exists, err = l.stillExists(ctx, c); exists || err != nil {
		return exists, err
	}
	if err = election.MayCallNow(ctx, read); err != nil {
		return false, err
	}
	return false, l.calls.delete(call, a.handle, members, secrets)
}

// stillExists reads c, and forgets it if it exists: a watch by labels also ends with a label, and this cache with a change of the driver.
func (l *loop) stillExists(ctx context.Context, c *content) (bool, error) {
	live, err := l.writer.Get(ctx, c.Name, metav1.GetOptions{})
	switch {
	case err == nil && live.UID == c.UID:
		l.forget(ctx, keyOf(c))
		return true, nil
	case err != nil && !kube.IsNotFound(err):
		return false, fmt.Errorf("reading %s %q, which was deleted during a repeated creation: %w", c.kind.name, c.Name, err)
	}
	return false, nil
}

// orphanSecrets reads the Secret for the calls of an undo; nil for none.
func (c *Controller) orphanSecrets(ctx context.Context, o *content) (map[string]string, error) {
	secret, err := c.driver.annotatedSecret(o)
	if err != nil || secret == nil {
		return nil, err
	}
	values, err := kube.ReadSecret(ctx, c.deps.Client, secret)
	if err != nil {
		return nil, credentials(o, err)
	}
	return values, nil
}
