// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package intent

import (
	"errors"
	"fmt"
)

// State is what this process knows about a call.
type State int

// States of a call.
const (
	Idle     State = iota // no call is known
	Planned               // the arguments are fixed, and nothing was sent
	Sent                  // the first call of this process is running, or has panicked
	Unknown               // a call with these arguments has taken effect, or still may
	Answered              // the effect exists, and the API does not show it yet
	Undoing               // the effect must be undone
	Settled               // no effect exists but what the API shows. The record may remain
)

// String returns the name of s in logs and in docs/architecture.md.
func (s State) String() string {
	return [...]string{"Idle", "Planned", "Sent", "Unknown", "Answered", "Undoing", "Settled"}[s]
}

// InProgress reports whether a call is prepared, or may have an effect that the API does not show.
func (s State) InProgress() bool { return s != Idle && s != Settled }

// MayHaveEffect reports whether a call was sent, and may have an effect that the API does not show.
func (s State) MayHaveEffect() bool { return s.InProgress() && s != Planned }

// Unanswered reports whether a call was sent, and has no definite result.
func (s State) Unanswered() bool { return s == Sent || s == Unknown }

// Event is something that happens to a call. The zero value is none.
type Event int

// Events of a call.
const (
	Plan   Event = iota + 1 // a new request is prepared
	Replan                  // another request replaces it: nothing was sent
	Resume                  // the recorded request of an earlier process is prepared again
	Send                    // directly before the call, or before the one that undoes it
	Lose                    // the outcome is unknown: no definite result, or the effect may not exist any more
	Answer                  // the call was successful, or its result was not written
	Reject                  // the effect exists, and must be undone
	Refuse                  // the record could not be written. In Idle: it was to replace that of an earlier process, before Resume
	Settle                  // a final error; written; undone; abandoned; or known never to be sent
	Reset                   // what was written is deleted, or the record of a settled call is removed
)

// String returns the name of e in logs and in docs/architecture.md.
func (e Event) String() string {
	return [...]string{"", "Plan", "Replan", "Resume", "Send", "Lose", "Answer", "Reject", "Refuse", "Settle", "Reset"}[e]
}

// events lists the states in which an event is legal, and the state that follows.
var events = map[Event]map[State]State{
	Plan:   {Idle: Planned, Settled: Planned},
	Replan: {Planned: Planned},
	Resume: {Idle: Unknown, Settled: Unknown},
	Send:   {Planned: Sent, Sent: Sent, Unknown: Unknown, Answered: Answered, Undoing: Undoing},
	Lose:   {Sent: Unknown, Unknown: Unknown, Answered: Unknown},
	Answer: {Sent: Answered, Unknown: Answered, Answered: Answered},
	Reject: {Sent: Undoing, Unknown: Undoing, Answered: Undoing, Undoing: Undoing},
	Refuse: {Idle: Idle, Planned: Planned, Sent: Sent, Unknown: Unknown, Answered: Answered, Undoing: Undoing},
	Settle: {
		Idle: Settled, Planned: Settled, Sent: Settled, Unknown: Settled, Answered: Settled, Undoing: Settled, Settled: Settled,
	},
	Reset: {Idle: Idle, Settled: Idle},
}

// ErrBug follows a state that no input may lead to. It ends the attempt: what was to follow is not called or written. Loops count and log
// it.
var ErrBug = errors.New("this is a bug of storage-controller. Report it with the log")

// Must returns an error that wraps [ErrBug], with the text of format and args, unless holds. It is for what must be true directly before a
// call or a write that could harm data, whatever was decided.
func Must(holds bool, format string, args ...any) error {
	if holds {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrBug)
}

// after returns the state after e, or an error if e is illegal in s.
func (s State) after(e Event) (State, error) {
	next, legal := events[e][s]
	if err := Must(legal, "illegal event %s in state %s", e, s); err != nil {
		return s, err
	}
	return next, nil
}
