// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
)

func explainAttachment(f *facts) Report {
	va := f.attachment.Value
	e := &explanation{facts: f}
	explainProcess(e, []string{"attacher"}, inQueues(va.Name, "csi-attacher-va"), f.volumeHandle())
	if va.DeletionTimestamp != nil {
		explainDetaching(e)
	} else {
		explainAttaching(e)
	}
	explainAttachedVolume(e)
	explainAttachedNode(e)
	explainSecrets(e)
	explainDriver(e)
	volume, state, rest := "The inline volume", "not attached", "The attacher processes the attachment."
	if name := volumeOf(va); name != "" {
		volume = apiread.Name(KindVolume, "", name)
	}
	if va.Status.Attached {
		state = "attached"
		rest = "Nothing to do: pods on the node can use the volume. kube-controller-manager deletes the attachment when none does."
	}
	return e.report(KindAttachment, va, fmt.Sprintf("%s is %s to node %q", volume, state, va.Spec.NodeName), rest, f.driver)
}

// lastFailure returns the error of the last attempt to attach or detach; nil if none is recorded.
func lastFailure(va *storagev1.VolumeAttachment) *storagev1.VolumeError {
	switch {
	case va.DeletionTimestamp != nil:
		return va.Status.DetachError
	case va.Status.Attached:
		return nil
	}
	return va.Status.AttachError
}

// operation returns detach if va is being deleted, else attach.
func operation(va *storagev1.VolumeAttachment, detach, attach string) string {
	if va.DeletionTimestamp != nil {
		return detach
	}
	return attach
}

// explainLastAttempt reports the error of the last attempt to attach or detach, and whether it came from the driver.
func explainLastAttempt(e *explanation, err *storagev1.VolumeError) {
	va, failure := e.attachment.Value, failureOfStatus(err)
	what := operation(va, "Detaching the volume", "Attaching the volume")
	if failure.grpcCode() != "" {
		what = operation(va, "ControllerUnpublishVolume", "ControllerPublishVolume")
	}
	e.failed("attachment", failure, "%s failed", what)
}

// explainDetaching reports how far the attacher is with a deleted attachment.
func explainDetaching(e *explanation) {
	va := e.attachment.Value
	switch err := lastFailure(va); {
	case !slices.Contains(va.Finalizers, attacher.Finalizer(e.driver)):
		e.waiting("attachment", "Finalizer %s is not set: the attacher has detached the volume, or did not attach it.",
			attacher.Finalizer(e.driver)).SetNext(finalizersRemoved)
		return
	case err != nil:
		explainLastAttempt(e, err)
	default:
		e.waiting("attachment", "The attachment is being deleted, and its status has no error.").
			SetNext("The attacher calls ControllerUnpublishVolume and removes its finalizer. %s", ifItLasts)
	}
	handle, nodeID := attacher.Recorded(va)
	if e.volume.Missing {
		explainRecord(e, KindVolume, volumeOf(va), "volume handle", handle)
	}
	if isKnown := e.csiNode.Missing || e.csiNode.Found; isKnown && kube.DriverOnNode(e.csiNode.Value, e.driver) == nil {
		explainRecord(e, "CSINode", va.Spec.NodeName, "node ID", nodeID)
	}
}

// explainRecord reports on an object that lacks what a detach needs, and on the record of the attachment.
func explainRecord(e *explanation, kind, name, what, recorded string) {
	if recorded != "" {
		e.ok("attachment", "%s %q does not have the %s any more; the attachment has recorded %q.", kind, name, what, recorded)
		return
	}
	e.blocked("attachment", "%s %q does not have the %s any more, and the attachment has not recorded it.", kind, name, what).
		SetNext("Restore %s %q; or verify at the storage system that the volume is not attached to node %q, then remove finalizer %s.",
			kind, name, e.attachment.Value.Spec.NodeName, attacher.Finalizer(e.driver))
}

// ifItLasts is the next step if a component neither finishes nor records an error.
const ifItLasts = "If this lasts, it may be unable to write the status: `storage-controller doctor` checks its permissions."

