// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

// create calls CreateSnapshot, for a new snapshot, to check one that is not ready, or to learn the outcome of an earlier call.
func (l *loop) create(ctx context.Context, s state, step step) error {
	c := s.content
	if err := pressure.Enter(ctx, c.create, c.class); err != nil {
		return err
	}
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
	if !s.orphan && !l.exists(c) { // the handler of its deletion may have run before this call was planned
		l.forgetUnsent(ctx, keyOf(c), last)
		return nil
	}
	a, sent, err := l.send(ctx, c, step.request, s.secrets)
	switch {
	case !sent && !s.orphan && !l.exists(c): // it was deleted and forgotten before the call
		return nil
	case !sent:
		return err
	case err != nil:
		return l.createFailed(ctx, s, err, step.request.Name)
	}
	return l.happened(c.UID, intent.Answer, func(m *memory) { m.answer, m.remains = a, "" })
}

// plan sets the arguments of the next CreateSnapshot of c, and returns the state of the last one.
func (l *loop) plan(c *content, event intent.Event, r *createRequest) (last intent.State, err error) {
	last, _, err = l.ledger.Apply(c.UID, intent.Change[memory]{Event: event, Args: r.args(), Set: func(m *memory) {
		m.undoable = c.known().handle == "" || c.leaving()
	}})
	return last, err
}

// send calls CreateSnapshot, once the volumes can be used and this process may call the driver.
func (l *loop) send(ctx context.Context, c *content, r *createRequest, secrets map[string]string) (a *answer, sent bool, err error) {
	release, err := l.c.shareVolumes(ctx, c)
	if err != nil {
		return nil, false, err
	}
	defer release()
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	if err := l.ledger.Send(ctx, c.UID, r.args(), c.recorded(r)); err != nil {
		return nil, false, err
	}
	a, err = l.calls.create(call, c, r, secrets)
	return a, true, err
}

// createFailed remembers and reports the error of a CreateSnapshot with that name.
func (l *loop) createFailed(ctx context.Context, s state, err error, name string) error {
	c, event := s.content, intent.Lose
	ended, remains := c.endedBy(s.call, err, name)
	ended = ended && ctx.Err() == nil // else the term has ended
	if ended {
		event = intent.Settle
	}
	if err := l.happened(c.UID, event, func(m *memory) {
		if ended && (remains != "" || csiclient.ExcludesEarlier(err)) {
			m.remains = remains
		}
	}); err != nil {
		return err
	}
	switch {
	case !c.leaving() && c.isNew():
		return l.report(ctx, c, doReportCreation, failure{creationError(c, err), err})
	case !c.leaving():
		return l.report(ctx, c, doReportCheck, failure{creationError(c, err), err})
	case ctx.Err() != nil:
		return err
	case ended && remains == "":
		klog.FromContext(ctx).Info("Repeated creation failed, no snapshot exists", "rpc", c.create, "err", err)
		return nil
	case ended:
		l.eventOnce(c, remains, warning, c.deleted, remains)
		return nil
	case s.orphan:
		return l.reportDeletion(ctx, c, deletionError(c, err))
	}
	l.announce(c, cause{blockedOutcome, fmt.Sprintf("the outcome of %s: %v", c.create, err)})
	return err
}
