// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package intent

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"strings"
	"testing"
)

// inputs yields every input of [Next].
func inputs() iter.Seq2[Policy, Facts] {
	return func(yield func(Policy, Facts) bool) {
		bit := func(n, i int) bool { return n>>i&1 == 1 }
		for n := range 1 << 9 {
			for _, when := range []When{Never, OnUnknown, BeforeCall} {
				for _, record := range []Recorded{None, Own, Other} {
					p := Policy{Record: when, AtOnce: bit(n, 0), Renew: bit(n, 1)}
					f := Facts{
						Record: record, Refused: bit(n, 2), Writable: bit(n, 3), Wanted: bit(n, 4), Ready: bit(n, 5),
						Stale: bit(n, 6), Failed: bit(n, 7), Inherited: bit(n, 8),
					}
					if !yield(p, f) {
						return
					}
				}
			}
		}
	}
}

// TestNext checks what the package promises, for every input.
func TestNext(t *testing.T) {
	applied := map[int]bool{}
	for p, f := range inputs() {
		for _, s := range all {
			step := Next(p, s, f)
			check := func(name string, holds bool) {
				if !holds {
					t.Errorf("%s: %+v in %s with %+v: %s", name, p, s, f, step)
				}
			}
			first := step == DoCall && s == Planned
			check("the first call is recorded before it is sent", !first || p.Record != BeforeCall || f.Record == Own)
			check("the first call is wanted", !first || f.Wanted)
			left := s == Unknown && p.Renew && f.Inherited && f.Record == None && !f.Writable
			check("a call in progress is not dropped, unless an earlier process has sent it and its record cannot be renewed",
				!(step == DoAbandon || step == DoRole || step == DoResume) || !s.MayHaveEffect() || step == DoAbandon && left)
			check("a call of an earlier process is not repeated without a record", !left || step == DoAbandon)
			check("a role that wants a call gets one, or what comes before it",
				!slices.Contains([]Step{DoRole, DoResume, DoUnrecord}, NextOfCall(p, s, f)))
			check("a refused record is not tried again before a result", !(step == DoRecord && f.Refused) || s == Planned)
			check("the driver is called with all inputs, from a cache that lacks nothing",
				step != DoCall || f.Ready && !f.Stale && !f.Failed)
			check("a failure ends the sync",
				!f.Failed || !s.InProgress() || slices.Contains([]Step{DoBackOff, DoRecord, DoAbandon}, step))
			check("a record is removed after the result", step != DoUnrecord || !s.InProgress())
			check("without a record, none is written", step != DoRecord || p.Record != Never || p.Renew && f.Record == Other)
			check("an effect is undone only after the role has rejected it", step != DoUndo || s == Undoing)
			check("the record of an earlier process is resumed from the API server's state",
				step != DoResume || f.Record == Other && !f.Stale && !f.Failed)
			for i, r := range rules {
				if slices.Contains(r.states, s) && (r.when == nil || r.when(p, f)) {
					applied[i] = true
					break
				}
			}
		}
	}
	for i, r := range rules {
		if !applied[i] {
			t.Errorf("rule %q never applies", r.name)
		}
	}
}

// TestCallsEnd takes steps until a call is settled and has no record, from every state. Driver and API server answer.
func TestCallsEnd(t *testing.T) {
	for p, f := range inputs() {
		for _, s := range all {
			state, facts := s, f
			facts.Writable = f.Writable || p.Record == BeforeCall // else a call that has to be recorded first waits
			var taken []Step
			for range 15 {
				step := Next(p, state, facts)
				taken = append(taken, step)
				event := Event(0)
				switch step {
				case DoUnrecord:
					event, facts.Record = Reset, None
				case DoBackOff:
					facts.Failed = false
				case DoConfirm:
					facts.Stale = false
				case DoResume:
					event = Resume
				case DoAbandon:
					event = Settle
				case DoRecord:
					facts.Record = Own
				case DoWrite, DoUndo:
					event = Settle
					if facts.Record == Other { // that of a call with a result
						facts.Record = Own
					}
				case DoPrepare:
					facts.Ready = true
				case DoCall:
					event = Answer
					if state == Planned {
						state = Sent
					}
				}
				if event != 0 {
					next, err := state.after(event)
					if err != nil {
						t.Fatalf("%+v in %s with %+v: %v: %v", p, s, f, taken, err)
					}
					state = next
				}
			}
			if last := taken[len(taken)-1]; last != DoRole {
				t.Fatalf("%+v in %s with %+v does not end: %v", p, s, f, taken)
			}
		}
	}
}

// TestDrawing compares the drawing in docs/architecture.md with the events.
func TestDrawing(t *testing.T) {
	page, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, drawing, _ := strings.Cut(string(page), "stateDiagram-v2\n")
	drawing, _, _ = strings.Cut(drawing, "```")
	want := "    [*] --> Idle\n"
	for _, from := range all {
		for _, to := range all {
			var names []string
			for e := Plan; e <= Reset; e++ {
				if next, err := from.after(e); err == nil && next == to && from != to {
					names = append(names, e.String())
				}
			}
			if names != nil {
				want += fmt.Sprintf("    %s --> %s: %s\n", from, to, strings.Join(names, ", "))
			}
		}
	}
	if drawing != want {
		t.Errorf("docs/architecture.md draws\n%s\nwant\n%s", drawing, want)
	}
}

