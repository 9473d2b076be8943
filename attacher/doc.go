// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package attacher reconciles the VolumeAttachments of one CSI driver: it calls ControllerPublishVolume and
// ControllerUnpublishVolume and writes the results to the objects (CSI spec, "ControllerPublishVolume" and
// "ControllerUnpublishVolume").
//
// Fields that it writes:
//
//   - finalizer external-attacher/DRIVER of a VolumeAttachment, added before the first publish and removed after a successful unpublish;
//   - the same finalizer of a PersistentVolume, added before the first publish unless the provisioner of the same process created the
//     object with it. It is removed once no VolumeAttachment names the PersistentVolume, and the PersistentVolume is being deleted or
//     CSI migration was disabled for it;
//   - annotation csi.alpha.kubernetes.io/node-id and four annotations with the prefix storage-controller.io/ of a VolumeAttachment, for
//     a detach after the CSINode or the PersistentVolume was deleted;
//   - status of a VolumeAttachment.
//
// It sends no events: the attach-detach controller sends those for Pods.
//
// Each arrow is one write, or one RPC and the write that records its result. The process
// may exit at any of them:
//
//	created ─► [volume finalizer ─►] finalizer, annotations ─► published, attached=true
//	deletionTimestamp ─► unpublished, finalizer removed ─► deleted
//	deleted by force during the publish ─► unpublished, retried until the term ends
//
// Both RPCs follow the rules of package intent.
//
//   - record.go: what a VolumeAttachment records about its calls: the finalizer with the annotations, and the status;
//   - ledger.go: the calls of the term, and the lock that lets the driver get one call at a time for a volume and a node;
//   - undo.go: those whose VolumeAttachment was deleted by force, also the log at the end of the term;
//   - replaced.go: another PersistentVolume or VolumeAttachment of the same name;
//   - list_volumes.go: the comparison with the driver;
//   - volume_finalizer.go: the finalizer of PersistentVolumes.
//
// A driver without PUBLISH_UNPUBLISH_VOLUME is never called. Its VolumeAttachments are marked attached, and finalizers from an earlier
// version of the driver are removed.
package attacher
