// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"fmt"
	"math"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Values of status.allocatedResourceStatuses. The API had the last two before 1.31.
const (
	controllerInProgress = corev1.PersistentVolumeClaimControllerResizeInProgress
	controllerInfeasible = corev1.PersistentVolumeClaimControllerResizeInfeasible
	nodePending          = corev1.PersistentVolumeClaimNodeResizePending
	nodeInProgress       = corev1.PersistentVolumeClaimNodeResizeInProgress
	nodeInfeasible       = corev1.PersistentVolumeClaimNodeResizeInfeasible

	controllerFailed corev1.ClaimResourceStatus = "ControllerResizeFailed"
	nodeFailed       corev1.ClaimResourceStatus = "NodeResizeFailed"
)

// resizeStatus returns the status of the expansion of claim, "" for none.
func resizeStatus(claim *corev1.PersistentVolumeClaim) corev1.ClaimResourceStatus {
	switch s := claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage]; s {
	case controllerFailed:
		return controllerInfeasible
	case nodeFailed:
		return nodeInfeasible
	case nodePending, nodeInProgress:
		// Some kubelets keep the status after the expansion (kubernetes#131402).
		if allocated, ok := allocatedSize(claim); ok && allocated.Cmp(capacityOf(claim)) <= 0 {
			return ""
		}
		return s
	default:
		return s
	}
}

func requestedSize(claim *corev1.PersistentVolumeClaim) resource.Quantity {
	return claim.Spec.Resources.Requests[corev1.ResourceStorage]
}

func allocatedSize(claim *corev1.PersistentVolumeClaim) (resource.Quantity, bool) {
	size, ok := claim.Status.AllocatedResources[corev1.ResourceStorage]
	return size, ok
}

func capacityOf(claim *corev1.PersistentVolumeClaim) resource.Quantity {
	return claim.Status.Capacity[corev1.ResourceStorage]
}

func volumeSize(pv *corev1.PersistentVolume) resource.Quantity {
	return pv.Spec.Capacity[corev1.ResourceStorage]
}

// wantsMore reports whether claim requests more than its capacity.
func wantsMore(claim *corev1.PersistentVolumeClaim) bool {
	requested := requestedSize(claim)
	return requested.Cmp(capacityOf(claim)) > 0
}

// isTooLarge reports whether size exceeds the sizes of CSI requests. [resource.Quantity.Value] is undefined then.
func isTooLarge(size resource.Quantity) bool { return size.CmpInt64(math.MaxInt64) > 0 }

// bytesOf returns size as a target.
func bytesOf(size resource.Quantity) string { return strconv.FormatInt(size.Value(), 10) }

// isRecordObsolete reports whether pv has the size before an expansion, and the node has completed that
// expansion. The capacity of the claim is then that of the PersistentVolume or, if the driver rounds
// sizes up, the allocated size. The stub of a claim that was never expanded has no sizes: the claim has to be read.
func isRecordObsolete(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	if _, has := pv.Annotations[annPreResize]; !has || resizeStatus(claim) != "" {
		return false
	}
	capacity := capacityOf(claim)
	allocated, ok := allocatedSize(claim)
	return capacity.Cmp(volumeSize(pv)) >= 0 || ok && capacity.Cmp(allocated) >= 0
}

// decideExpand returns the next step of the expansion of a claim of the driver.
func (d driver) decideExpand(s claimState) step {
	switch {
	case d.expansion == expandsNone:
		return step{reason: "NotSupported"}
	case isRecordObsolete(s.claim, s.volume) && (!s.confirmed || kube.WasNeverExpanded(s.claim)):
		return step{action: doReadClaim, reason: "Unconfirmed"}
	case isRecordObsolete(s.claim, s.volume):
		return step{action: doRemoveRecord, reason: "Expanded", volume: removeRecord}
	case !wantsMore(s.claim):
		return step{reason: "UpToDate"}
	}
	size, reason := d.wantedSize(s)
	if reason != "" {
		return step{reason: reason}
	}
	t := s.only(target{size: size, key: bytesOf(size)})
	size = t.size
	if isTooLarge(size) {
		err := fmt.Errorf("spec.resources.requests.storage of PVC \"%s/%s\" is %s, more than the %d bytes of the largest CSI request. "+
			"Request less", s.claim.Namespace, s.claim.Name, &size, int64(math.MaxInt64))
		return step{action: doFail, reason: "CannotExpand", err: err}
	}
	if !s.volumeConfirmed && d.stepsBack(s.claim, size) {
		return step{action: doReadVolume, reason: "Unconfirmed"}
	}
	if wait, ok := d.decideExpandWait(s, t); ok {
		return wait
	}
	if s.stub {
		return step{action: doReadClaim, reason: "Stub"}
	}
	if d.expansion == expandsNode {
		return d.decideExpandOnNode(s, t)
	}
	return d.decideExpandCall(s, t)
}

