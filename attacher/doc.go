// Package attacher attaches volumes to nodes: it turns the VolumeAttachments of a
// driver into ControllerPublishVolume and ControllerUnpublishVolume calls (CSI
// spec, "ControllerPublishVolume"; Kubernetes, "VolumeAttachment").
//
// It owns, on objects:
//
//   - the finalizer external-attacher/DRIVER on a VolumeAttachment, from before the
//     first publish until the last unpublish succeeded, so that an attachment that
//     may exist at the driver is never forgotten;
//   - the same finalizer on a PersistentVolume, from before the first publish until
//     the volume is being deleted and nothing attaches it any more, so that what an
//     unpublish needs to know is still there;
//   - the annotation csi.alpha.kubernetes.io/node-id on a VolumeAttachment, and three
//     under storage-controller.io/, by which it can be detached when its CSINode or
//     PersistentVolume is gone;
//   - status of a VolumeAttachment.
//
// An attachment goes through these states; every arrow is one write or one call
// with the write that records it, and the process may die at each of them:
//
//	created ─► volume protected ─► protected ─► published, attached=true
//	deleted ─► unpublished, finalizer removed ─► gone
//
// The driver without PUBLISH_UNPUBLISH_VOLUME has nothing to attach: its attachments
// are marked attached, and finalizers that an earlier version of it left are removed.
package attacher
