// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"

	"github.com/storage-controller/storage-controller/internal/intent"
)

// decideCheck handles a content whose snapshot is not ready.
func (d driver) decideCheck(s state) step {
	c := s.content
	last := unwritten(s.call)
	switch {
	case last != nil:
		return d.decideWrite(s, *last, cannotCheck)
	case c.has(c.creating):
		return step{action: doEndCreation, reason: "Created"}
	case s.now.Before(s.call.Payload.nextCheck):
		return step{reason: "NotReady", next: s.call.Payload.nextCheck}
	}
	replays := c.dynamic() && !c.member()
	if !replays && !c.group && !d.listSnapshots && !d.getSnapshot {
		return d.decideUnchecked(s)
	}
	secret, err := d.checkSecret(c, s.class)
	if err != nil {
		return cannotCheck(err)
	}
	if secret != nil && !s.reads.secret {
		return step{action: doReadSecret, reason: "SecretNeeded", secret: secret, report: doReportCheck}
	}
	if !replays {
		return step{action: doCheck, reason: "NotReady"}
	}
	request, err := d.createRequest(c, s.class, s.call)
	if err != nil {
		return cannotCheck(err)
	}
	return s.decideCall(step{reason: "NotReady", request: request}, intent.Policy{}, intent.None) // the record remains
}

func cannotCheck(err error) step { return step{action: doReportCheck, reason: "CannotCheck", err: err} }

// namedHandle returns the handle of the snapshot that c names, in its source or status.
func (c *content) namedHandle() string {
	if c.preProvisioned() {
		return c.handle
	}
	return c.known().handle
}

// decideUnchecked handles a content whose driver can report no state of existing snapshots. A
// pre-provisioned snapshot counts as ready, and a member when its group is ready.
func (d driver) decideUnchecked(s state) step {
	c := s.content
	if c.member() && s.groupReady == groupNotReady {
		return step{reason: "GroupNotReady"}
	}
	return d.decideWrite(s, answer{handle: c.namedHandle(), ready: true}, cannotCheck)
}

// decideWrite returns the step that writes last, an answer of the driver, or fail if it contradicts c.
func (d driver) decideWrite(s state, last answer, fail func(error) step) step {
	a := s.content.withProblem(last)
	change, err := s.content.change(a, s.now)
	if err == nil && s.other != nil && s.content.isNew() {
		err = fmt.Errorf("the driver returned the %s %q of %s %q. Check both at the storage system",
			s.content.noun, a.handle, s.other.kind.name, s.other.Name)
	}
	if err != nil {
		return fail(unusable{err})
	}
	return step{action: doWriteAnswer, reason: "Answered", answer: &a, status: change}
}

// unusable is the error for a response that contradicts the status of this or another content, or that the API server cannot store. It
// is not written to the status, which stays valid, and the driver is asked again.
type unusable struct{ error }

func (e unusable) Unwrap() error { return e.error }
