// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/utils/ptr"
)

// requestedClass returns the VolumeAttributesClass that claim requests, or "".
func requestedClass(claim *corev1.PersistentVolumeClaim) string {
	return ptr.Deref(claim.Spec.VolumeAttributesClassName, "")
}

// currentClass returns the VolumeAttributesClass of the volume of claim, or "".
func currentClass(claim *corev1.PersistentVolumeClaim) string {
	return ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "")
}

// decideModify returns the next step of the modification of a claim of the driver.
func (d driver) decideModify(s claimState) step {
	requested := requestedClass(s.claim)
	t, _ := modify.inProgress(s.claim)
	if requested != "" {
		t = target{key: requested}
	}
	t = s.only(t)
	switch {
	case !d.modifies || s.volume.Spec.CSI == nil:
		return step{reason: "NotSupported"}
	case s.claim.Status.ModifyVolumeStatus == nil && requested == currentClass(s.claim):
		return step{reason: "UpToDate"}
	case s.stub:
		return step{action: doReadClaim, reason: "Stub"}
	case requested == "" && !s.repeats(t) && isTrue(s.claim, corev1.PersistentVolumeClaimVolumeModifyingVolume):
		return step{action: doCancel, reason: "NotRequested", claim: cancelModification, events: []event{modifyCanceled}}
	case requested == "" && !s.repeats(t):
		return step{reason: "NotRequested"}
	case !s.classesServed:
		return step{reason: "ClassesNotAvailable"} // it enqueues the claim when they are
	}
	// The class of an infeasible target is read again, unless the class itself was rejected, and is watched.
	retry, slow := d.decideSlowRetry(modify, s, t)
	slow = slow && !s.repeats(t) && s.call.Payload.missingClass != t.key
	if slow && retry.action == doWait {
		return retry
	}
	switch err, known := d.checkClass(s, t.key); {
	case !known:
		return step{action: doReadClass, reason: stageClassNeeded, target: t}
	case err != nil:
		return d.decideUnusableClass(s, t, err)
	case slow: // an earlier process had the error
		return retry
	}
	return d.decideModifyCall(s, t)
}

// repeats reports whether the modification to t is repeated with equal arguments, and is not just requested.
func (s claimState) repeats(t target) bool {
	return s.call.State.MayHaveEffect() || t.key != requestedClass(s.claim)
}

// decideUnusableClass returns the next step of a modification to a class that the volume cannot have, because of err. If it is to be
// repeated, the class that the claim requests replaces it.
func (d driver) decideUnusableClass(s claimState, t target, err error) step {
	requested, repeated, class := requestedClass(s.claim), s.repeats(t), s.classes[t.key]
	if repeated && requested != "" && requested != t.key {
		replacement, known := d.checkClass(s, requested)
		switch {
		case !known:
			return step{action: doReadClass, reason: stageClassNeeded, target: target{key: requested}}
		case replacement == nil:
			failed := []event{modifyFailedEvent(err.Error())}
			return step{action: doAbandon, reason: "ClassDeleted", target: t, trigger: s.trigger, events: failed}
		}
	}
	if s.call.Payload.missingClass == t.key && (repeated || class == nil || modify.infeasibleTarget(s.claim) == t.key) {
		return step{action: doWait, reason: stageClassMissing, until: s.now.Add(d.RetryIntervalMax)}
	}
	pend := step{action: doPend, reason: stageClassMissing, target: t, events: []event{modifyFailedEvent(err.Error())}}
	switch {
	case repeated: // the record remains
	case class == nil:
		pend.claim = pendModification
	default:
		pend.claim = func(c *corev1.PersistentVolumeClaim) { rejectModification(c, t.key, err, s.now) }
	}
	return pend
}

// checkClass returns why the volume cannot be modified to a class, or nil. It returns false if the class was not read yet.
func (d driver) checkClass(s claimState, name string) (err error, known bool) {
	class, read := s.classes[name]
	switch {
	case !read:
		return nil, false
	case class == nil:
		//lint:ignore ST1005 a sentence of csi-resizer
		return fmt.Errorf("VAC %q does not exist.", name), true
	case class.DriverName != d.name:
		//lint:ignore ST1005 as above
		return fmt.Errorf("VAC %q is for driver %q, not for %q.", name, class.DriverName, d.name), true
	}
	return nil, true
}

// decideModifyCall returns the next step of ControllerModifyVolume with a class that exists.
func (d driver) decideModifyCall(s claimState, t target) step {
	src, err := d.source(s.volume)
	if err != nil {
		return step{action: doFail, reason: "CannotModify", err: err, target: t}
	}
	intend := step{action: doIntend, reason: "Requested", target: t,
		claim:  func(c *corev1.PersistentVolumeClaim) { startModification(c, t.key, s.now) },
		events: []event{modifyEvent(s.claim.Name, t.key)}}
	return s.inOrder(modify, src.modifySecret, intend, step{action: doModify, reason: "Requested", target: t})
}

// classes holds VolumeAttributesClasses by name; nil means that there is none.
type classes map[string]*storagev1.VolumeAttributesClass
