// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package intent

import (
	"context"
	"fmt"
	"iter"
	"sync"
)

// Entry is a call and what a role remembers with it.
type Entry[P any] struct {
	State State
	// Args identifies the arguments. [Plan], [Replan] and [Resume] set it.
	Args string
	// Refused: the record could not be written since the last result.
	Refused bool
	// Inherited: an earlier process has sent the call, and this one has not.
	Inherited bool
	// Payload is what the role remembers.
	Payload P
}

// Ledger holds the calls of a term, which is the time from acquiring to losing the Lease. It is safe for use by several goroutines.
// K identifies an object by its UID. Use [NewLedger].
type Ledger[K comparable, P any] struct {
	mayCall func(context.Context) error

	mu      sync.Mutex
	entries map[K]Entry[P]
	changed func(k K, before, after Entry[P])
}

// NewLedger returns an empty ledger. mayCall returns why this process must not call the driver now, or nil.
func NewLedger[K comparable, P any](mayCall func(context.Context) error) *Ledger[K, P] {
	return &Ledger[K, P]{mayCall: mayCall, entries: map[K]Entry[P]{}, changed: func(K, Entry[P], Entry[P]) {}}
}

// OnChange has changed called after each change of an entry, with the lock of the ledger. It must not call the ledger. Call it
// before the first change.
func (l *Ledger[K, P]) OnChange(changed func(k K, before, after Entry[P])) { l.changed = changed }

// Get returns a copy of the entry of k. Without one it is Idle.
func (l *Ledger[K, P]) Get(k K) Entry[P] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[k]
}

// Change is what happens to an entry. The zero value changes nothing.
type Change[P any] struct {
	Event Event    // zero: only the payload changes
	Args  string   // of [Plan], [Replan] and [Resume]
	Set   func(*P) // changes the payload; may be nil
}

// Apply applies c to the entry of k, which it creates if there is none. An illegal event changes nothing and is an error.
func (l *Ledger[K, P]) Apply(k K, c Change[P]) (before, after State, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.entries[k]
	now, err := l.apply(k, old, c)
	return old.State, now.State, err
}

// apply must be called with the lock held. old is the entry of k.
func (l *Ledger[K, P]) apply(k K, old Entry[P], c Change[P]) (now Entry[P], err error) {
	now = old
	if c.Event != 0 {
		now.State, err = old.State.after(c.Event)
		if err != nil {
			return old, fmt.Errorf("call of %v: %w", k, err)
		}
	}
	switch c.Event {
	case Plan, Resume:
		now.Args, now.Refused, now.Inherited = c.Args, false, c.Event == Resume
	case Replan:
		now.Args = c.Args
	case Send:
		now.Inherited = false
	case Lose, Answer, Reject, Settle:
		now.Refused = false
	case Refuse:
		now.Refused = true
	}
	if c.Set != nil {
		c.Set(&now.Payload)
	}
	l.entries[k] = now
	l.changed(k, old, now)
	return now, nil
}

// Send records that a call is sent. Call it directly before the call, after everything that waits: after a panic in the call, the
// outcome is unknown. It fails if this process must not call the driver now, if args are not those of the entry, because a call is
// repeated with equal arguments only, or if this is the first call and recorded is false: the object lacks a record that the call needs,
// or does not want the effect.
func (l *Ledger[K, P]) Send(ctx context.Context, k K, args string, recorded bool) error {
	if err := l.mayCall(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.entries[k]
	if err := Must(old.Args == args, "call of %v: its arguments are not the planned ones", k); err != nil {
		return err
	}
	if err := Must(recorded || old.State != Planned, "call of %v: it is not recorded, or not wanted", k); err != nil {
		return err
	}
	_, err := l.apply(k, old, Change[P]{Event: Send})
	return err
}

// Update changes the payload of the entry of k, if there is one. It reports whether there is.
func (l *Ledger[K, P]) Update(k K, set func(State, *P)) (exists bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old, exists := l.entries[k]
	if !exists {
		return false
	}
	now := old
	set(now.State, &now.Payload)
	l.entries[k] = now
	l.changed(k, old, now)
	return true
}

// Forget drops the entry of k, unless a call is in progress. It reports whether the entry is kept.
func (l *Ledger[K, P]) Forget(k K) (kept bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.entries[k]
	if old.State.InProgress() {
		return true
	}
	delete(l.entries, k)
	l.changed(k, old, Entry[P]{})
	return false
}

// Take drops the entry of k in any state, and returns it.
func (l *Ledger[K, P]) Take(k K) Entry[P] {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.entries[k]
	delete(l.entries, k)
	l.changed(k, old, Entry[P]{})
	return old
}

// All returns the entries, in no particular order. It holds the lock of the ledger: the loop must not call the ledger.
func (l *Ledger[K, P]) All() iter.Seq2[K, Entry[P]] {
	return func(yield func(K, Entry[P]) bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for k, e := range l.entries {
			if !yield(k, e) {
				return
			}
		}
	}
}
