// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
)

// Reasons of events. All but reasonUnlikelyCapacity are those of csi-resizer, as are the messages.
const (
	// Normal, PVC: the expansion to a new size begins
	reasonResizing = "Resizing"
	// Warning, PVC: an attempt to expand the volume failed, the volume is in use, or the API server refused a write
	reasonResizeFailed = "VolumeResizeFailed"
	// Normal, PVC: the driver has expanded the volume; the node has to complete the expansion
	reasonNodeResizeRequired = "FileSystemResizeRequired"
	// Normal, PVC: the volume is expanded; the node has nothing to do
	reasonResizeSuccessful = "VolumeResizeSuccessful"
	// Warning, PVC: the driver has returned a capacity_bytes that is more than twice the request plus 4 TiB; the claim gets this size
	reasonUnlikelyCapacity = "UnlikelyCapacity"
	// Normal, PVC: the modification to a VolumeAttributesClass begins
	reasonModify = "VolumeModify"
	// Warning, PVC: an attempt to modify the volume failed, or its VolumeAttributesClass does not exist
	reasonModifyFailed = "VolumeModifyFailed"
	// Normal, PVC: the volume is modified
	reasonModifySuccessful = "VolumeModifySuccessful"
	// Normal, PVC: the PVC no longer requests the infeasible modification
	reasonModifyCanceled = "VolumeModifyCanceled"
)

type event struct {
	kind, reason, message string
}

// Events without arguments.
var (
	nodeRequired     = event{corev1.EventTypeNormal, reasonNodeResizeRequired, "Require file system resize of volume on node"}
	resizeSuccessful = event{corev1.EventTypeNormal, reasonResizeSuccessful, "Resize volume succeeded"}
	modifyCanceled   = event{corev1.EventTypeNormal, reasonModifyCanceled, "Cancelled modify."}
)

func resizingEvent(volume string) event {
	return event{corev1.EventTypeNormal, reasonResizing, "External resizer is resizing volume " + volume}
}

func resizeFailedEvent(message string) event {
	return event{corev1.EventTypeWarning, reasonResizeFailed, message}
}

func inUseEvent(claim *corev1.PersistentVolumeClaim, driver string) event {
	return resizeFailedEvent(fmt.Sprintf("Unable to expand %s/%s because CSI driver %s only supports offline expansion "+
		"and volume is currently in-use", claim.Namespace, claim.Name, driver))
}

func modifyEvent(claim, class string) event {
	return event{corev1.EventTypeNormal, reasonModify, fmt.Sprintf("external resizer is modifying volume %s with vac %s", claim, class)}
}

func modifySuccessEvent(claim, class string) event {
	return event{corev1.EventTypeNormal, reasonModifySuccessful,
		fmt.Sprintf("external resizer modified volume %s with vac %s successfully", claim, class)}
}

func modifyFailedEvent(message string) event {
	return event{corev1.EventTypeWarning, reasonModifyFailed, message}
}

// failedEvent returns the event for a failed attempt of o on the volume called name.
func (d driver) failedEvent(o operation, t target, name string, kind outcome, err error) event {
	switch {
	case o == expand:
		return resizeFailedEvent(fmt.Sprintf("resize volume %q by resizer %q failed: %v", name, d.name, err))
	case kind == indeterminate:
		return modifyFailedEvent(fmt.Sprintf("%v. Still modifying to VAC %s", err, t.key))
	}
	return modifyFailedEvent(err.Error())
}

// refusedEvent returns the event for a write that the API server refused.
func refusedEvent(o operation, s claimState, step step, err error) event {
	message, claim := "", fmt.Sprintf("\"%s/%s\"", s.key.Namespace, s.key.Name)
	switch {
	case o == modify:
		return modifyFailedEvent(err.Error())
	case step.volume != nil:
		message = fmt.Sprintf("error updating pv %q by resizer: %v", s.volume.Name, err)
	case step.action == doSaveClaim && s.call.State == intent.Answered && s.call.Payload.answer.nodeExpansion:
		message = fmt.Sprintf("mark PVC %s as node expansion required failed: %v", claim, err)
	case step.action == doSaveClaim:
		message = fmt.Sprintf("mark PVC %s as resize finished failed: %v", claim, err)
	default:
		message = fmt.Sprintf("mark PVC %s as resizing failed: %v", claim, err)
	}
	return resizeFailedEvent(message)
}

// errConflicts is returned if other clients change a claim again and again during a sync.
var errConflicts = errors.New("the object was changed by other clients during every attempt to write it")
