// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// resizing reports whether a bound claim waits for an expansion or a modification.
func resizing(claim *corev1.PersistentVolumeClaim) bool {
	return sizesOf(claim).pending() || modificationOf(claim).pending()
}

// sizes are the sizes of a claim, and the stage of its expansion.
type sizes struct {
	requested, capacity, allocated resource.Quantity
	stage                          corev1.ClaimResourceStatus
}

func sizesOf(claim *corev1.PersistentVolumeClaim) sizes {
	s := sizes{
		requested: claim.Spec.Resources.Requests[corev1.ResourceStorage],
		capacity:  claim.Status.Capacity[corev1.ResourceStorage],
		allocated: claim.Status.AllocatedResources[corev1.ResourceStorage],
		stage:     claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage],
	}
	if !s.capacity.IsZero() && s.requested.Cmp(s.capacity) <= 0 && s.allocated.Cmp(s.capacity) <= 0 {
		s.stage = "" // some kubelets keep it after the expansion
	}
	return s
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
	claim, s := e.claim.Value, sizesOf(e.claim.Value)
	target := s.requested
	if !s.allocated.IsZero() {
		target = s.allocated
	}
	atDriver := fmt.Sprintf("Expanding the volume from %s to %s", s.capacity.String(), target.String())
	onNode := fmt.Sprintf("Expanding the volume to %s on the node", target.String())
	const driverError, nodeError = corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError
	fileSystemPending := conditionOf(claim, corev1.PersistentVolumeClaimFileSystemResizePending)
	var failed *finding.Finding
	switch {
	case !s.pending():
		return
	case e.driver == "":
		e.waiting("size", "The claim requests %s, the volume has %s.", s.requested.String(), s.capacity.String()).
			SetNext("kube-controller-manager or the kubelet expands the volume, if its plugin supports that.")
	case s.stage == corev1.PersistentVolumeClaimControllerResizeInfeasible:
		failed = explainCondition(e, driverError, roleResizer, atDriver, true)
	case s.stage == corev1.PersistentVolumeClaimNodeResizeInfeasible:
		failed = explainCondition(e, nodeError, componentKubelet, onNode, true)
	case s.stage == corev1.PersistentVolumeClaimNodeResizeInProgress && conditionOf(claim, nodeError) != nil:
		failed = explainCondition(e, nodeError, componentKubelet, onNode, false)
	case s.stage == corev1.PersistentVolumeClaimNodeResizeInProgress:
		e.waiting("size", "%s is in progress.", onNode).SetNext("The kubelet calls NodeExpandVolume and sets the capacity of the claim.")
	case s.stage == corev1.PersistentVolumeClaimNodeResizePending || s.stage == "" && fileSystemPending != nil:
		e.waiting("size", "The volume has %s at the driver, and %s on the node.", target.String(), s.capacity.String()).
			SetNext("The kubelet expands the volume on the node while a pod with the claim runs.")
	case conditionOf(claim, driverError) != nil:
		failed = explainCondition(e, driverError, roleResizer, atDriver, false)
	case s.stage == corev1.PersistentVolumeClaimControllerResizeInProgress:
		e.waiting("size", "%s is in progress.", atDriver).
			SetNext("The resizer repeats ControllerExpandVolume with this size until driver %s returns a final response.", e.driver)
		explainLastError(e, roleResizer, "VolumeResizeFailed", "VolumeResizeSuccessful")
	default:
		e.waiting("size", "The claim requests %s, the volume has %s.", s.requested.String(), s.capacity.String()).
			SetNext("The resizer of driver %s calls ControllerExpandVolume, if the driver reports EXPAND_VOLUME.", e.driver)
		explainLastError(e, roleResizer, "VolumeResizeFailed", "VolumeResizeSuccessful")
	}
	if failed != nil {
		failed.Next += " Or lower spec.resources.requests.storage of the claim, to more than " + s.capacity.String() + "."
	}
}

