// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package intent

import "slices"

// When is the time at which a role records a call on the object.
type When int

// Times of a record.
const (
	Never      When = iota
	OnUnknown       // once the outcome of a call is unknown
	BeforeCall      // before the first call
)

// Policy is what a role, or a flag, decides about calls.
type Policy struct {
	Record When
	AtOnce bool // an unknown outcome is recorded before anything else
	Renew  bool // the record of an earlier process is replaced before its call is repeated
}

// Recorded is the record that an object has.
type Recorded int

// Records of an object.
const (
	None  Recorded = iota
	Own            // of this call
	Other          // of an earlier process, without a result
)

// Facts is what a sync has read about a call.
type Facts struct {
	Record Recorded
	// Refused and Inherited: see [Entry].
	Refused, Inherited bool
	Writable           bool // the object can get the record now
	Wanted             bool // the object still asks for the effect
	Ready              bool // secrets are read, and nothing else blocks the call
	Stale              bool // the cache may lack writes from before the term
	Failed             bool // an attempt of this sync has failed
}

// Step is what a role does next. Only DoRecord, DoUnrecord and DoWrite change the API; only DoCall and DoUndo call the driver.
type Step int

// Steps of a call.
const (
	DoRole     Step = iota // nothing is in progress: the role plans a call, waits, or forgets the object
	DoUnrecord             // remove the record
	DoBackOff              // end the sync with its failure
	DoConfirm              // read the object from the API server
	DoResume               // prepare the recorded request again: [Resume]
	DoAbandon              // drop a request that this process has not sent: [Settle]
	DoRecord               // write the record. If that fails: an error, or [Refuse]
	DoWrite                // write the result to the API
	DoPrepare              // read what the call needs, or wait
	DoUndo                 // undo the effect
	DoCall                 // [Ledger.Send], then the call
)

// String returns the name of s in docs/architecture.md.
func (s Step) String() string {
	return [...]string{"role", "remove record", "back off", "confirm", "resume", "abandon", "record", "write", "prepare", "undo",
		"call"}[s]
}

// rule leads to a step in its states. A nil condition is always true.
type rule struct {
	name   string
	states []State
	when   func(Policy, Facts) bool
	step   Step
}

var (
	ended = []State{Idle, Settled}
	sent  = []State{Sent, Unknown}
	all   = []State{Idle, Planned, Sent, Unknown, Answered, Undoing, Settled}
)

// rules are what the package promises: the first that applies decides.
var rules = []rule{
	{"remove the record", ended, func(_ Policy, f Facts) bool { return f.Record == Own }, DoUnrecord},
	{"resume later", ended, func(_ Policy, f Facts) bool { return f.Record == Other && f.Failed }, DoBackOff},
	{"confirm a record", ended, func(_ Policy, f Facts) bool { return f.Record == Other && f.Stale }, DoConfirm},
	{"resume", ended, func(_ Policy, f Facts) bool { return f.Record == Other }, DoResume},
	{"nothing in progress", ended, nil, DoRole},
	{"abandon", []State{Planned}, func(p Policy, f Facts) bool {
		return !f.Wanted || f.Record == Other || p.Record == BeforeCall && f.Record == None && !f.Writable
	}, DoAbandon},
	// The earlier process has removed its record after a result, or a user has: a repetition would have no record.
	{"abandon without a record", []State{Unknown}, func(p Policy, f Facts) bool {
		return p.Renew && f.Inherited && f.Record == None && !f.Writable
	}, DoAbandon},
	{"record at once", []State{Sent, Unknown, Undoing}, recordsAtOnce, DoRecord},
	{"record an unwritten result", []State{Answered}, func(p Policy, f Facts) bool { return f.Failed && recordsAtOnce(p, f) }, DoRecord},
	{"back off", all, func(_ Policy, f Facts) bool { return f.Failed }, DoBackOff},
	{"write", []State{Answered}, nil, DoWrite},
	{"prepare", all, func(_ Policy, f Facts) bool { return !f.Ready }, DoPrepare},
	{"undo", []State{Undoing}, nil, DoUndo},
	{"record first", []State{Planned}, func(p Policy, f Facts) bool { return p.Record == BeforeCall && f.Record != Own }, DoRecord},
	{"record again", sent, func(p Policy, f Facts) bool {
		due := p.Record == BeforeCall && f.Record == None || p.Renew && f.Record == Other
		return due && f.Writable && !f.Refused
	}, DoRecord},
	{"confirm", all, func(_ Policy, f Facts) bool { return f.Stale }, DoConfirm},
	{"call", all, nil, DoCall},
}

func recordsAtOnce(p Policy, f Facts) bool {
	return p.AtOnce && p.Record != Never && f.Record == None && f.Writable && !f.Refused
}

// Next returns the next step for a call. It has no side effects, and an answer for every input.
func Next(p Policy, s State, f Facts) Step {
	i := slices.IndexFunc(rules, func(r rule) bool { return slices.Contains(r.states, s) && (r.when == nil || r.when(p, f)) })
	return rules[i].step
}

// NextOfCall is [Next] for a role that wants a call: unless one is in progress, the role plans it with the step that it takes.
func NextOfCall(p Policy, s State, f Facts) Step {
	if !s.InProgress() {
		s = Planned
	}
	return Next(p, s, f)
}
