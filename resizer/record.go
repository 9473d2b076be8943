// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/intent"
)

// callOf returns the call of o on claim, whose entry in the ledger is c, and the event with which the next one begins: none if a call of
// this process is repeated. Unless the last call of this process was for the target that claim records, an earlier process may have sent
// one for it, whose outcome is unknown. Nothing else concludes that from claim.
func (o operation) callOf(c call, claim *corev1.PersistentVolumeClaim) (_ call, trigger intent.Event) {
	t, recorded := o.inProgress(claim)
	switch {
	case c.State.MayHaveEffect():
		return c, 0
	case recorded && c.Args != t.key:
		c.State, c.Args, c.Payload.target = intent.Unknown, t.key, t
		return c, intent.Resume
	}
	return c, intent.Plan
}

// only returns the target that is requested instead of t: while a call may have an effect nothing but its target is, whatever the claim
// requests and records.
func (s claimState) only(t target) target {
	if s.call.State.MayHaveEffect() {
		return s.call.Payload.target
	}
	return t
}

// status returns the target that claim names for o, and the status of that target, "" for none.
func (o operation) status(claim *corev1.PersistentVolumeClaim) (t target, status string) {
	if o == modify {
		m := ptr.Deref(claim.Status.ModifyVolumeStatus, corev1.ModifyVolumeStatus{})
		return target{key: m.TargetVolumeAttributesClassName}, string(m.Status)
	}
	size, _ := allocatedSize(claim)
	return target{size: size, key: bytesOf(size)}, string(resizeStatus(claim))
}

// inProgress returns the target that claim records for o, until the driver has refused or the API shows it. Else it is zero.
func (o operation) inProgress(claim *corev1.PersistentVolumeClaim) (t target, recorded bool) {
	t, status := o.status(claim)
	switch {
	case o == modify && status == string(corev1.PersistentVolumeClaimModifyVolumeInProgress),
		o == expand && status == string(controllerInProgress) && t.size.Sign() > 0 && !isTooLarge(t.size):
		return t, true
	}
	return target{}, false
}

// infeasibleTarget returns the target that claim calls infeasible for o, "" for none.
func (o operation) infeasibleTarget(claim *corev1.PersistentVolumeClaim) string {
	t, status := o.status(claim)
	if status != string(controllerInfeasible) && status != string(corev1.PersistentVolumeClaimModifyVolumeInfeasible) {
		return ""
	}
	return t.key
}

// condition returns the type of the condition that says that o is in progress.
func (o operation) condition() corev1.PersistentVolumeClaimConditionType {
	if o == modify {
		return corev1.PersistentVolumeClaimVolumeModifyingVolume
	}
	return corev1.PersistentVolumeClaimResizing
}

// intends reports whether the claim records that the driver is called with the target of that key.
func (s claimState) intends(o operation, key string) bool {
	recorded, ok := o.inProgress(s.claim)
	return ok && recorded.key == key
}

// recordOf returns what the claim records about a call with t.
func (s claimState) recordOf(o operation, t target) intent.Recorded {
	switch {
	case !s.intends(o, t.key):
		return intent.None
	case s.call.Payload.intended != t.key:
		return intent.Other
	}
	return intent.Own
}

// showsResult reports whether the API shows the result of the last call of o, which an earlier leader has written late.
func (s claimState) showsResult(o operation) bool {
	if o == modify {
		return s.claim.Status.ModifyVolumeStatus == nil && currentClass(s.claim) == s.call.Args
	}
	target, capacity, volume := s.call.Payload.target.size, capacityOf(s.claim), volumeSize(s.volume)
	status := resizeStatus(s.claim)
	return status != controllerInProgress && status != controllerInfeasible && (capacity.Cmp(target) >= 0 || volume.Cmp(target) >= 0)
}

// intend records what the driver will be called for. If the other operation of the claim begins as well,
// one write records both, so that both calls are made at the same time: some drivers combine them.
func (a *attempt) intend(ctx context.Context, s claimState, step step) error {
	other, otherStep := a.companion(ctx)
	change := step.claim
	if otherStep != nil {
		change = func(c *corev1.PersistentVolumeClaim) { step.claim(c); otherStep.claim(c) }
	}
	err := a.patchClaim(ctx, s, change)
	if otherStep != nil && isResponse(err) { // an admission policy may refuse the other intent only
		otherStep = nil
		err = a.patchClaim(ctx, s, step.claim)
	}
	if err != nil {
		return a.claimNotWritten(ctx, s, step, err)
	}
	a.intended(s, step)
	if otherStep != nil {
		other.reads.live = a.reads.live
		other.intended(s, *otherStep)
	}
	return nil
}

// companion returns the step with which the other operation of the claim begins, or nil. Errors are left to the sync of that operation.
func (a *attempt) companion(ctx context.Context) (*attempt, *step) {
	k := a.key
	k.Operation = k.Operation.other()
	other := &attempt{t: a.t, key: k, reads: reads{live: a.reads.live}}
	for range maxSteps {
		s := a.t.gather(k, other.reads)
		switch step := a.t.c.driver.decide(k.Operation, s); step.action {
		case doIntend:
			return other, &step
		case doReadSecret, doReadClass:
			if other.read(ctx, step) != nil {
				return other, nil
			}
		default:
			return other, nil
		}
	}
	return other, nil
}

// intended remembers an intent that was written.
func (a *attempt) intended(s claimState, step step) {
	a.begin(step)
	a.remember(0, func(m *operationMemory) {
		m.missingClass, m.intended = "", step.target.key
		if m.began.IsZero() {
			m.began = s.now
		}
		if step.resets {
			m.nodeReset = a.t.c.driver.delayed(bytesOf(requestedSize(s.claim)), s.now)
		}
	})
	a.t.event(s.claim, step.events...)
}
