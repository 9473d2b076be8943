// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Annotations of claims and PersistentVolumes.
const (
	annStorageResizer = kube.AnnStorageResizer
	// annNodeExpansionNotRequired tells the kubelet that a claim needs no expansion on the node.
	annNodeExpansionNotRequired = "volume.kubernetes.io/node-expansion-not-required"
	// annPreResize has the size of a PersistentVolume before an expansion that the node has to complete.
	annPreResize = "volume.alpha.kubernetes.io/pre-resize-capacity"
)

// messageNodeExpansion is the message of the condition FileSystemResizePending.
const messageNodeExpansion = "Waiting for user to (re-)start a pod to finish file system resize of volume on node."

// expansionConditions are the conditions of an expansion.
var expansionConditions = []corev1.PersistentVolumeClaimConditionType{
	corev1.PersistentVolumeClaimResizing, corev1.PersistentVolumeClaimFileSystemResizePending,
	corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError,
}

// patchOf returns a strategic merge patch that changes before to after if before is the current version of the object, or nil if they are
// equal. It names every annotation that it removes: the cache does not have all of them.
func patchOf(before, after metav1.Object) ([]byte, error) {
	old, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	changed, err := json.Marshal(after)
	if err != nil {
		return nil, err
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(old, changed, before)
	if err != nil || string(patch) == "{}" {
		return nil, err
	}
	var fields map[string]any
	if err := json.Unmarshal(patch, &fields); err != nil {
		return nil, err
	}
	metadata := map[string]any{"uid": before.GetUID(), "resourceVersion": before.GetResourceVersion()}
	if annotations := changedAnnotations(before.GetAnnotations(), after.GetAnnotations()); len(annotations) > 0 {
		metadata["annotations"] = annotations
	}
	fields["metadata"] = metadata
	return json.Marshal(fields)
}

// changedAnnotations returns the annotations that differ; nil removes one.
func changedAnnotations(before, after map[string]string) map[string]any {
	changes := map[string]any{}
	for k := range before {
		if _, kept := after[k]; !kept {
			changes[k] = nil
		}
	}
	for k, v := range after {
		if old, had := before[k]; !had || old != v {
			changes[k] = v
		}
	}
	return changes
}

func condition(c *corev1.PersistentVolumeClaim, of corev1.PersistentVolumeClaimConditionType) *corev1.PersistentVolumeClaimCondition {
	i := slices.IndexFunc(c.Status.Conditions, func(o corev1.PersistentVolumeClaimCondition) bool { return o.Type == of })
	if i < 0 {
		return nil
	}
	return &c.Status.Conditions[i]
}

func isTrue(c *corev1.PersistentVolumeClaim, of corev1.PersistentVolumeClaimConditionType) bool {
	found := condition(c, of)
	return found != nil && found.Status == corev1.ConditionTrue
}

// setCondition sets a condition to true. Its transition time changes only with its status or reason.
func setCondition(
	c *corev1.PersistentVolumeClaim, of corev1.PersistentVolumeClaimConditionType, reason, message string, now time.Time,
) {
	wanted := corev1.PersistentVolumeClaimCondition{
		Type: of, Status: corev1.ConditionTrue, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now),
	}
	found := condition(c, of)
	if found == nil {
		c.Status.Conditions = append(c.Status.Conditions, wanted)
		return
	}
	if found.Status == wanted.Status && found.Reason == reason {
		wanted.LastTransitionTime = found.LastTransitionTime
	}
	*found = wanted
}

func removeConditions(c *corev1.PersistentVolumeClaim, types ...corev1.PersistentVolumeClaimConditionType) {
	c.Status.Conditions = slices.DeleteFunc(c.Status.Conditions, func(o corev1.PersistentVolumeClaimCondition) bool {
		return slices.Contains(types, o.Type)
	})
}

func setResizeStatus(c *corev1.PersistentVolumeClaim, s corev1.ClaimResourceStatus) {
	if c.Status.AllocatedResourceStatuses == nil {
		c.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{}
	}
	c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] = s
}

// startExpansion records the expansion to size. A new size removes the conditions of the previous one.
func startExpansion(c *corev1.PersistentVolumeClaim, size resource.Quantity, s corev1.ClaimResourceStatus, now time.Time) {
	if allocated, ok := allocatedSize(c); !ok || allocated.Cmp(size) != 0 {
		if c.Status.AllocatedResources == nil {
			c.Status.AllocatedResources = corev1.ResourceList{}
		}
		c.Status.AllocatedResources[corev1.ResourceStorage] = size
		removeConditions(c, expansionConditions[1:]...)
	}
	setResizeStatus(c, s)
	if !isTrue(c, corev1.PersistentVolumeClaimResizing) {
		setCondition(c, corev1.PersistentVolumeClaimResizing, "", "", now)
	}
	delete(c.Annotations, annNodeExpansionNotRequired)
	if s == nodePending {
		awaitNodeExpansion(c, now)
	}
}

