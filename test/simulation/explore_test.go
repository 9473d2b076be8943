// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"flag"
	"strings"
	"testing"
	"time"
)

var (
	scopes      = flag.String("scopes", "", "part of the names of the scopes to explore")
	scopeEvents = flag.Int("scope-events", 4, "events whose orders are explored")
	scopeFaults = flag.Int("scope-faults", 1, "faults among them")
	scopeTime   = flag.Duration("scope-time", 0, "time of the processor for all scopes; 0: until all histories were run")
)

// TestSmallScopes explores all orders of the first events of small scopes.
func TestSmallScopes(t *testing.T) {
	var chosen []Scope
	for _, scope := range Scopes {
		if strings.Contains(scope.Name, *scopes) {
			chosen = append(chosen, scope)
		}
	}
	begin := processorTime()
	for i, scope := range chosen {
		bound := Bound{Events: *scopeEvents, Faults: *scopeFaults, First: *stop}
		if *scopeTime > 0 {
			bound.Time = (*scopeTime - (processorTime() - begin)) / time.Duration(len(chosen)-i)
		}
		e := Explore(t, scope, bound)
		t.Logf("| %s | %d | %d | %v", scope.Name, bound.Events, bound.Faults, e)
		if e.Violations > 0 {
			t.Errorf("scope %s: after %d states, %d histories: %s\n%s", scope.Name, e.FirstAfter, e.FirstHistory, e.First.Violation,
				strings.Join(e.First.Lines, "\n"))
		}
		if e.Violations > 0 && *stop {
			return
		}
		if e.Rested == 0 || float64(e.Diverged) > maxDiverged*float64(e.Histories) {
			t.Errorf("scope %s: %d of %d histories came to rest, and %d diverged", scope.Name, e.Rested, e.Histories, e.Diverged)
		}
	}
}

// TestSmallScopesFind: the exploration finds what processes do that protect claims only after an unknown outcome.
func TestSmallScopesFind(t *testing.T) {
	scope := Scopes[0]
	scope.protection = "on-retry"
	e := Explore(t, scope, Bound{Events: 10, First: true})
	if e.Violations == 0 || !strings.Contains(e.First.Violation, "its claim is not protected") {
		t.Errorf("after %d states: violation %q\n%s", e.States, e.First.Violation, strings.Join(e.First.Lines, "\n"))
	}
}