// TestLedger takes an entry through its life.
func TestLedger(t *testing.T) {
	lost := errors.New("the Lease was lost")
	var refuse error
	l := NewLedger[string, int](func(context.Context) error { return refuse })
	changes := 0
	l.OnChange(func(_ string, before, after Entry[int]) {
		if before != after {
			changes++
		}
	})
	set := func(n int) func(*int) { return func(p *int) { *p = n } }
	apply := func(e Event, args string, payload int) func() error {
		return func() error {
			_, _, err := l.Apply("a", Change[int]{e, args, set(payload)})
			return err
		}
	}
	send := func(args string) func() error { return func() error { return l.Send(t.Context(), "a", args, true) } }
	sendUnrecorded := func(args string) func() error { return func() error { return l.Send(t.Context(), "a", args, false) } }
	for i, tt := range []struct {
		do   func() error
		fail error
		want Entry[int]
		lost error
	}{
		{do: apply(Refuse, "", 0), want: Entry[int]{Refused: true}},
		{do: send("x"), fail: ErrBug, want: Entry[int]{Refused: true}},
		{do: apply(Answer, "", 1), fail: ErrBug, want: Entry[int]{Refused: true}},
		{do: apply(Plan, "w", 1), want: Entry[int]{State: Planned, Args: "w", Payload: 1}},
		{do: apply(Replan, "x", 2), want: Entry[int]{State: Planned, Args: "x", Payload: 2}},
		{do: apply(Refuse, "y", 3), want: Entry[int]{State: Planned, Args: "x", Refused: true, Payload: 3}},
		{do: send("y"), fail: ErrBug, want: Entry[int]{State: Planned, Args: "x", Refused: true, Payload: 3}},
		{do: sendUnrecorded("x"), fail: ErrBug, want: Entry[int]{State: Planned, Args: "x", Refused: true, Payload: 3}},
		{do: send("x"), lost: lost, fail: lost, want: Entry[int]{State: Planned, Args: "x", Refused: true, Payload: 3}},
		{do: send("x"), want: Entry[int]{State: Sent, Args: "x", Refused: true, Payload: 3}},
		{do: apply(Plan, "y", 0), fail: ErrBug, want: Entry[int]{State: Sent, Args: "x", Refused: true, Payload: 3}},
		{do: apply(Replan, "y", 0), fail: ErrBug, want: Entry[int]{State: Sent, Args: "x", Refused: true, Payload: 3}},
		{do: apply(Lose, "y", 4), want: Entry[int]{State: Unknown, Args: "x", Payload: 4}},
		{do: apply(0, "y", 5), want: Entry[int]{State: Unknown, Args: "x", Payload: 5}},
		{do: sendUnrecorded("x"), want: Entry[int]{State: Unknown, Args: "x", Payload: 5}},
		{do: apply(Answer, "y", 5), want: Entry[int]{State: Answered, Args: "x", Payload: 5}},
		{do: apply(Settle, "y", 6), want: Entry[int]{State: Settled, Args: "x", Payload: 6}},
		{do: apply(Resume, "z", 6), want: Entry[int]{State: Unknown, Args: "z", Inherited: true, Payload: 6}},
		{do: apply(Replan, "y", 0), fail: ErrBug, want: Entry[int]{State: Unknown, Args: "z", Inherited: true, Payload: 6}},
		{do: apply(Reject, "", 6), want: Entry[int]{State: Undoing, Args: "z", Inherited: true, Payload: 6}},
		{do: send("y"), fail: ErrBug, want: Entry[int]{State: Undoing, Args: "z", Inherited: true, Payload: 6}},
		{do: send("z"), want: Entry[int]{State: Undoing, Args: "z", Payload: 6}},
	} {
		refuse = tt.lost
		if err := tt.do(); !errors.Is(err, tt.fail) {
			t.Errorf("%d: %v", i, err)
		}
		if got := l.Get("a"); got != tt.want {
			t.Errorf("%d: %+v, want %+v", i, got, tt.want)
		}
	}
	if kept := l.Forget("a"); !kept {
		t.Error("an entry in progress is forgotten")
	}
	if !l.Update("a", func(s State, p *int) { *p = int(s) }) || l.Update("b", func(State, *int) {}) {
		t.Error("only an entry that exists is updated")
	}
	if _, _, err := l.Apply("a", Change[int]{Event: Settle}); err != nil || l.Forget("a") || changes != 15 {
		t.Errorf("%v, %d changes", err, changes)
	}
	_ = apply(Plan, "x", 7)()
	if e := l.Take("a"); e.State != Planned || e.Payload != 7 {
		t.Errorf("took %+v", e)
	}
	for k, e := range l.All() {
		t.Errorf("%s is left: %+v", k, e)
	}
}