// explainCondition adds the error that a condition of the claim reports.
func explainCondition(e *explanation, kind corev1.PersistentVolumeClaimConditionType, by, what string, infeasible bool) *finding.Finding {
	topic, failed, isModification := "size", " failed", kind == corev1.PersistentVolumeClaimVolumeModifyVolumeError
	if isModification {
		topic = "attributes"
	}
	if infeasible {
		failed = " is infeasible"
	}
	c := conditionOf(e.claim.Value, kind)
	if c == nil {
		added := e.failing(topic, "%s%s, and condition %s is not set.", what, failed, kind)
		added.SetNext("Retries automatically. The events and the log of the %s have the error.", by)
		return added
	}
	f := failure{text: c.Message, at: c.LastTransitionTime.Time, condition: string(kind), by: by}
	if isModification {
		f.code = c.Reason
	}
	return e.failed(topic, f, "%s%s", what, failed)
}

// modification is the VolumeAttributesClass that a claim requests, that of its volume, and the one in its status.
type modification struct {
	requested, current, target string
	status                     corev1.PersistentVolumeClaimModifyVolumeStatus
}

func modificationOf(claim *corev1.PersistentVolumeClaim) modification {
	m := modification{requested: ptr.Deref(claim.Spec.VolumeAttributesClassName, ""),
		current: ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "")}
	if status := claim.Status.ModifyVolumeStatus; status != nil {
		m.target, m.status = status.TargetVolumeAttributesClassName, status.Status
	}
	return m
}

func (m modification) pending() bool {
	return m.status != "" || m.requested != m.current && m.requested != ""
}

// explainModification reports how far the change of the VolumeAttributesClass of a bound claim is.
func explainModification(e *explanation) {
	const modifyError = corev1.PersistentVolumeClaimVolumeModifyVolumeError
	const inProgress, infeasible = corev1.PersistentVolumeClaimModifyVolumeInProgress, corev1.PersistentVolumeClaimModifyVolumeInfeasible
	m := modificationOf(e.claim.Value)
	toAccepted := "Or set spec.volumeAttributesClassName of the claim to a class that the driver accepts"
	if m.current != "" {
		toAccepted += ", such as the current one, " + m.current
	}
	applying := fmt.Sprintf("Applying VolumeAttributesClass %q", m.target)
	switch {
	case !m.pending():
	case m.requested == "" && m.status != inProgress:
		e.waiting("attributes", "The claim requests no VolumeAttributesClass; its status still names %q (%s).", m.target, m.status).
			SetNext("Nothing is requested of the driver. To clear the status, which may keep VolumeAttributesClass %q from being deleted, "+
				"set spec.volumeAttributesClassName of the claim to a class that the driver accepts.", m.target)
	case e.attributes.Unserved:
		e.blocked("attributes", "The cluster does not serve VolumeAttributesClasses in storage.k8s.io/v1.").
			SetNext("Upgrade Kubernetes, or reset spec.volumeAttributesClassName of the claim.")
	case e.attributes.Missing:
		e.blocked("attributes", "VolumeAttributesClass %q not found.", m.requested).
			SetNext("Create VolumeAttributesClass %q, or set spec.volumeAttributesClassName of the claim to an existing class.",
				m.requested)
	case e.attributes.Found && e.attributes.Value.DriverName != e.driver:
		e.blocked("attributes", "VolumeAttributesClass %q belongs to driver %q, the volume to %q.", m.requested,
			e.attributes.Value.DriverName, e.driver).SetNext("%s.", strings.Replace(toAccepted, "Or set", "Set", 1))
	case m.status == infeasible && m.target == m.requested:
		failed := explainCondition(e, modifyError, roleResizer, applying, true)
		failed.Next += " " + toAccepted + "."
	case m.status == inProgress && conditionOf(e.claim.Value, modifyError) != nil:
		explainCondition(e, modifyError, roleResizer, applying, false)
	case m.status == inProgress:
		e.waiting("attributes", "%s is in progress.", applying).
			SetNext("The resizer repeats ControllerModifyVolume until driver %s returns a final response.", e.driver)
	default:
		e.waiting("attributes", "The claim requests VolumeAttributesClass %q, the volume has %q.", m.requested, m.current).
			SetNext("The resizer of driver %s calls ControllerModifyVolume, if the driver reports MODIFY_VOLUME.", e.driver)
		explainLastError(e, roleResizer, "VolumeModifyFailed", "VolumeModifySuccessful")
	}
}
