// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"flag"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	scopes      = flag.String("scopes", "", "part of the names of the scopes to explore")
	scopeFrom   = flag.String("scope-from", "8", "numbers of events before those whose orders are explored")
	scopeEvents = flag.Int("scope-events", 2, "events whose orders are explored")
	scopeFaults = flag.Int("scope-faults", 1, "faults among them")
	scopeTime   = flag.Duration("scope-time", 0, "time of the processor for all scopes; 0: until all histories were run")
)

// TestSmallScopes explores all orders of some events of small scopes.
func TestSmallScopes(t *testing.T) {
	type exploration struct {
		Scope
		from int
	}
	var all []exploration
	for _, text := range strings.Fields(*scopeFrom) {
		from, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, scope := range Scopes {
			if strings.Contains(scope.Name, *scopes) {
				all = append(all, exploration{scope, from})
			}
		}
	}
	begin := processorTime()
	t.Log("| scope | events before | events | faults | events that were explored, by faults | histories | new ends | states | " +
		"branches | violations | seconds |")
	for i, x := range all {
		bound := Bound{From: x.from, Events: *scopeEvents, Faults: *scopeFaults, First: *stop}
		if *scopeTime > 0 {
			bound.Time = (*scopeTime - (processorTime() - begin)) / time.Duration(len(all)-i)
		}
		e := Explore(t, x.Scope, bound)
		t.Logf("| %s | %d | %d | %d | %v", x.Name, bound.From, bound.Events, bound.Faults, e)
		if e.Violations > 0 {
			t.Errorf("scope %s: after %d states, %d histories: %s\n%s", x.Name, e.FirstAfter, e.FirstHistory, e.First.Violation,
				strings.Join(e.First.Lines, "\n"))
		}
		if e.Violations > 0 && *stop {
			return
		}
		if e.Rested == 0 || float64(e.Diverged) > maxDiverged*float64(e.Histories) {
			t.Errorf("scope %s: %d of %d histories came to rest, and %d diverged", x.Name, e.Rested, e.Histories, e.Diverged)
		}
	}
}

// TestSmallScopesFind: the exploration finds what processes do that protect claims only after an unknown outcome.
func TestSmallScopesFind(t *testing.T) {
	scope := Scopes[0]
	scope.protection = "on-retry"
	e := Explore(t, scope, Bound{Events: 12, First: true})
	if e.Violations == 0 || !strings.Contains(e.First.Violation, "its claim is not protected") {
		t.Errorf("after %d states: violation %q\n%s", e.States, e.First.Violation, strings.Join(e.First.Lines, "\n"))
	}
}
