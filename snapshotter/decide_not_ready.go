// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import "github.com/storage-controller/storage-controller/internal/intent"

// decideNotReady handles a content whose snapshot is not ready.
func (d driver) decideNotReady(s state) step {
	c := s.content
	last := s.call.Payload.answer
	switch {
	case last != nil:
		return s.decideWrite(*last)
	case c.has(c.creating):
		return step{action: doEndCreation, reason: "Created"}
	case s.now.Before(s.call.Payload.nextCheck):
		return step{reason: "NotReady", next: s.call.Payload.nextCheck}
	}
	replays := c.dynamic() && !c.member()
	if !replays && !c.group && !d.listSnapshots && !d.getSnapshot {
		return s.decideUnchecked()
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
	return s.decideCall(step{reason: "NotReady", request: request}, intent.Never) // the record remains
}

func cannotCheck(err error) step { return step{action: doReportCheck, reason: "CannotCheck", err: err} }

// decideUnchecked handles a content whose driver can report no state of existing snapshots. A
// pre-provisioned snapshot counts as ready, and a member when its group is ready.
func (s state) decideUnchecked() step {
	c := s.content
	if c.member() && s.groupReady == groupNotReady {
		return step{reason: "GroupNotReady"}
	}
	return s.decideWrite(answer{handle: c.namedHandle(), ready: true})
}
