// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
)

// Finalizer returns the finalizer that the attacher of driver adds to VolumeAttachments
// and PersistentVolumes.
func Finalizer(driver string) string { return kube.AttacherFinalizerPrefix + election.Sanitize(driver) }

// releasesUnused reports whether the finalizer of pv has to be removed once no
// VolumeAttachment names pv: pv is being deleted, or its in-tree plugin attaches it again.
func (d driver) releasesUnused(pv *corev1.PersistentVolume) bool {
	return slices.Contains(pv.Finalizers, d.finalizer) && (pv.DeletionTimestamp != nil || d.abandoned(pv))
}

// abandoned reports whether an in-tree volume no longer belongs to the driver: its CSI
// migration was disabled, and the in-tree plugin attaches it again.
func (d driver) abandoned(pv *corev1.PersistentVolume) bool {
	return pv.Annotations[storagehelpers.AnnMigratedTo] != d.name && migration.IsInTree(pv)
}

// releasable reports whether the finalizer of pv can be removed. attachments counts the
// VolumeAttachments that name pv, of any driver.
//
// The cache is sufficient here: the detach of a VolumeAttachment that it lacks needs no PersistentVolume, because of the
// annotations. An attach of a volume that is being deleted is refused.
func (d driver) releasable(pv *corev1.PersistentVolume, attachments int) bool {
	return attachments == 0 && d.releasesUnused(pv)
}

// syncVolume removes the finalizer of a PersistentVolume that no VolumeAttachment names. If one does, csi-attacher may have
// attached the volume and recorded the node ID only: the rest is recorded before the PersistentVolume can be lost.
func (t *term) syncVolume(ctx context.Context, name string) (time.Time, error) {
	pv, ok := t.volumes.Get(name)
	if !ok {
		return time.Time{}, nil
	}
	attachments := kube.AttachmentsOf(t.c.attachments, name)
	for _, cached := range attachments {
		va, ok := t.attachments.Get(cached.Name)
		if change := t.c.driver.missingRecord(va, pv); ok && change != nil {
			if err := t.changeAttachment(ctx, va, *change); err != nil {
				return time.Time{}, fmt.Errorf("recording the volume handle on VolumeAttachment %q: %w", va.Name, err)
			}
		}
	}
	if !t.c.driver.releasable(pv, len(attachments)) {
		return time.Time{}, nil // the deletion of its last VolumeAttachment enqueues it again
	}
	_, err := t.volumes.Patch(ctx, t.c.deps.Client.CoreV1().PersistentVolumes(), pv,
		kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}})
	return time.Time{}, err
}

// VolumeFinalizers returns the finalizers that the provisioner of this process creates PersistentVolumes with, so that an attach need not
// add them. The attacher that holds the Lease may be in another process; every attacher removes the finalizer from a PersistentVolume
// that is being deleted.
func (c *Controller) VolumeFinalizers() []string {
	if !c.driver.caps.PublishUnpublishVolume {
		return nil
	}
	return []string{c.driver.finalizer}
}

// RemovableFinalizers returns the finalizers of the attacher that another controller may
// remove from pv in its own write, after it has deleted the volume at the driver. It
// returns nil while a VolumeAttachment names pv or this process does not hold the Lease.
func (c *Controller) RemovableFinalizers(pv *corev1.PersistentVolume) []string {
	attached := len(kube.AttachmentsOf(c.attachments, pv.Name)) > 0
	if c.term.Load() == nil || attached || !slices.Contains(pv.Finalizers, c.driver.finalizer) {
		return nil
	}
	return []string{c.driver.finalizer}
}
