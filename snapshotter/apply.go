// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// apply executes step and stores in r what it has read. After an error the content is retried with
// back-off.
func (l *loop[T, C]) apply(ctx context.Context, obj T, s state, step step, r *reads) error {
	c := s.content
	switch step.action {
	case doReportCreation, doReportCheck, doReportDeletion:
		return l.report(ctx, obj, step.action, step.err, step.cause)
	case doSettle:
		l.memories.update(c.uid(), neverCalled)
		return nil
	case doAnnounce:
		l.announce(c, step.cause, step.err)
		return nil
	case doReadSecret:
		return l.readSecret(ctx, obj, step, r)
	case doReadContent:
		return l.readContent(ctx, obj, step, r)
	case doReadClass:
		return l.readNamedClass(ctx, obj, step, r)
	case doRecordRequest:
		return l.record(ctx, obj, step)
	case doCreate:
		*r = reads{} // the content may change during the call, and its deletion have another Secret
		return l.create(ctx, obj, s, step)
	case doCheck:
		*r = reads{}
		return l.check(ctx, obj, s)
	case doWriteAnswer:
		return l.writeAnswer(ctx, obj, s, step)
	case doEndCreation:
		_, err := l.patch(ctx, obj, kube.MetadataPatch{RemoveAnnotations: []string{c.creating}, Tests: recordTest(c)})
		if l.outdated(obj, err) {
			return nil // decide again
		}
		return err
	case doReadMembers:
		return l.readMembers(ctx, obj, s, step, r)
	case doDelete:
		return l.delete(ctx, obj, s, step)
	case doClearStatus:
		if err := l.patchStatus(ctx, obj, step.status); err != nil {
			return l.report(ctx, obj, doReportDeletion, fmt.Errorf("Failed to clear content status: %w", err), cause{})
		}
		return nil
	case doRemoveFinalizer:
		return l.removeFinalizer(ctx, obj, step)
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

// readContent reads obj from the API server.
func (l *loop[T, C]) readContent(ctx context.Context, obj T, step step, r *reads) error {
	c := l.content(obj)
	read := election.Now()
	_, _, err := l.objects.Refetch(ctx, l.writer, obj)
	switch {
	case err == nil:
		r.read = read
		return nil
	case step.report == doReportDeletion:
		return l.report(ctx, obj, step.report, deletionError(c, fmt.Errorf("reading the content: %w", err)), cause{})
	}
	return fmt.Errorf("reading %s %q from the API server: %w", c.kind.name, c.meta.Name, err)
}

// readNamedClass reads the class of obj from the API server.
func (l *loop[T, C]) readNamedClass(ctx context.Context, obj T, step step, r *reads) error {
	c := l.content(obj)
	class, err := l.classes.Get(ctx, c.class, metav1.GetOptions{})
	switch {
	case err == nil:
		r.class = l.class(class)
	case !kube.IsNotFound(err):
		err = deletionError(c, fmt.Errorf("reading %s %q: %w", c.classKind, c.class, err))
		return l.report(ctx, obj, step.report, err, cause{})
	}
	r.classRead = true
	return nil
}

func (l *loop[T, C]) readSecret(ctx context.Context, obj T, step step, r *reads) error {
	c := l.content(obj)
	values, err := kube.ReadSecret(ctx, l.c.deps.Client, step.secret)
	if err == nil {
		r.secret, r.secrets = true, values
		return nil
	}
	if step.report == doReportDeletion {
		// A driver without credentials may return OK for a snapshot that it cannot see.
		waitsFor, m := cause{}, l.memories.get(c.uid())
		switch missing := kube.IsNotFound(err); {
		case missing && c.indeterminate(m) && m.unrecorded(c): // CreateSnapshot was probably never called
			l.memories.update(c.uid(), neverCalled)
			return nil
		case missing:
			waitsFor = cause{blockedSecret, fmt.Sprintf("Secret %s/%s", step.secret.Namespace, step.secret.Name)}
			err = fmt.Errorf("%w. Create the Secret, or remove the annotations %s and %s to delete without credentials",
				err, c.secretName, c.secretNamespace)
		}
		return l.report(ctx, obj, step.report, credentials(c, err), waitsFor)
	}
	err = fmt.Errorf("cannot get credentials for %s content %q: %w", c.noun, c.meta.Name, err)
	if step.report == doReportCheck {
		return l.report(ctx, obj, step.report, checkError(c, err), cause{})
	}
	return l.report(ctx, obj, step.report, inputsError(c, err.Error()), cause{})
}

// record writes the finalizer and the request before the first call.
func (l *loop[T, C]) record(ctx context.Context, obj T, step step) error {
	if step.again {
		step.change.SetAnnotations = map[string]string{AnnRequest: step.request.encodeAgain()}
	}
	stored, err := l.patch(ctx, obj, step.change)
	newest, exists := l.objects.Get(obj.GetName())
	exists = exists && newest.GetUID() == obj.GetUID()
	switch {
	case err == nil && (!exists || step.change.AppliedTo(stored)):
		l.memories.update(obj.GetUID(), func(m *memory) {
			if step.again {
				m.record = step.change.SetAnnotations[AnnRequest]
			} else if m.unrecorded(l.content(obj)) {
				neverCalled(m)
			}
		})
		return nil
	case l.outdated(obj, err):
		return nil // decide again
	case err == nil:
		err = kube.ErrNotStored
	case exists && apierrors.IsInvalid(err) && l.content(newest).terminating() && !l.content(obj).terminating():
		return nil // it is being deleted: decide again
	}
	if step.again && (errors.Is(err, kube.ErrNotStored) || kube.IsRefused(err) || apierrors.IsInvalid(err)) {
		l.memories.update(obj.GetUID(), func(m *memory) { m.recordRefused = true })
	}
	report := doReportCreation
	c := l.content(obj)
	if c.terminating() && c.released() {
		report = doReportDeletion
	}
	return l.report(ctx, obj, report, fmt.Errorf("failed to add %sBeingCreated annotation on the %s %s: %w",
		strings.TrimSuffix(c.kind.name, "Content"), c.object, c.meta.Name, err), cause{})
}

// create calls CreateSnapshot, for a new snapshot, to check one that is not ready, or to learn the
// outcome of an earlier call.
func (l *loop[T, C]) create(ctx context.Context, obj T, s state, step step) error {
	c := s.content
	isNew := c.known().handle == ""
	release, err := l.c.shareVolumes(ctx, c)
	if err != nil {
		return err
	}
	defer release()
	if err := election.MayCallNow(ctx, election.Moment{}); err != nil {
		return err
	}
	l.memories.update(c.uid(), func(m *memory) { m.request, m.outcome = step.request, indeterminate }) // also if the call panics
	if c.terminating() && c.released() {
		l.replays.begin(c, step.request)
		if newest, ok := l.objects.Get(c.meta.Name); !ok || newest.GetUID() != c.uid() { // its deletion was handled before
			l.replays.end(c.uid())
			return nil
		}
	}
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	a, err := l.calls.create(call, c, step.request, s.secrets)
	if err == nil {
		l.memories.update(c.uid(), func(m *memory) { m.outcome, m.answer, m.remains = definite, a, "" })
		l.replays.answered(c.uid(), a)
		return nil
	}
	ended, remains := s.memory.endedBy(c, err, step.request.Name)
	if ended {
		l.replays.end(c.uid())
	}
	if ended && ctx.Err() == nil {
		l.memories.update(c.uid(), func(m *memory) {
			m.outcome = definite
			if remains != "" || csiclient.ExcludesEarlier(err) {
				m.remains = remains
			}
		})
	}
	switch {
	case c.terminating() && c.released():
		return l.replayFailed(ctx, c, err, ended, remains)
	case isNew:
		return l.report(ctx, obj, doReportCreation, failure{creationError(c, err), err}, cause{})
	}
	return l.report(ctx, obj, doReportCheck, failure{creationError(c, err), err}, cause{})
}

// check asks the driver for the state of a pre-provisioned snapshot or of a member.
func (l *loop[T, C]) check(ctx context.Context, obj T, s state) error {
	call, cancel := context.WithTimeout(ctx, l.c.cfg.Timeout)
	defer cancel()
	a, err := l.calls.check(call, s.content, s.secrets)
	switch {
	case err != nil && s.content.terminating() && s.memory.awaitsCheck(s.content) && isAbsent(err):
		l.memories.update(s.content.uid(), func(m *memory) { m.absent = true })
		return nil
	case err != nil:
		return l.report(ctx, obj, doReportCheck, failure{checkError(s.content, err), err}, cause{})
	}
	l.memories.update(s.content.uid(), func(m *memory) { m.answer = a })
	return nil
}

// writeAnswer writes the status. A failed write is repeated without another call.
func (l *loop[T, C]) writeAnswer(ctx context.Context, obj T, s state, step step) error {
	c, a := s.content, step.answer
	if c.dynamic() && c.known().handle == "" {
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
		err := l.patchStatus(ctx, obj, step.status)
		if err != nil && l.outdated(obj, err) {
			return nil // decide again
		}
		if err != nil {
			err = fmt.Errorf("error updating status for volume %s content %s: snapshot controller failed to update %s on API server: %w",
				c.noun, c.meta.Name, c.meta.Name, err)
			report, reason := doReportCheck, c.checked
			if c.dynamic() && c.known().handle == "" {
				report, reason = doReportCreation, c.created
			}
			switch {
			case kube.IsUnstorable(err):
				return l.report(ctx, obj, report, unusable{err}, cause{})
			case kube.IsRefused(err):
				l.announceWarning(c, "status", reason, err.Error())
			}
			return err
		}
	}
	if newest, ok := l.objects.Get(c.meta.Name); !ok || newest.GetUID() != c.uid() {
		return nil // deleted: the answer was not written
	}
	l.memories.update(c.uid(), func(m *memory) { m.written(a, s.now, l.c.cfg) })
	if c.known().handle == "" && c.dynamic() {
		klog.FromContext(ctx).Info("Snapshot created", "snapshotHandle", a.handle, "readyToUse", a.ready)
	} else if a.ready {
		klog.FromContext(ctx).Info("Snapshot is ready to use", "snapshotHandle", a.handle)
	}
	if a.problem != nil {
		return l.report(ctx, obj, doReportCheck, a.problem, cause{})
	}
	return nil
}

// outdated reports whether a write has failed because another writer has changed obj. The newest version is known then.
func (l *loop[T, C]) outdated(obj T, err error) bool {
	newest, ok := l.objects.Get(obj.GetName())
	return ok && (kube.IsPatchTestFailed(err) || apierrors.IsConflict(err)) && newest.GetUID() == obj.GetUID() &&
		newest.GetResourceVersion() != obj.GetResourceVersion()
}

// patch returns the object as stored, or obj if it does not exist.
func (l *loop[T, C]) patch(ctx context.Context, obj T, change kube.MetadataPatch) (T, error) {
	return l.objects.Patch(ctx, l.writer, obj, change)
}
