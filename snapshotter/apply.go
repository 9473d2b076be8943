// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// apply executes step and stores in r what it has read. After an error the content is retried with back-off.
func (l *loop) apply(ctx context.Context, s state, step step, r *reads) error {
	c := s.content
	switch step.action {
	case doReportCreation, doReportCheck:
		return l.report(ctx, c, step.action, step.err)
	case doReportDeletion:
		err := l.reportDeletion(ctx, c, step.err)
		if step.cause.reason != "" && ctx.Err() == nil {
			l.announce(c, step.cause)
		}
		return err
	case doSettle:
		return l.happened(c.UID, intent.Settle, nil)
	case doAnnounce:
		if step.err != nil {
			l.eventOnce(c, malformedRecord, warning, c.created, step.err.Error())
			return nil
		}
		l.announce(c, step.cause)
		return nil
	case doReadSecret:
		return l.readSecret(ctx, c, step, r)
	case doReadContent:
		return l.readContent(ctx, s, step, r)
	case doReadClass:
		return l.readNamedClass(ctx, c, r)
	case doRecordRequest:
		return l.record(ctx, c, step)
	case doCreate:
		*r = reads{} // the content may change during the call, and its deletion have another Secret
		return l.create(ctx, s, step)
	case doCheck:
		*r = reads{}
		return l.check(ctx, s)
	case doWriteAnswer:
		return l.writeAnswer(ctx, s, step)
	case doAskAgain:
		return l.askAgain(ctx, c, step.err)
	case doEndCreation:
		change := kube.MetadataPatch{RemoveAnnotations: []string{c.creating}, Tests: recordTest(c)}
		_, err := l.objects.Patch(ctx, l.writer, c, change)
		if l.objects.Outdated(c, err) {
			return nil // decide again
		}
		return err
	case doReadMembers:
		return l.readMembers(ctx, s, step, r)
	case doDelete:
		return l.delete(ctx, s, step)
	case doClearStatus:
		if err := l.patchStatus(ctx, c, step.status); err != nil {
			return l.reportDeletion(ctx, c, fmt.Errorf("Failed to clear content status: %w", err))
		}
		return nil
	case doRemoveFinalizer:
		return l.removeFinalizer(ctx, s, step)
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

// readContent reads c from the API server.
func (l *loop) readContent(ctx context.Context, s state, step step, r *reads) (err error) {
	c, read := s.content, election.Now()
	if s.orphan {
		err = l.confirmOrphan(ctx, c)
	} else {
		_, _, err = l.objects.Refetch(ctx, l.writer, c)
	}
	switch {
	case err == nil:
		r.read, r.ofOrphan = read, s.orphan
		return nil
	case step.report == doReportDeletion:
		return l.reportDeletion(ctx, c, deletionError(c, fmt.Errorf("reading the content: %w", err)))
	}
	return fmt.Errorf("reading %s %q from the API server: %w", c.kind.name, c.Name, err)
}

// readNamedClass reads the class of c from the API server.
func (l *loop) readNamedClass(ctx context.Context, c *content, r *reads) error {
	class, err := l.classes.Get(ctx, c.class, metav1.GetOptions{})
	switch {
	case err == nil:
		r.class = classOf(class)
	case !kube.IsNotFound(err):
		return l.reportDeletion(ctx, c, deletionError(c, fmt.Errorf("reading %s %q: %w", c.classKind, c.class, err)))
	}
	r.classRead = true
	return nil
}

func (l *loop) readSecret(ctx context.Context, c *content, step step, r *reads) error {
	values, err := kube.ReadSecret(ctx, l.c.deps.Client, step.secret)
	if err == nil {
		r.secret, r.secrets = true, values
		return nil
	}
	if step.report == doReportDeletion {
		if kube.IsNotFound(err) {
			r.noSecret = err
			return nil
		}
		return l.reportDeletion(ctx, c, credentials(c, err))
	}
	err = fmt.Errorf("cannot get credentials for %s content %q: %w", c.noun, c.Name, err)
	if step.report == doReportCheck {
		return l.report(ctx, c, step.report, checkError(c, err))
	}
	return l.report(ctx, c, step.report, inputsError(c, err.Error()))
}

// exists reports whether c is in the cache.
func (l *loop) exists(c *content) bool {
	_, exists := l.objects.Newest(c)
	return exists
}

// check asks the driver for the state of a pre-provisioned snapshot or of a member.
func (l *loop) check(ctx context.Context, s state) error {
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	a, err := l.calls.check(call, s.content, s.secrets)
	switch {
	case err != nil && s.content.terminating() && s.call.Payload.awaitsCheck(s.content) && isAbsent(err):
		l.remember(s.content.UID, func(m *memory) { m.absent = true })
		return nil
	case err != nil:
		return l.report(ctx, s.content, doReportCheck, failure{checkError(s.content, err), err})
	}
	l.remember(s.content.UID, func(m *memory) { m.answer = a })
	return nil
}

// writeAnswer writes the status. A failed write is repeated without another call.
func (l *loop) writeAnswer(ctx context.Context, s state, step step) error {
	c, a := s.content, step.answer
	if c.isNew() {
		release, free := l.handles.TryExclusive(a.handle)
		if !free {
			return fmt.Errorf("the driver returned the %s %q for two objects at once", c.noun, a.handle)
		}
		defer release()
		if l.other(c, a.handle) != nil {
			return nil // written since: decide again
		}
	}
	if len(step.status) > 0 {
		err := l.patchStatus(ctx, c, step.status)
		if l.objects.Outdated(c, err) {
			return nil // decide again
		}
		if err != nil {
			err = fmt.Errorf("error updating status for volume %s content %s: snapshot controller failed to update %s on API server: %w",
				c.noun, c.Name, c.Name, err)
			switch {
			case kube.IsUnstorable(err):
				return l.askAgain(ctx, c, err)
			case kube.IsRefused(err):
				reason, _ := c.failureWords(c.isNew())
				l.eventOnce(c, "status", warning, reason, err.Error())
			}
			return err
		}
	}
	if !l.exists(c) {
		return nil // the answer was not written
	}
	event := intent.Event(0) // of a check without effects
	if s.call.State == intent.Answered {
		event = intent.Settle
	}
	if err := l.happened(c.UID, event, func(m *memory) { m.written(a, s.now, l.c.cfg) }); err != nil {
		return err
	}
	if c.isNew() {
		klog.FromContext(ctx).Info("Snapshot created", "snapshotHandle", a.handle, "readyToUse", a.ready)
	} else if a.ready {
		klog.FromContext(ctx).Info("Snapshot is ready to use", "snapshotHandle", a.handle)
	}
	if a.problem != nil {
		return l.report(ctx, c, doReportCheck, a.problem)
	}
	return nil
}
