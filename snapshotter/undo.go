// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// mustUndo reports whether the call e of c, whose last state before its deletion is c, is undone: it may have an effect, or is planned
// and sent before the next sync, and a late write of an earlier leader may have removed the finalizer. A snapshot that was known before
// the deletion began is not deleted then, nor one that another content names: an administrator may have removed the finalizer to keep it.
func (l *loop) mustUndo(c *content, e entry) bool {
	handle := c.deletedHandle(e)
	return c.leaving() && c.policy == snapshotv1.VolumeSnapshotContentDelete && (handle == "" || l.other(c, handle) == nil) &&
		leftBehind(e) && e.Payload.undoable
}

// leftBehind reports whether the call e was in progress when its content was deleted. If this process has removed the finalizer, the call
// had ended.
func leftBehind(e entry) bool { return e.State.InProgress() && !e.Payload.releasing }

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
