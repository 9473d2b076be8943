// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
)

// decideWrite returns the step that writes last, an answer of the driver, or asks again if it contradicts c or another content.
func (s state) decideWrite(last answer) step {
	a := s.content.withProblem(last)
	change, err := s.content.change(a, s.now)
	if err == nil && s.other != nil && s.content.isNew() {
		err = fmt.Errorf("the driver returned the %s %q of %s %q. Check both at the storage system",
			s.content.noun, a.handle, s.other.kind.name, s.other.Name)
	}
	if err != nil {
		return step{action: doAskAgain, reason: "Contradiction", err: err}
	}
	return step{action: doWriteAnswer, reason: "Answered", answer: &a, status: change}
}

// withProblem returns a with a problem if it lacks snapshots of volumes, or in the list of the group. The group is not ready then.
func (c *content) withProblem(a answer) answer {
	if c.group && c.dynamic() && a.problem == nil && len(a.snapshots) < len(c.volumes) { // drivers may write IDs of volumes differently
		a.ready = false
		a.problem = fmt.Errorf("the driver returned a group with %d snapshots of %d volumes. Check it at the storage system",
			len(a.snapshots), len(c.volumes))
	}
	var missing []string
	for _, s := range c.known().snapshots {
		if indexOf(a.snapshots, s.SnapshotHandle) < 0 {
			missing = append(missing, s.SnapshotHandle)
		}
	}
	if c.dynamic() && missing != nil {
		a.ready = false
		a.problem = fmt.Errorf("the driver returned the group without its snapshots %q. Check them at the storage system", missing)
	}
	return a
}

// askAgain drops a response that contradicts the status of this or another content, or that the API server cannot store, and sends an
// event. The status stays valid, and does not get the error. If the response is that of a CreateSnapshot, the driver may also have another
// snapshot, for which a deletion asks it again.
func (l *loop) askAgain(ctx context.Context, c *content, err error) error {
	if ctx.Err() != nil {
		return err
	}
	l.remember(c.UID, func(m *memory) { m.answer = nil })
	if err := l.happened(c.UID, intent.Lose, nil); err != nil {
		return err
	}
	reason, prefix := c.failureWords(c.isNew())
	l.event(c, warning, reason, prefix+err.Error())
	return err
}

// endedBy reports whether err, with which a create call has failed, ends the wait for its outcome, and why the snapshot may
// exist then. before is the entry before the call. Once a call of this process was indeterminate, only an error that excludes
// the snapshot ends the wait, or one that would block a deletion for long: a lack of space, or a source that does not exist any
// more. Whether a call of an earlier process was, is unknown: one repetition ends the wait.
func (c *content) endedBy(before entry, err error, name string) (ended bool, remains string) {
	final, why := csiclient.OutcomeOf(err) == csiclient.Final, ""
	code := status.Code(err)
	earlier := c.indeterminate(before)
	switch {
	case final && (!earlier || csiclient.ExcludesEarlier(err)):
		return true, ""
	case c.terminating() && c.forced(before):
		why = fmt.Sprintf("annotation %s was removed", c.creating)
	case final && (before.Payload.inherited || code == codes.ResourceExhausted || code == codes.NotFound):
		why = "an earlier call may have succeeded"
	default:
		return false, ""
	}
	return true, fmt.Sprintf("%s is indeterminate (%v), and %s. Check the storage system for the %s %q, which may remain",
		c.create, err, why, c.noun, name)
}
