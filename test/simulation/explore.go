// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// Scope is a small history, of which all orders of the first events after a step of a user are explored. Users are named by the
// beginnings of their steps.
type Scope struct {
	Name string
	// users do these steps. Before the last one, everything is at rest.
	users []string
	// meanwhile is done once at any time after the last one, or not at all.
	meanwhile string
	features  cluster.Features
	// protection is the value of --provisioning-protection, by default "always". The invariants expect "always".
	protection string
}

// The steps of users.
const (
	createsClaim    = "user creates claim"
	deletesClaim    = "user deletes claim"
	createsPod      = "user creates a pod"
	deletesPod      = "user deletes the pod"
	expands         = "user requests 2Gi"
	expandsMore     = "user requests 3Gi"
	createsSnapshot = "user creates snapshot"
	deletesSnapshot = "user deletes snapshot"
	retainsVolume   = "user sets the policy of volume"
)

// Scopes are the scopes with one claim, and with its attachment, detachment, expansion, snapshot and deletion.
var Scopes = []Scope{
	{Name: "claim", users: []string{createsClaim}, meanwhile: deletesClaim},
	{Name: "attachment", users: []string{createsClaim, createsPod}, meanwhile: deletesPod},
	{Name: "detachment", users: []string{createsClaim, createsPod, deletesPod}, meanwhile: createsPod},
	{
		Name: "expansion", users: []string{createsClaim, expands}, meanwhile: expandsMore,
		features: cluster.Features{Resize: true},
	},
	{
		Name: "snapshot", users: []string{createsClaim, createsSnapshot}, meanwhile: deletesSnapshot,
		features: cluster.Features{Snapshots: true},
	},
	{Name: "deletion", users: []string{createsClaim, deletesClaim}, meanwhile: retainsVolume},
}

// Bound limits an exploration.
type Bound struct {
	From   int // the number of events before, which have the first order
	Events int // whose orders are explored
	Faults int // among them, at most
	// Time of the processor after which no other history begins. 0: all histories are run.
	Time  time.Duration
	First bool // it ends after the first violation
}

// Exploration is the result of exploring a scope.
type Exploration struct {
	Histories int // that were run
	Rested    int // of them, those that reached a new last state, from which everything came to rest
	States    int
	Branches  int // what can happen in the states
	Diverged  int // steps that led from the same state to another one than before
	// Events is the number of events within which all branches were run, by number of faults.
	Events     []int
	Violations int
	First      History // the first one with a violation
	// FirstAfter and FirstHistory are the numbers of states and histories until then.
	FirstAfter, FirstHistory int
	Duration                 time.Duration // of the processor
}

// node is a state that was reached with a number of events and faults.
type node struct {
	events, faults int
	branches       []branch // what can happen; none: it is the last one
	// level is the last level at which nothing was left to run from here on.
	level level
}

// branch is something that can happen in a state.
type branch struct {
	fault, taken bool
	to           *node // nil: not taken, or an invariant was violated
	diverged     int
}

// level says which branches are run: all those of some events, with at most so many faults. Before and after these events, the
// first branch is run.
type level struct{ from, events, faults int }

// permits reports whether branch i of n is run.
func (l level) permits(n *node, i int) bool {
	explored := l.from <= n.events && n.events < l.from+l.events
	return i == 0 || explored && (!n.branches[i].fault || n.faults < l.faults)
}

// explorer runs the histories of a scope. Each one begins with the same state. It takes branches that no other one has taken, or else
// those that lead to such branches.
type explorer struct {
	scope  Scope
	bound  Bound
	level  level
	begin  time.Duration // of the processor
	nodes  map[place]*node
	first  *node
	result Exploration
}

// place identifies a node.
type place struct {
	state          state
	events, faults int
}

// Explore runs histories of a scope, until all branches within the bound were taken. The levels with few faults are the first ones.
func Explore(t *testing.T, scope Scope, bound Bound) Exploration {
	e := &explorer{scope: scope, bound: bound, begin: processorTime(), nodes: map[place]*node{}, first: &node{branches: make([]branch, 1)}}
	for faults := range bound.Faults + 1 {
		e.result.Events = append(e.result.Events, 0)
		for events := 1; events <= bound.Events; events++ {
			e.level = level{bound.From, events, faults}
			for !e.done(e.first) {
				if e.ends() {
					return e.ended()
				}
				e.run(t)
			}
			e.result.Events[faults] = events
		}
	}
	return e.ended()
}

