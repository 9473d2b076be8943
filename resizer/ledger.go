// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"time"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// operation is what a key of the queue stands for.
type operation int

const (
	expand operation = iota
	modify
	operations // number of operations
)

// String returns the name of o in logs, metrics and traces.
func (o operation) String() string { return [...]string{"expand", "modify"}[o] }

// other returns the other operation.
func (o operation) other() operation { return 1 - o }

type (
	// call is the call of an operation on a claim. Its arguments are the key of its target.
	call = intent.Entry[operationMemory]
	// change is what a step changes of a call.
	change = intent.Change[operationMemory]
)

// operationMemory holds what this process knows about an operation on a claim and the API does not record. It ends with the term of
// the Lease. Targets are sizes in bytes or names of VolumeAttributesClasses.
type operationMemory struct {
	// stage is the reason of the last decision, for metrics, /statusz and events of other objects.
	stage string
	// target is the target of the call.
	target target
	// intended is the target that this process has recorded last.
	intended string
	// answer is the response that is not written to the API yet: a success in the state Answered, else an error.
	answer *answer
	// recorded is the error that was last written to the conditions.
	recorded failure
	// slow delays the retry of an infeasible target.
	slow delay
	// refused is the refused write for which an event was last sent.
	refused failure
	// began is when this process wrote the intent.
	began time.Time

	// Of expansions only.
	inUseError bool  // the last response was FailedPrecondition
	waiting    bool  // for the end of the use of the volume; the event was sent
	nodeReset  delay // of another start of the expansion to this request, which is infeasible on the node

	// missingClass is the VolumeAttributesClass for which a modification waits.
	missingClass string
}

// failure is an error in the conditions of a claim, or the refusal of a write.
type failure struct {
	target, code, text string
	at                 time.Time
}

// covers reports whether next repeats f, or differs in its text only and follows too soon to be reported.
func (f failure) covers(next failure) bool {
	return f.target == next.target && f.code == next.code && (f.text == next.text || kube.ReportedRecently(f.at, next.at))
}

// newLedger returns the memory of the operations of a term.
func newLedger() *intent.Ledger[key, operationMemory] {
	return intent.NewLedger[key, operationMemory](election.MayCall)
}

// inStage returns the keys whose last decision had this reason.
func (t *term) inStage(stage string) (keys []key) {
	for k, c := range t.ledger.All() {
		if c.Payload.stage == stage {
			keys = append(keys, k)
		}
	}
	return keys
}

// release forgets the operation of k if it has nothing to remember, or if its claim is deleted and it has no result to write.
// Call it with the lock of the claim.
func (t *term) release(k key, deleted bool) {
	c := t.ledger.Get(k)
	c.Payload.stage = ""
	if deleted && c.State != intent.Answered {
		_, _, _ = t.ledger.Apply(k, change{Event: intent.Settle})
	}
	if deleted || c.Payload == (operationMemory{}) {
		t.ledger.Forget(k)
	}
}