// explainAttaching reports how far the attacher is.
func explainAttaching(e *explanation) {
	va := e.attachment.Value
	switch err := lastFailure(va); {
	case va.Status.Attached:
		e.ok("attachment", "The volume is attached.")
	case err != nil:
		explainLastAttempt(e, err)
	case !e.attaches():
		e.waiting("attachment", "Driver %s does not attach volumes (attachRequired=false in its CSIDriver).", e.driver).
			SetNext("kube-controller-manager deletes the attachment, which driver %s does not need.", e.driver)
	case slices.Contains(va.Finalizers, attacher.Finalizer(e.driver)):
		e.waiting("attachment", "The attacher has begun to attach the volume, and recorded no error.").
			SetNext("The attacher calls ControllerPublishVolume. %s", ifItLasts)
	default:
		e.waiting("attachment", "The attacher has not begun to attach the volume: its finalizer and an error are missing.").
			SetNext("The attacher of driver %s adds its finalizer and calls ControllerPublishVolume. %s", e.driver, ifItLasts)
	}
}

// explainAttachedVolume reports on the volume of an attachment, and on its other attachments.
func explainAttachedVolume(e *explanation) {
	va, pv := e.attachment.Value, e.volume.Value
	name, deleting := volumeOf(va), va.DeletionTimestamp != nil
	switch {
	case e.volume.Missing && deleting: // see explainDetaching
	case e.volume.Missing:
		e.blocked("volume", "PersistentVolume %q not found.", name).SetNext(
			"Delete the pod; kube-controller-manager then deletes the VolumeAttachment. If no pod uses it, delete it manually.")
	case !e.volume.Found:
	case pv.DeletionTimestamp != nil && !deleting && !va.Status.Attached:
		e.blocked("volume",
			"PersistentVolume %q has been Terminating for %s, so that it is not attached.", name, e.age(pv.DeletionTimestamp.Time)).
			SetNext("Delete the pod that uses the volume.")
		explainOtherAttachments(e)
	case migration.DriverOfVolume(pv) != e.driver && !deleting:
		e.blocked("volume",
			"PersistentVolume %q belongs to driver %q, the attachment to driver %q.", name, migration.DriverOfVolume(pv), e.driver).
			SetNext("Delete the VolumeAttachment.")
		explainOtherAttachments(e)
	case migration.DriverOfVolume(pv) != e.driver && slices.Contains(va.Finalizers, attacher.Finalizer(e.driver)):
		e.failing("volume", "PersistentVolume %q belongs to driver %q, the Terminating attachment to driver %q.",
			name, migration.DriverOfVolume(pv), e.driver).
			SetNext("The attacher of driver %s detaches with the data recorded on the attachment. "+
				"If none is recorded, verify that the volume is not attached to node %q and remove finalizer %s.",
				e.driver, va.Spec.NodeName, attacher.Finalizer(e.driver))
	default:
		explainOtherAttachments(e)
	}
}

// explainOtherAttachments reports attachments to other nodes of a volume that supports one node at a time.
func explainOtherAttachments(e *explanation) {
	va := e.attachment.Value
	multiNode := slices.ContainsFunc(e.volume.Value.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
	})
	if va.DeletionTimestamp != nil || va.Status.Attached || multiNode {
		return
	}
	for _, other := range e.attachments.Value {
		if other.Spec.NodeName != va.Spec.NodeName {
			e.failing("attachment",
				"The access modes of the volume allow one node at a time, and VolumeAttachment %s is for node %q.", other.Name,
				other.Spec.NodeName).
				SetNext("The volume is detached from node %q after the pod there is deleted. Run `storage-controller explain va %s`.",
					other.Spec.NodeName, other.Name)
		}
	}
}

// explainAttachedNode reports on the node of an attachment, and on the driver there.
func explainAttachedNode(e *explanation) {
	va := e.attachment.Value
	switch {
	case e.node.Missing && va.DeletionTimestamp != nil: // see explainDetaching
	case e.node.Missing:
		e.failing("node", "Node %q not found.", va.Spec.NodeName).
			SetNext("kube-controller-manager deletes the attachment after the pods of the node; the attacher then detaches the volume.")
	case e.node.Found && e.driver != "" && va.DeletionTimestamp == nil && !va.Status.Attached:
		explainRegistration(e, e.driver)
	}
}
