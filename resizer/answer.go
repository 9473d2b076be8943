// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
)

// answer is a response of the driver.
type answer struct {
	target string
	kind   outcome
	err    error // nil for success
	at     time.Time

	volume *corev1.PersistentVolume // as of the call
	// Of a successful expansion.
	size          resource.Quantity
	nodeExpansion bool
	before        resource.Quantity // capacity of the claim before the expansion

	volumeSaved bool
}

// outcome classifies the response to a call.
type outcome int

const (
	final         outcome = iota // the call has succeeded, or has failed without an effect
	infeasible                   // the driver cannot do this, now or in the near future
	indeterminate                // the call may have taken effect
)

// String returns the name of o in logs.
func (o outcome) String() string { return [...]string{"Failed", "Infeasible", "Indeterminate"}[o] }

// outcomeOf returns the outcome of a call of o that failed with err. ResourceExhausted is final: if the
// storage backend is full, a smaller request must be possible (KEP-1790).
func outcomeOf(o operation, err error) outcome {
	if csiclient.OutcomeOf(err) == csiclient.Indeterminate {
		return indeterminate
	}
	switch status.Code(err) {
	case codes.InvalidArgument:
		return infeasible
	case codes.OutOfRange, codes.NotFound:
		if o == expand {
			return infeasible
		}
	}
	return final
}

// answered remembers a response for the API. An indeterminate response of an expansion changes nothing there.
func (a *attempt) answered(ctx context.Context, s claimState, step step, result answer) error {
	result.target, result.at, result.volume = step.target.key, time.Now(), s.volume
	if result.err != nil {
		_ = a.failed(ctx, s, step, result.kind, result.err)
	}
	event := intent.Answer
	switch {
	case result.kind == indeterminate:
		event = intent.Lose
	case result.err != nil:
		event = intent.Settle
	}
	ended := result.kind == indeterminate && (a.key.Operation == expand || ctx.Err() != nil)
	a.remember(event, func(m *operationMemory) {
		m.inUseError, m.waiting = status.Code(result.err) == codes.FailedPrecondition, false
		if !ended {
			m.answer = &result
		}
	})
	if ended {
		return result.err
	}
	return nil
}

// decideAnswer returns the step that writes the response a: a result to the PersistentVolume first, then to the claim.
func (d driver) decideAnswer(o operation, s claimState, a answer) step {
	write := d.expandAnswer(s, a)
	if o == modify {
		write = s.modifyAnswer(a)
	}
	expected := s.claim != nil && s.intends(o, a.target)
	superseded := step{action: doDiscard, reason: "Superseded"}
	switch {
	case a.err == nil && !a.volumeSaved:
		if s.volume == nil || s.volume.UID != a.volume.UID {
			return superseded
		}
		return step{action: doSaveVolume, reason: write.reason, volume: write.volume}
	case !expected:
		return superseded
	case a.err != nil && a.kind != infeasible && s.call.Payload.recorded.covers(failureOf(a)):
		return step{action: doDiscard, reason: "SameError"}
	case s.stub:
		return step{action: doReadClaim, reason: "Stub"}
	case a.err != nil:
		return step{action: doSaveError, reason: a.kind.String(), claim: write.claim}
	}
	return step{action: doSaveClaim, reason: write.reason, claim: write.claim, events: write.events}
}

// expandAnswer returns what the response a of an expansion changes.
func (d driver) expandAnswer(s claimState, a answer) step {
	write := step{reason: "Expanded", volume: d.expandedVolume(a), events: []event{resizeSuccessful}}
	write.claim = func(c *corev1.PersistentVolumeClaim) { finishExpansion(c, a, s.now) }
	if a.err != nil {
		write.claim = func(c *corev1.PersistentVolumeClaim) { failExpansion(c, a, s.now) }
	}
	if a.nodeExpansion {
		write.events = []event{nodeRequired}
	}
	return write
}

// expandedVolume returns the change of a PersistentVolume after its expansion. Its size never decreases.
func (d driver) expandedVolume(a answer) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) {
		if size := volumeSize(pv); size.Cmp(a.size) < 0 {
			setVolumeSize(pv, a.size)
		}
		if _, has := pv.Annotations[annPreResize]; a.nodeExpansion && d.AnnotateFsResize && !has {
			metav1.SetMetaDataAnnotation(&pv.ObjectMeta, annPreResize, a.before.String())
		}
	}
}

// awaitsNode reports whether pv records that the node has to complete the expansion of a claim with that capacity. A
// repeated call may return that the node has nothing to do: the controller had nothing to do.
func awaitsNode(pv *corev1.PersistentVolume, capacity resource.Quantity) bool {
	_, has := pv.Annotations[annPreResize]
	return has && capacity.Cmp(volumeSize(pv)) < 0
}

// expandedSize returns the size of a volume after a successful expansion to requested.
func expandedSize(reported int64, requested resource.Quantity) (resource.Quantity, error) {
	size := resource.NewQuantity(reported, resource.BinarySI)
	switch {
	case reported == 0: // unknown, says the CSI spec
		return requested, nil
	case size.Cmp(requested) < 0:
		return *size, fmt.Errorf("driver returned capacity %s, less than requested %s", size, &requested)
	}
	return *size, nil
}

// modifyAnswer returns what the response a of a modification changes.
func (s claimState) modifyAnswer(a answer) step {
	write := step{reason: "Modified", events: []event{modifySuccessEvent(s.key.Name, a.target)}}
	write.volume = func(pv *corev1.PersistentVolume) { pv.Spec.VolumeAttributesClassName = &a.target }
	write.claim = func(c *corev1.PersistentVolumeClaim) { finishModification(c, a.target) }
	if a.err != nil {
		write.claim = func(c *corev1.PersistentVolumeClaim) { failModification(c, a, s.now) }
	}
	return write
}
