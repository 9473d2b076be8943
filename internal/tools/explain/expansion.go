// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// resizing reports whether a bound claim waits for an expansion or a modification.
func resizing(claim *corev1.PersistentVolumeClaim) bool {
	s := claim.Status
	return sizesOf(claim).pending() || s.ModifyVolumeStatus != nil ||
		ptr.Deref(claim.Spec.VolumeAttributesClassName, "") != ptr.Deref(s.CurrentVolumeAttributesClassName, "")
}

// sizes are the sizes of a claim, and the stage of its expansion.
type sizes struct {
	requested, capacity, allocated resource.Quantity
	stage                          corev1.ClaimResourceStatus
}

func sizesOf(claim *corev1.PersistentVolumeClaim) sizes {
	return sizes{
		requested: claim.Spec.Resources.Requests[corev1.ResourceStorage],
		capacity:  claim.Status.Capacity[corev1.ResourceStorage],
		allocated: claim.Status.AllocatedResources[corev1.ResourceStorage],
		stage:     claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage],
	}
}

// pending reports whether the volume is smaller than requested, or its expansion has not ended. The capacity is
// missing until the claim is bound completely.
func (s sizes) pending() bool {
	return !s.capacity.IsZero() && s.requested.Cmp(s.capacity) > 0 || s.stage != ""
}

// conditionOf returns the condition of a claim if it is True, else nil.
func conditionOf(claim *corev1.PersistentVolumeClaim,
	kind corev1.PersistentVolumeClaimConditionType) *corev1.PersistentVolumeClaimCondition {
	for i, c := range claim.Status.Conditions {
		if c.Type == kind && c.Status == corev1.ConditionTrue {
			return &claim.Status.Conditions[i]
		}
	}
	return nil
}

// explainExpansion reports how far the expansion of the volume of a bound claim is.
func explainExpansion(e *explanation) {
	claim, s := e.claim.value, sizesOf(e.claim.value)
	target := s.requested
	if !s.allocated.IsZero() {
		target = s.allocated
	}
	smaller := " Or lower spec.resources.requests.storage of the claim, to more than " + s.capacity.String() + "."
	switch pending := conditionOf(claim, corev1.PersistentVolumeClaimFileSystemResizePending); {
	case !s.pending():
		return
	case s.stage == corev1.PersistentVolumeClaimControllerResizeInfeasible:
		explainRefused(e, corev1.PersistentVolumeClaimControllerResizeError, "Driver %s cannot expand the volume to %s", e.driver,
			target.String()).
			next("Free or add storage at the driver; the resizer tries again every few minutes.%s", smaller)
	case s.stage == corev1.PersistentVolumeClaimNodeResizeInfeasible:
		explainRefused(e, corev1.PersistentVolumeClaimNodeResizeError, "The node cannot expand the volume to %s", target.String()).
			next("Fix the error shown above; the resizer tries again every few minutes.%s", smaller)
	case s.stage == corev1.PersistentVolumeClaimNodeResizeInProgress:
		if conditionOf(claim, corev1.PersistentVolumeClaimNodeResizeError) != nil {
			explainRefused(e, corev1.PersistentVolumeClaimNodeResizeError, "Expanding the volume to %s on the node failed",
				target.String()).
				next("%s%s", retries, smaller)
			return
		}
		e.add(Waiting, "size", "The kubelet expands the volume to %s on the node.", target.String()).
			next("The kubelet calls NodeExpandVolume and sets the capacity of the claim.")
	case s.stage == corev1.PersistentVolumeClaimNodeResizePending || s.stage == "" && pending != nil:
		e.add(Waiting, "size", "The volume has %s at the driver; the file system of the claim has %s.", target.String(),
			s.capacity.String()).
			next("The kubelet expands the file system while a pod with the claim runs.")
	case conditionOf(claim, corev1.PersistentVolumeClaimControllerResizeError) != nil:
		explainRefused(e, corev1.PersistentVolumeClaimControllerResizeError, "Expanding the volume from %s to %s failed",
			s.capacity.String(), target.String()).next("%s%s", retries, smaller)
	case s.stage == corev1.PersistentVolumeClaimControllerResizeInProgress:
		e.add(Waiting, "size", "The resizer expands the volume from %s to %s.", s.capacity.String(), target.String()).
			next("The resizer repeats ControllerExpandVolume with this size until driver %s returns a final response.", e.driver)
		explainLastError(e, "VolumeResizeFailed", "VolumeResizeSuccessful")
	default:
		e.add(Waiting, "size", "The claim requests %s, the volume has %s.", s.requested.String(), s.capacity.String()).
			next("The resizer of driver %s calls ControllerExpandVolume.", e.driver)
		explainLastError(e, "VolumeResizeFailed", "VolumeResizeSuccessful")
	}
}

// explainRefused adds a failure with the message of the condition of a claim.
func explainRefused(e *explanation, kind corev1.PersistentVolumeClaimConditionType, format string, args ...any) *Finding {
	topic := "size"
	if kind == corev1.PersistentVolumeClaimVolumeModifyVolumeError {
		topic = "attributes"
	}
	c := conditionOf(e.claim.value, kind)
	if c == nil {
		return e.add(Failing, topic, format+".", args...)
	}
	return e.add(Failing, topic, format+" %s ago: %s", append(args, e.age(c.LastTransitionTime.Time), sentence(c.Message))...)
}

// explainModification reports how far the change of the VolumeAttributesClass of a bound claim is.
func explainModification(e *explanation) {
	const modifyError = corev1.PersistentVolumeClaimVolumeModifyVolumeError
	claim := e.claim.value
	wanted := ptr.Deref(claim.Spec.VolumeAttributesClassName, "")
	current := ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "")
	status := claim.Status.ModifyVolumeStatus
	back := "Set spec.volumeAttributesClassName of the claim to a class that the driver accepts"
	if current != "" {
		back += ", such as the current one, " + current
	}
	switch {
	case status == nil && wanted == current:
	case e.attributes.missing:
		e.add(Blocked, "attributes", "VolumeAttributesClass %q not found.", wanted).
			next("Create VolumeAttributesClass %q, or set spec.volumeAttributesClassName of the claim to an existing class.", wanted)
	case e.attributes.found && e.attributes.value.DriverName != e.driver:
		e.add(Blocked, "attributes", "VolumeAttributesClass %q belongs to driver %q, the volume to %q.", wanted,
			e.attributes.value.DriverName, e.driver).next("%s.", back)
	case status != nil && status.Status == corev1.PersistentVolumeClaimModifyVolumeInfeasible:
		explainRefused(e, modifyError, "Driver %s cannot apply VolumeAttributesClass %q", e.driver, status.TargetVolumeAttributesClassName).
			next("%s. The resizer tries again every few minutes.", back)
	case conditionOf(claim, modifyError) != nil:
		explainRefused(e, modifyError, "Applying VolumeAttributesClass %q failed", wanted).next(retries)
	case status != nil && status.Status == corev1.PersistentVolumeClaimModifyVolumeInProgress:
		e.add(Waiting, "attributes", "The resizer applies VolumeAttributesClass %q.", status.TargetVolumeAttributesClassName).
			next("The resizer repeats ControllerModifyVolume until driver %s returns a final response.", e.driver)
	default:
		e.add(Waiting, "attributes", "The claim requests VolumeAttributesClass %q, the volume has %q.", wanted, current).
			next("The resizer of driver %s calls ControllerModifyVolume, if the driver reports MODIFY_VOLUME.", e.driver)
	}
}
