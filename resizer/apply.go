// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// attempt is one sync of an operation. Its methods are called with the lock of the claim.
type attempt struct {
	t         *term
	key       key
	unlock    func()
	reads     reads
	conflicts int
}

// lock locks the claim.
func (a *attempt) lock() { a.unlock = a.t.locks.Exclusive(a.key.UID) }

// remember changes the memory of the operation. event is zero if nothing happened to the call.
func (a *attempt) remember(event intent.Event, set func(*operationMemory)) {
	_, _, _ = a.t.ledger.Apply(a.key, change{Event: event, Set: set})
}

// apply executes step. After an error the operation is retried with back-off.
func (a *attempt) apply(ctx context.Context, s claimState, step step) error {
	switch step.action {
	case doFail:
		return a.failed(ctx, s, step, final, step.err)
	case doReadClaim:
		return a.readClaim(ctx, s.claim)
	case doReadVolume:
		return a.readVolume(ctx, s.volume)
	case doReadSecret, doReadClass:
		if err := a.read(ctx, step); err != nil {
			return a.failed(ctx, s, step, final, err)
		}
	case doWatchUsers:
		return a.t.watchUsers(ctx)
	case doScheduleRetry:
		a.scheduleRetry(s, step.target)
	case doIntend:
		return a.intend(ctx, s, step)
	case doExpand:
		return a.expand(ctx, s, step)
	case doModify:
		return a.modify(ctx, s, step)
	case doSaveVolume, doRemoveRecord:
		return a.saveVolume(ctx, s, step)
	case doSaveClaim, doCancel:
		return a.saveClaim(ctx, s, step)
	case doSaveError, doDiscard:
		return a.saveError(ctx, s, step)
	case doPend:
		return a.pend(ctx, s, step)
	case doAbandon:
		a.begin(step)
		a.remember(intent.Settle, nil)
		a.t.event(s.claim, step.events...)
	default:
		return fmt.Errorf("action %v has no implementation", step.action)
	}
	return nil
}

// readClaim reads claim from the API server: the cache may be stale, or have some of its fields only.
func (a *attempt) readClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	live, exists, err := a.t.claims.Refetch(ctx, a.t.c.deps.Client.CoreV1().PersistentVolumeClaims(claim.Namespace), claim)
	if err != nil {
		return fmt.Errorf("reading PVC \"%s/%s\": %w", claim.Namespace, claim.Name, err)
	}
	if exists {
		a.reads.live = live
		if live.ResourceVersion != claim.ResourceVersion {
			a.t.enqueue(live, a.t.queue.Resync) // the other operation may have decided about an earlier version
		}
	}
	return nil
}

// read reads the secret or the class that step names.
func (a *attempt) read(ctx context.Context, step step) (err error) {
	if step.action == doReadSecret {
		if a.reads.secrets, err = kube.ReadSecret(ctx, a.t.c.deps.Client, step.secret); err != nil {
			return secretError(step.secret, err)
		}
		a.reads.secretRead = true
		return nil
	}
	name := step.target.key
	class, err := a.t.c.deps.Client.StorageV1().VolumeAttributesClasses().Get(ctx, name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		class = nil
	case err != nil:
		return fmt.Errorf("reading VAC %q: %w", name, err)
	}
	if a.reads.classes == nil {
		a.reads.classes = classes{}
	}
	a.reads.classes[name] = class
	return nil
}

// failed counts a failure, sends its event and returns err. A call that the end of the term has canceled is no failure.
func (a *attempt) failed(ctx context.Context, s claimState, step step, kind outcome, err error) error {
	if ctx.Err() != nil {
		return err
	}
	a.t.c.metrics.failed(a.key.Operation, err)
	if s.claim != nil {
		a.t.event(s.claim, a.t.c.driver.failedEvent(a.key.Operation, step.target, s.volume.Name, kind, err))
	}
	return err
}

// saveVolume writes step to the PersistentVolume.
func (a *attempt) saveVolume(ctx context.Context, s claimState, step step) error {
	written, err := a.writeVolume(ctx, s, step)
	if err != nil || !written {
		return err
	}
	if s.call.State == intent.Answered {
		saved := *s.call.Payload.answer
		saved.volumeSaved = true
		saved.nodeExpansion = saved.nodeExpansion || a.key.Operation == expand && awaitsNode(s.volume, saved.before)
		a.remember(0, func(m *operationMemory) { m.answer = &saved })
	}
	if s.claim != nil {
		a.t.event(s.claim, step.events...)
	}
	return nil
}

// saveClaim writes step to the claim. It ends the operation if step has its result.
func (a *attempt) saveClaim(ctx context.Context, s claimState, step step) error {
	written, err := a.writeClaim(ctx, s, step)
	if err != nil || !written {
		return err
	}
	a.t.event(s.claim, step.events...)
	answer, began := s.call.Payload.answer, s.call.Payload.began
	if s.call.State != intent.Answered {
		return nil
	}
	log := klog.FromContext(ctx)
	if a.key.Operation == expand {
		log.Info("Volume expanded", "persistentVolume", s.claim.Spec.VolumeName, "size", answer.size.String(), "nodeExpansion",
			answer.nodeExpansion)
	} else {
		log.Info("Volume modified", "persistentVolume", s.claim.Spec.VolumeName, "volumeAttributesClass", answer.target)
	}
	if began.IsZero() {
		began = answer.at
	} else {
		a.t.c.metrics.finished(a.key.Operation, answer.at.Sub(began))
	}
	tracing.EndOperation(ctx, began, "pvc", a.key.claim(), "persistentVolume", s.claim.Spec.VolumeName)
	a.remember(intent.Settle, func(m *operationMemory) {
		*m = operationMemory{stage: m.stage, nodeReset: m.nodeReset}
	})
	return nil
}

// saveError writes the error of a call to the claim, unless step discards it, and forgets the response.
func (a *attempt) saveError(ctx context.Context, s claimState, step step) error {
	if step.action == doSaveError {
		written, err := a.writeClaim(ctx, s, step)
		if err != nil || !written {
			return err
		}
	}
	answer, event := *s.call.Payload.answer, intent.Event(0)
	if s.call.State == intent.Answered { // superseded
		event = intent.Settle
	}
	a.remember(event, func(m *operationMemory) {
		m.answer = nil
		if step.action == doSaveError {
			m.recorded = failureOf(answer)
		}
		if answer.kind == infeasible {
			m.slow = a.t.c.driver.delayed(answer.target, s.now)
		}
	})
	if answer.kind == infeasible {
		return nil // the claim may request something else now
	}
	return answer.err
}

// pend records that a modification waits for its class.
func (a *attempt) pend(ctx context.Context, s claimState, step step) error {
	if step.claim != nil {
		if written, err := a.writeClaim(ctx, s, step); err != nil || !written {
			return err
		}
	}
	a.remember(0, func(m *operationMemory) { m.missingClass = step.target.key })
	a.t.event(s.claim, step.events...)
	a.t.watchClasses()
	return nil
}