// maxDiverged is the share of histories that may diverge.
const maxDiverged = 0.1

// ends reports whether the exploration ends before everything was run.
func (e *explorer) ends() bool {
	late := e.bound.Time > 0 && processorTime()-e.begin >= e.bound.Time
	diverges := e.result.Diverged > 100 && float64(e.result.Diverged) > maxDiverged*float64(e.result.Histories)
	return late || diverges || e.bound.First && e.result.Violations > 0
}

func (e *explorer) ended() Exploration {
	e.result.States, e.result.Duration = len(e.nodes), processorTime()-e.begin
	for _, n := range e.nodes {
		e.result.Branches += len(n.branches)
	}
	return e.result
}

// processorTime returns the time that the processor has spent on this process.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // the arguments are valid
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// done reports whether nothing is left to run from n on.
func (e *explorer) done(n *node) bool {
	if n.level == e.level {
		return true
	}
	for i, b := range n.branches {
		if e.level.permits(n, i) && (!b.taken || b.to != nil && !e.done(b.to)) {
			return false
		}
	}
	n.level = e.level
	return true
}

// next returns the branch of n that a history takes, and false if nothing is left to run.
func (e *explorer) next(n *node) (int, bool) {
	for i, b := range n.branches {
		if e.level.permits(n, i) && !b.taken {
			return i, true
		}
	}
	for i, b := range n.branches {
		if e.level.permits(n, i) && b.to != nil && !e.done(b.to) {
			return i, true
		}
	}
	return 0, false
}

// attempts is how often a branch is taken that leads to different states.
const attempts = 3

// link records that branch i of n leads to another node. A branch that diverges often is not taken any more.
func (e *explorer) link(n *node, i int, to *node) {
	b := &n.branches[i]
	if b.taken && b.to != to {
		e.result.Diverged++
		b.diverged++
	}
	b.taken, b.to = true, to
	if b.diverged >= attempts {
		b.to = nil
	}
}

// run runs a history.
func (e *explorer) run(t *testing.T) {
	var w *window
	synctest.Test(t, func(*testing.T) {
		w = &window{simulation: newSimulation(&choices{}), explorer: e, from: e.first}
		w.run()
	})
	if finished.Add(1)%collectEvery == 0 {
		runtime.GC()
	}
	e.result.Histories++
	if w.simulation.history.Violation == "" {
		return
	}
	if e.result.Violations == 0 {
		e.result.First, e.result.FirstAfter, e.result.FirstHistory = w.simulation.history, len(e.nodes), e.result.Histories
	}
	e.result.Violations++
}

// run brings the scope to rest before the last step of a user, explores the events after it, and lets everything come to rest.
func (w *window) run() {
	s, scope := w.simulation, w.explorer.scope
	s.setUp(scale{replicas: 2, nodes: 1, claims: 1, features: scope.features, protection: cmp.Or(scope.protection, "always")})
	s.scale.protection = "always"
	for _, prefix := range scope.users {
		s.rest("before the first fault")
		w.watchProcesses()
		step, ok := s.user(prefix)
		if !ok {
			s.violated("no step begins with %q", prefix)
			break
		}
		s.perform(step)
	}
	if w.explore() {
		w.explorer.result.Rested++
		s.rest("at rest")
		s.tearDown()
		s.rest("after users have deleted everything")
	}
	s.end()
}

// user returns the step of a user whose name begins with prefix, and false if it is not possible.
func (s *simulation) user(prefix string) (cluster.Step, bool) {
	for _, group := range s.cluster.UserSteps(s.scale.claims) {
		for _, step := range group {
			if strings.HasPrefix(step.Name, prefix) {
				return step, true
			}
		}
	}
	return cluster.Step{}, false
}

// String returns the columns of a table after the scope.
func (e Exploration) String() string {
	return fmt.Sprintf("%v | %d | %d | %d | %d | %d | %.0f |",
		e.Events, e.Histories, e.Rested, e.States, e.Branches, e.Violations, e.Duration.Seconds())
}
