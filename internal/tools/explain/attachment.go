// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/migration"
)

func explainAttachment(f *facts) Report {
	va := f.attachment.value
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
		volume = objectName(KindVolume, "", name)
	}
	if va.Status.Attached {
		state = "attached"
		rest = "Nothing to do: pods on the node can use the volume. kube-controller-manager deletes the attachment when none does."
	}
	return e.report(KindAttachment, va, fmt.Sprintf("%s is %s to node %q", volume, state, va.Spec.NodeName), rest, f.driver)
}

// lastFailure returns the error of the last attempt to attach or detach; nil if it did not fail.
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

// explainDetaching reports the last attempt of the attacher for a deleted attachment.
func explainDetaching(e *explanation) {
	va := e.attachment.value
	failure := va.Status.DetachError
	switch {
	case !slices.Contains(va.Finalizers, attacher.Finalizer(e.driver)):
		e.add(Waiting, "attachment", "The volume is detached, and the attacher has removed its finalizer.").next(finalizersRemoved)
	case failure != nil:
		e.add(Failing, "attachment",
			"ControllerUnpublishVolume failed %s ago: %s", e.age(failure.Time.Time), sentence(failure.Message)).next(retries)
	default:
		e.add(Waiting, "attachment", "The attachment is being deleted, and the volume is not detached yet.").
			next("The attacher calls ControllerUnpublishVolume and removes its finalizer.")
	}
}

// explainAttaching reports the last attempt of the attacher.
func explainAttaching(e *explanation) {
	status := e.attachment.value.Status
	switch {
	case status.Attached:
		e.add(Fine, "attachment", "The volume is attached.")
	case status.AttachError != nil:
		e.add(Failing, "attachment",
			"ControllerPublishVolume failed %s ago: %s", e.age(status.AttachError.Time.Time), sentence(status.AttachError.Message)).
			next(retries)
	case !e.attaches():
		e.add(Waiting, "attachment", "Driver %s does not attach volumes (attachRequired=false in its CSIDriver).", e.driver).
			next("kube-controller-manager deletes the attachment, which driver %s does not need.", e.driver)
	default:
		e.add(Waiting, "attachment",
			"The volume is not attached yet; no attempt has failed.").next("The attacher calls ControllerPublishVolume.")
	}
}

// explainAttachedVolume reports on the volume of an attachment, and on its other attachments.
func explainAttachedVolume(e *explanation) {
	va, pv := e.attachment.value, e.volume.value
	name, deleting := volumeOf(va), va.DeletionTimestamp != nil
	switch {
	case e.volume.missing && deleting:
		e.add(Unknown, "volume", "PersistentVolume %q not found; the attacher detaches with the data recorded on the attachment.", name)
	case e.volume.missing:
		e.add(Blocked, "volume", "PersistentVolume %q not found.", name).
			next(
				"Delete the pod; kube-controller-manager then deletes the VolumeAttachment. If no pod uses it, delete it manually.")
	case !e.volume.found:
	case pv.DeletionTimestamp != nil && !deleting && !va.Status.Attached:
		e.add(Blocked, "volume",
			"PersistentVolume %q has been Terminating for %s and is not attached any more.", name, e.age(pv.DeletionTimestamp.Time)).
			next("Delete the pod that uses the volume.")
		explainOtherAttachments(e)
	case migration.DriverOfVolume(pv) != e.driver && !deleting:
		e.add(Blocked, "volume",
			"PersistentVolume %q belongs to driver %q, the attachment to driver %q.", name, migration.DriverOfVolume(pv), e.driver).
			next("Delete the VolumeAttachment.")
		explainOtherAttachments(e)
	case migration.DriverOfVolume(pv) != e.driver && slices.Contains(va.Finalizers, attacher.Finalizer(e.driver)):
		e.add(Failing, "volume",
			"PersistentVolume %q belongs to driver %q, the Terminating attachment to driver %q.",
			name, migration.DriverOfVolume(pv), e.driver).
			next("The attacher of driver %s detaches with the data recorded on the attachment. "+
				"If none is recorded, verify that the volume is not attached to node %q and remove finalizer %s.",
				e.driver, va.Spec.NodeName, attacher.Finalizer(e.driver))
	default:
		explainOtherAttachments(e)
	}
}

// explainOtherAttachments reports attachments to other nodes of a volume that supports one node at a time.
func explainOtherAttachments(e *explanation) {
	va := e.attachment.value
	multiNode := slices.ContainsFunc(e.volume.value.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
	})
	if va.DeletionTimestamp != nil || va.Status.Attached || multiNode {
		return
	}
	for _, other := range e.attachments.value {
		if other.Spec.NodeName != va.Spec.NodeName {
			e.add(Failing, "attachment",
				"The volume supports one node at a time, and VolumeAttachment %s attaches it to node %q.", other.Name, other.Spec.NodeName).
				next("The volume is detached from node %q after the pod there is deleted. Run `storage-controller explain va %s`.",
					other.Spec.NodeName, other.Name)
		}
	}
}

// explainAttachedNode reports on the node of an attachment, and on the driver there.
func explainAttachedNode(e *explanation) {
	va := e.attachment.value
	switch {
	case e.node.missing && va.DeletionTimestamp != nil:
		e.add(Fine, "node", "Node %q not found; the attacher detaches with the node ID recorded on the attachment.", va.Spec.NodeName)
	case e.node.missing:
		e.add(Failing, "node", "Node %q not found.", va.Spec.NodeName).
			next(
				"kube-controller-manager deletes the attachment within 6 minutes; the attacher then detaches the volume.")
	case e.node.found && e.driver != "" && va.DeletionTimestamp == nil && !va.Status.Attached:
		explainRegistration(e, e.driver)
	}
}
