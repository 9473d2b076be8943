// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizenudge

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// resizePending reports whether pvc waits for a file system expansion that the kubelet has not started.
// A kubelet that has started it, or found it infeasible, needs no update of the pods.
func resizePending(pvc *corev1.PersistentVolumeClaim) bool {
	switch pvc.Status.AllocatedResourceStatuses[corev1.ResourceStorage] {
	case corev1.PersistentVolumeClaimNodeResizePending:
		return true
	case corev1.PersistentVolumeClaimNodeResizeInProgress, corev1.PersistentVolumeClaimNodeResizeInfeasible:
		return false
	}
	return slices.ContainsFunc(pvc.Status.Conditions, isResizeCondition)
}

func isResizeCondition(c corev1.PersistentVolumeClaimCondition) bool {
	return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
}

// lastTransition returns when pvc began to wait, or zero if its conditions do not say.
func lastTransition(pvc *corev1.PersistentVolumeClaim) (latest time.Time) {
	for _, c := range pvc.Status.Conditions {
		if isResizeCondition(c) && c.LastTransitionTime.After(latest) {
			latest = c.LastTransitionTime.Time
		}
	}
	return latest
}

// claimState is everything that decide reads.
type claimState struct {
	claim *corev1.PersistentVolumeClaim
	ours  bool          // the volume belongs to the driver
	pods  []*corev1.Pod // that use claim
	// podsUnknown means that other pods may use claim: the watch has not listed them yet.
	podsUnknown bool
	since       time.Time // claim waits
	now         time.Time
}

// step says which pods to update.
type step struct {
	reason string
	pods   []*corev1.Pod
	again  time.Time // enqueue the claim again; zero: when it changes
}

// podsRecheck is the time between two reconciliations while the pods are not known.
const podsRecheck = time.Second

// decide returns the pods of a claim that need an update. It has no side effects.
func decide(s claimState, annotation string) step {
	switch {
	case !concerns(s.claim):
		return step{reason: "NothingToDo"}
	case s.podsUnknown:
		return step{reason: "PodsUnknown", again: s.now.Add(podsRecheck)}
	case !s.ours:
		return step{reason: "OfAnotherDriver"}
	}
	next := step{reason: "Updated"}
	for _, pod := range s.pods {
		if needsUpdate(pod, annotation, s.since) {
			next.reason, next.pods = "FileSystemResizePending", append(next.pods, pod)
		}
	}
	return next
}

// concerns reports whether pvc may need an update of its pods. Other claims are not enqueued.
func concerns(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.DeletionTimestamp == nil && resizePending(pvc)
}

// needsUpdate reports whether a kubelet runs pod and the pod was not updated after since. An
// annotation that is not a time counts as missing.
func needsUpdate(pod *corev1.Pod, annotation string, since time.Time) bool {
	if pod.DeletionTimestamp != nil || pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodSucceeded ||
		pod.Status.Phase == corev1.PodFailed {
		return false
	}
	updated, err := time.Parse(time.RFC3339Nano, pod.Annotations[annotation])
	return err != nil || !updated.After(since)
}

// annotationValue returns now, or a time just after since if the clock of this machine is behind.
// Otherwise the same pod would be updated again and again.
func annotationValue(now, since time.Time) string {
	if at := since.Add(time.Nanosecond); now.Before(at) {
		now = at
	}
	return now.UTC().Format(time.RFC3339Nano)
}