// renew changes the record of a call without another meaning: a late write that tests the resourceVersion of the old one fails.
func renew(c *corev1.PersistentVolumeClaim, of corev1.PersistentVolumeClaimConditionType, now time.Time) {
	record := condition(c, of)
	renewed := now.Truncate(time.Second) // the API server stores seconds
	if next := record.LastProbeTime.Add(time.Second); renewed.Before(next) {
		renewed = next
	}
	record.LastProbeTime = metav1.NewTime(renewed)
}

// awaitNodeExpansion records that the node has to complete the expansion.
func awaitNodeExpansion(c *corev1.PersistentVolumeClaim, now time.Time) {
	setResizeStatus(c, nodePending)
	removeConditions(c, corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError)
	setCondition(c, corev1.PersistentVolumeClaimFileSystemResizePending, "", messageNodeExpansion, now)
	delete(c.Annotations, annNodeExpansionNotRequired)
}

// finishExpansion records a successful ControllerExpandVolume. status.allocatedResources stays the size
// that was requested: a larger one could exceed the quota.
func finishExpansion(c *corev1.PersistentVolumeClaim, a answer, now time.Time) {
	if a.nodeExpansion {
		awaitNodeExpansion(c, now)
		return
	}
	if c.Status.Capacity == nil {
		c.Status.Capacity = corev1.ResourceList{}
	}
	c.Status.Capacity[corev1.ResourceStorage] = a.size
	delete(c.Status.AllocatedResourceStatuses, corev1.ResourceStorage)
	if len(c.Status.AllocatedResourceStatuses) == 0 {
		c.Status.AllocatedResourceStatuses = nil
	}
	removeConditions(c, expansionConditions...)
	metav1.SetMetaDataAnnotation(&c.ObjectMeta, annNodeExpansionNotRequired, "true")
}

// failExpansion records a final error of ControllerExpandVolume.
func failExpansion(c *corev1.PersistentVolumeClaim, a answer, now time.Time) {
	if a.kind == infeasible {
		setResizeStatus(c, controllerInfeasible)
	}
	setCondition(c, corev1.PersistentVolumeClaimControllerResizeError, "", failureOf(a).text, now)
}

// failureOf identifies the error of a. Its text is that of the condition ControllerResizeError; a modification has its own.
func failureOf(a answer) failure {
	f := failure{target: a.target, code: status.Code(a.err).String(), at: a.at}
	f.text = kube.Message(fmt.Sprintf("failed to expand pvc with %v", a.err))
	return f
}

// pendModification records that the requested class does not exist.
func pendModification(c *corev1.PersistentVolumeClaim) {
	recorded, _ := modify.status(c)
	c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{
		TargetVolumeAttributesClassName: recorded.key, Status: corev1.PersistentVolumeClaimModifyVolumePending,
	}
}

// rejectModification records that the requested class is of another driver. Kubernetes' specifications for CSI drivers
// expect the status of a class that the driver refuses.
func rejectModification(c *corev1.PersistentVolumeClaim, class string, reason error, now time.Time) {
	failModification(c, answer{target: class, kind: infeasible, err: status.Error(codes.InvalidArgument, reason.Error())}, now)
}

// cancelModification records that no modification is requested any more.
func cancelModification(c *corev1.PersistentVolumeClaim) {
	removeConditions(c, corev1.PersistentVolumeClaimVolumeModifyingVolume)
}

// startModification records the modification to class.
func startModification(c *corev1.PersistentVolumeClaim, class string, now time.Time) {
	c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{
		TargetVolumeAttributesClassName: class, Status: corev1.PersistentVolumeClaimModifyVolumeInProgress,
	}
	setCondition(c, corev1.PersistentVolumeClaimVolumeModifyingVolume, "", fmt.Sprintf("Modifying volume to %q is in progress.", class),
		now)
}

// finishModification records a successful ControllerModifyVolume.
func finishModification(c *corev1.PersistentVolumeClaim, class string) {
	c.Status.CurrentVolumeAttributesClassName, c.Status.ModifyVolumeStatus = &class, nil
	removeConditions(c, corev1.PersistentVolumeClaimVolumeModifyingVolume, corev1.PersistentVolumeClaimVolumeModifyVolumeError)
}

// failModification records an error of ControllerModifyVolume.
func failModification(c *corev1.PersistentVolumeClaim, a answer, now time.Time) {
	outcome := "failed. Waiting for retry."
	switch a.kind {
	case indeterminate:
		outcome = "is still in progress."
	case infeasible:
		c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{
			TargetVolumeAttributesClassName: a.target, Status: corev1.PersistentVolumeClaimModifyVolumeInfeasible,
		}
	}
	s := status.Convert(a.err)
	setCondition(c, corev1.PersistentVolumeClaimVolumeModifyingVolume, "", fmt.Sprintf("Modifying volume to %q %s", a.target, outcome), now)
	setCondition(c, corev1.PersistentVolumeClaimVolumeModifyVolumeError, s.Code().String(), kube.Message(s.Message()), now)
}
