// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

// readMembers asks the driver for the snapshots of a group that is deleted next. The content is read again after that.
func (l *loop) readMembers(ctx context.Context, s state, step step, r *reads) (err error) {
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	r.snapshots, err = l.calls.members(call, step.deleted.handle, s.secrets)
	if err != nil {
		return l.reportDeletion(ctx, s.content, deletionError(s.content, err))
	}
	r.listed, r.read = true, election.Moment{}
	return nil
}

// delete calls DeleteSnapshot.
func (l *loop) delete(ctx context.Context, s state, step step) error {
	c := s.content
	if err := pressure.Enter(ctx, c.remove, c.class); err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	deletes := c.leaving() && c.policy == snapshotv1.VolumeSnapshotContentDelete && !c.member()
	if err := intent.Must(deletes, "%s of %q: the content is not deleted with its snapshot", c.remove, step.deleted.handle); err != nil {
		return l.reportDeletion(ctx, c, deletionError(c, err))
	}
	if err := election.MayCallNow(ctx, s.read); err != nil {
		return err
	}
	if err := l.calls.delete(call, step.deleted, s.secrets); err != nil {
		return l.reportDeletion(ctx, c, deletionError(c, err))
	}
	klog.FromContext(ctx).Info("Snapshot deleted", "snapshotHandle", step.deleted.handle)
	all := c.snapshots(s.call)
	return l.happened(c.UID, intent.Settle, func(m *memory) {
		m.answer = nil
		if len(all) == 1 {
			m.deleted, m.blocked = true, ""
		}
	})
}

// removeFinalizer ends a deletion.
func (l *loop) removeFinalizer(ctx context.Context, s state, step step) error {
	c, change := s.content, step.change
	change.RemoveFinalizers, change.RemoveAnnotations = []string{c.finalizer}, []string{c.creating}
	if step.warning != "" {
		l.eventOnce(c, step.warning, warning, c.deleted, step.warning)
	}
	if s.orphan {
		l.ledger.Take(c.UID)
		return nil
	}
	l.remember(c.UID, func(m *memory) { m.releasing = true })
	_, err := l.objects.Patch(ctx, l.writer, c, change)
	if err == nil {
		return l.happened(c.UID, intent.Settle, func(m *memory) { m.blocked = "" })
	}
	l.remember(c.UID, func(m *memory) { m.releasing = false })
	if l.objects.Outdated(c, err) {
		return nil // decide again
	}
	return l.reportDeletion(ctx, c, deletionError(c, fmt.Errorf("removing finalizer %s: %w", c.finalizer, err)))
}
