// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"iter"
	"slices"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
)

// neededByOther reports whether another VolumeAttachment needs the volume of step, from which va is to be detached, at the same node
// ID: that of another PersistentVolume with this volume, of an inline volume, or of another name of the node. Of two that are being
// deleted, none needs it.
//
// One whose publish has not succeeded waits for the detach, see [term.detachingOther]. The cache may be stale, so the other is read.
func (t *term) neededByOther(ctx context.Context, va *storagev1.VolumeAttachment, step step) (bool, error) {
	for cached := range t.others(va, step) {
		if cached.DeletionTimestamp != nil {
			continue
		}
		other, exists, err := t.attachments.Refetch(ctx, t.c.deps.Client.StorageV1().VolumeAttachments(), cached)
		switch {
		case err != nil:
			return false, fmt.Errorf("reading VolumeAttachment %q before calling the driver: %w", cached.Name, err)
		case exists && other.DeletionTimestamp == nil && other.Status.Attached && t.c.driver.mayBePublished(other):
			klog.FromContext(ctx).Info("Volume stays published, because another VolumeAttachment needs it", "volumeAttachment", va.Name,
				"otherVolumeAttachment", other.Name, "volumeHandle", step.source.handle, "nodeID", step.nodeID)
			return true, nil
		}
	}
	return false, nil
}

// detachingOther returns another VolumeAttachment for the volume and node ID of step that is being deleted, or nil: its unpublish
// could take effect after the volume is published for va.
func (t *term) detachingOther(va *storagev1.VolumeAttachment, step step) *storagev1.VolumeAttachment {
	for other := range t.others(va, step) {
		if other.DeletionTimestamp != nil && t.c.driver.mayBePublished(other) {
			return other
		}
	}
	return nil
}

// others yields the VolumeAttachments with another name than va that are for the volume and node ID of step.
func (t *term) others(va *storagev1.VolumeAttachment, step step) iter.Seq[*storagev1.VolumeAttachment] {
	return func(yield func(*storagev1.VolumeAttachment) bool) {
		candidates := t.c.attachments.ByIndex(kube.ByNode, va.Spec.NodeName)
		if pv := va.Spec.Source.PersistentVolumeName; pv != nil {
			candidates = slices.Concat(candidates, t.c.attachments.ByIndex(kube.ByVolume, *pv))
		}
		for _, cached := range candidates {
			if cached.Name == va.Name || t.c.driver.isOther(cached, step.source) {
				continue
			}
			s := t.gather(keyOf(cached), liveReads{})
			if s.attachment != nil && t.c.driver.isFor(s, step) && !yield(s.attachment) {
				return
			}
		}
	}
}

// isOther reports whether va has the record of another volume than src. Plugins of CSI migration have several handles for one.
func (d driver) isOther(va *storagev1.VolumeAttachment, src source) bool {
	recorded, _ := Recorded(va)
	return va.Spec.Attacher != d.name || recorded != "" && recorded != src.handle && migration.PluginOf(d.name) == ""
}

// isFor reports whether the VolumeAttachment of s is for the volume and node ID of step.
func (d driver) isFor(s attachmentState, step step) bool {
	src, err := d.detachSource(s)
	nodeIDs, nodeErr := d.detachNodeIDs(s)
	return err == nil && nodeErr == nil && slices.Contains(nodeIDs, step.nodeID) &&
		d.completeHandle(src, step.nodeID) == d.completeHandle(step.source, step.nodeID)
}

// completeHandle returns the handle of src without placeholders, if they can be resolved.
func (d driver) completeHandle(src source, nodeID string) string {
	if handle, err := d.reportedHandle(src, nodeID); err == nil {
		return handle
	}
	return src.handle
}
