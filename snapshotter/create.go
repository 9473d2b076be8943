// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
)

// create calls CreateSnapshot, for a new snapshot, to check one that is not ready, or to learn the outcome of an earlier call.
func (l *loop) create(ctx context.Context, s state, step step) error {
	c := s.content
	event := map[intent.State]intent.Event{ // none for an unanswered call, whose arguments remain
		intent.Idle: intent.Plan, intent.Settled: intent.Plan, intent.Planned: intent.Replan,
	}[s.call.State]
	if s.call.Payload.inherited {
		event = intent.Resume
	}
	last, err := l.plan(c, event, step.request)
	if err != nil {
		return err
	}
	if !s.orphan && !l.exists(c) {
		// The handler of its deletion decides about an earlier call of this process. It may have run before this one was planned.
		if !last.MayHaveEffect() {
			l.forget(ctx, keyOf(c))
		}
		return nil
	}
	err = l.send(ctx, c, s.call, step.request, s.secrets)
	failed, sent := errors.AsType[failedCall](err)
	switch {
	case !sent && !s.orphan && !l.exists(c): // it was deleted and forgotten before the call
		return nil
	case !sent:
		return err
	case c.leaving():
		return l.repetitionFailed(ctx, s, failed)
	}
	kind := doReportCheck
	if c.isNew() {
		kind = doReportCreation
	}
	return l.report(ctx, c, kind, failure{creationError(c, failed.error), failed.error}, cause{})
}

// plan sets the arguments of the next CreateSnapshot of c, and returns the state of the last one.
func (l *loop) plan(c *content, event intent.Event, r *createRequest) (last intent.State, err error) {
	last, _, err = l.ledger.Apply(c.UID, intent.Change[memory]{Event: event, Args: r.args(), Set: func(m *memory) {
		m.undoable = c.known().handle == "" || c.leaving()
	}})
	return last, err
}

// failedCall is an error of CreateSnapshot.
type failedCall struct {
	error
	ended   bool   // the wait for its outcome has ended
	remains string // why a snapshot may exist nevertheless
}

// send calls CreateSnapshot and remembers its result. before is the entry before the call was planned. An error of the driver is a
// [failedCall].
func (l *loop) send(ctx context.Context, c *content, before entry, r *createRequest, secrets map[string]string) error {
	release, err := l.c.shareVolumes(ctx, c)
	if err != nil {
		return err
	}
	defer release()
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	if err := l.ledger.Send(ctx, c.UID, r.args()); err != nil {
		return err
	}
	a, err := l.calls.create(call, c, r, secrets)
	if err == nil {
		return l.happened(c.UID, intent.Answer, func(m *memory) { m.answer, m.remains = a, "" })
	}
	ended, remains := c.endedBy(before, err, r.Name)
	failed, event := failedCall{err, ended && ctx.Err() == nil, remains}, intent.Lose
	if failed.ended {
		event = intent.Settle
	}
	if err := l.happened(c.UID, event, func(m *memory) {
		if failed.ended && (remains != "" || csiclient.ExcludesEarlier(err)) {
			m.remains = remains
		}
	}); err != nil {
		return err
	}
	return failed
}

// repetitionFailed handles the error of a CreateSnapshot that was repeated for a content that is being deleted.
func (l *loop) repetitionFailed(ctx context.Context, s state, failed failedCall) error {
	c := s.content
	switch {
	case ctx.Err() != nil: // the term has ended
		return failed.error
	case failed.ended && failed.remains == "":
		klog.FromContext(ctx).Info("Repeated creation failed, no snapshot exists", "rpc", c.create, "err", failed.error)
		return nil
	case failed.ended:
		l.eventOnce(c, failed.remains, warning, c.deleted, failed.remains)
		return nil
	case s.orphan:
		return l.report(ctx, c, doReportDeletion, deletionError(c, failed.error), cause{})
	}
	l.announce(c, cause{blockedOutcome, fmt.Sprintf("the outcome of %s: %v", c.create, failed.error)})
	return failed.error
}