// wantedSize returns the size to request, or the reason why the claim waits.
func (d driver) wantedSize(s claimState) (size resource.Quantity, reason string) {
	claim := s.claim
	requested, capacity, volume := requestedSize(claim), capacityOf(claim), volumeSize(s.volume)
	allocated, isAllocated := allocatedSize(claim)
	if !isAllocated || isTooLarge(allocated) { // no CSI request has such a size
		allocated = requested
	}
	volumeSuffices := volume.Cmp(requested) >= 0
	switch resizeStatus(claim) {
	case "":
		switch {
		case !volumeSuffices:
			return requested, ""
		case isAllocated && allocated.Cmp(capacity) > 0:
			return allocated, ""
		case !isAllocated && isTrue(claim, corev1.PersistentVolumeClaimFileSystemResizePending):
			return size, "NodeExpansion"
		}
		return requested, ""
	case controllerInProgress, controllerInfeasible:
		// A volume that was expanded to the recorded size is not requested smaller, whatever later calls returned.
		if volumeSuffices && volume.Cmp(allocated) >= 0 {
			return allocated, ""
		}
		return requested, ""
	case nodePending, nodeInProgress:
		if volumeSuffices || isAllocated && volume.Cmp(allocated) >= 0 {
			return size, "NodeExpansion" // the node finishes first
		}
		return allocated, ""
	case nodeInfeasible:
		// A volume that the controller has expanded is not requested smaller.
		if volumeSuffices && d.expansion == expandsNode {
			return requested, ""
		}
		return allocated, ""
	}
	return size, stageUnknown
}

// stepsBack reports whether a request of size follows only from a PersistentVolume without the size that an earlier leader has
// written: the cache may be stale.
func (d driver) stepsBack(claim *corev1.PersistentVolumeClaim, size resource.Quantity) bool {
	switch resizeStatus(claim) {
	case nodeInProgress:
		return true
	case nodePending: // on the node only, the claim is written first
		return d.expansion == expandsController
	case controllerInProgress, controllerInfeasible:
		allocated, ok := allocatedSize(claim)
		return ok && size.Cmp(allocated) < 0
	}
	return false
}

// decideExpandCall returns the next step of an expansion with ControllerExpandVolume.
func (d driver) decideExpandCall(s claimState, t target) step {
	src, err := d.source(s.volume)
	if err == nil {
		_, err = d.expandRequest(src, t.size, nil)
	}
	if err != nil {
		return step{action: doFail, reason: "CannotExpand", err: err, target: t}
	}
	return s.inOrder(expand, src.expandSecret, d.intendExpansion(s, t, controllerInProgress), step{
		action: doExpand, reason: "Requested", target: t,
	})
}

// intendExpansion returns the write that records the expansion to t with status.
func (d driver) intendExpansion(s claimState, t target, status corev1.ClaimResourceStatus) step {
	step := step{action: doIntend, reason: "Requested", target: t, resets: resizeStatus(s.claim) == nodeInfeasible}
	step.claim = func(c *corev1.PersistentVolumeClaim) { startExpansion(c, t.size, status, s.now) }
	if allocated, ok := allocatedSize(s.claim); !ok || allocated.Cmp(t.size) != 0 {
		step.events = []event{resizingEvent(s.volume.Name)}
	}
	return step
}

// decideExpandOnNode returns the next step of an expansion on the node only. The claim is written first: the kubelet expands to its
// allocated size, and a larger PersistentVolume alone would exceed the quota. A smaller size after a failure on the node is written to the
// PersistentVolume first, which must never be larger than the volume.
func (d driver) decideExpandOnNode(s claimState, t target) step {
	allocated, ok := allocatedSize(s.claim)
	volume := volumeSize(s.volume)
	recorded := ok && allocated.Cmp(t.size) == 0 && resizeStatus(s.claim) == nodePending
	save := step{action: doSaveVolume, reason: "NodeExpansion", target: t}
	switch {
	case !recorded && (volume.Cmp(t.size) <= 0 || resizeStatus(s.claim) != nodeInfeasible):
		return d.intendExpansion(s, t, nodePending)
	case !s.confirmed:
		return step{action: doReadClaim, reason: "Unconfirmed"}
	case !recorded:
		save.volume = func(pv *corev1.PersistentVolume) { setVolumeSize(pv, t.size) }
		return save
	}
	save.volume = d.expandedVolume(answer{size: t.size, nodeExpansion: true, before: capacityOf(s.claim)})
	save.events = []event{nodeRequired}
	return save
}

func setVolumeSize(pv *corev1.PersistentVolume, size resource.Quantity) {
	pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: size}
}

func removeRecord(pv *corev1.PersistentVolume) { delete(pv.Annotations, annPreResize) }

// target is what an operation requests.
type target struct {
	key  string            // size in bytes, or the VolumeAttributesClass
	size resource.Quantity // of expansions
}
