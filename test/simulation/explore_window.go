// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// window is a history of an exploration. Between the last step of a user and the rest, the explorer chooses what happens next.
// Requests for Leases are no choice: they continue at once.
type window struct {
	simulation *simulation
	explorer   *explorer
	seen       observations

	// from is the last node, and branch the branch that was taken there.
	from   *node
	branch int
	events int
	faults int
	// interfered: the step of a user was done that may come at any time.
	interfered bool
}

// option is something that can happen next.
type option struct {
	fault bool
	do    func()
}

// quietLimit bounds the time without any event after which the exploration ends, while objects wait for something.
const quietLimit = time.Minute

// explore runs events as the explorer chooses, and reports whether the last state is new.
func (w *window) explore() bool {
	for {
		options := w.options()
		if w.simulation.isViolated() {
			w.explorer.link(w.from, w.branch, nil)
			return false
		}
		n, isNew := w.reach(options)
		if len(options) == 0 {
			return isNew
		}
		i, ok := w.explorer.next(n)
		if !ok { // the last branch was to lead to something that is left, and diverged
			return false
		}
		w.from, w.branch = n, i
		w.events++
		if options[i].fault {
			w.faults++
			w.simulation.history.Faults++
		}
		options[i].do()
	}
}

// reach returns the node of the state that the history has reached, and reports whether it is new.
func (w *window) reach(options []option) (*node, bool) {
	e, at := w.explorer, place{w.state(), w.events, w.faults}
	n, ok := e.nodes[at]
	if !ok || len(n.branches) != len(options) {
		n = &node{events: w.events, faults: w.faults, branches: make([]branch, len(options))}
		for i, o := range options {
			n.branches[i].fault = o.fault
		}
		e.nodes[at] = n
	}
	e.link(w.from, w.branch, n)
	return n, !ok
}

// options lets time pass until something can happen, and returns it. It returns nothing after the last event of the bound, and when
// nothing happens for a while.
func (w *window) options() []option {
	for begin := time.Now(); ; w.simulation.advance(idle) {
		w.settle()
		if w.simulation.isViolated() || w.events >= w.explorer.bound.From+w.explorer.bound.Events {
			return nil
		}
		options := w.now()
		if len(options) > 0 || len(w.simulation.busy()) == 0 || time.Since(begin) > quietLimit {
			return options
		}
	}
}

// settle waits until every process waits for an event, and continues the requests for Leases.
func (w *window) settle() {
	for {
		w.simulation.nextStep()
		w.simulation.check()
		w.seen.react(w)
		pending := w.simulation.gate.begin(w.simulation.step)
		i := slices.IndexFunc(pending, func(o *operation) bool { return o.lease && !o.canceled() })
		if i < 0 || w.simulation.isViolated() {
			return
		}
		w.simulation.record("%s %s", pending[i].replica.client, pending[i].name)
		w.simulation.gate.proceed(pending[i], verdict{})
	}
}

// now returns what can happen now, the simplest first.
func (w *window) now() []option {
	var live, late []*operation
	for _, o := range w.ordered(w.simulation.eligible(w.simulation.gate.begin(w.simulation.step))) {
		switch {
		case o.canceled():
			late = append(late, o)
		case o.kind != event || w.isLeader(o.replica): // the caches of a standby matter when it becomes leader
			live = append(live, o)
		}
	}
	var options []option
	for _, o := range live {
		options = append(options, option{do: func() { w.continues(o, "", verdict{delay: o.kind == request || o.kind == call}) }})
	}
	for _, step := range w.simulation.cluster.Steps() {
		options = append(options, option{do: func() { w.simulation.perform(step) }})
	}
	step, possible := w.simulation.user(w.explorer.scope.meanwhile)
	if possible && !w.interfered && len(options) > 0 { // else nothing happens, and a rest follows
		options = append(options, option{do: func() {
			w.interfered = true
			w.simulation.perform(step)
		}})
	}
	if len(options) == 0 && len(late) > 0 {
		options = append(options, option{do: func() {
			w.simulation.record("%s %s never takes effect", late[0].replica.client, late[0].name)
			w.simulation.gate.remove(late[0])
		}})
	}
	for _, o := range late {
		options = append(options, option{do: func() {
			w.simulation.record("%s %s, which was canceled", o.replica.client, o.name)
			o.late()
			w.simulation.gate.remove(o)
		}})
	}
	if len(options) == 0 || w.faults >= w.explorer.bound.Faults {
		return options
	}
	for _, o := range live {
		options = append(options, w.faultsOf(o)...)
	}
	return append(options, w.disasters()...)
}

// ordered returns operations in an order that depends on the state only, without those that continue with another one.
func (w *window) ordered(operations []*operation) []*operation {
	slices.SortStableFunc(operations, func(a, b *operation) int {
		return cmp.Or(cmp.Compare(b.kind, a.kind), strings.Compare(w.seen.identity(a), w.seen.identity(b)))
	})
	return slices.CompactFunc(operations, func(a, b *operation) bool {
		return a.arrived == b.arrived && w.seen.identity(a) == w.seen.identity(b)
	})
}

// continues continues o with v, which text describes.
func (w *window) continues(o *operation, text string, v verdict) {
	w.seen.continues(w, o, text)
	w.simulation.record("%s %s%s", o.replica.client, o.name, text)
	w.simulation.gate.proceed(o, v)
}

// faultsOf returns the faults of o. The response to a read is not lost: for the client, that equals a request that is lost.
func (w *window) faultsOf(o *operation) []option {
	fault := func(text string, v verdict) option {
		return option{fault: true, do: func() { w.continues(o, text, v) }}
	}
	driverError := func(code codes.Code) error { return status.Error(code, "simulated") }
	verb := strings.Fields(strings.TrimPrefix(o.name, "response to "))[0]
	reads := verb == "get" || verb == "list"
	var faults []option
	switch o.kind {
	case request:
		faults = append(faults, fault(", which is lost", verdict{err: errNetwork}))
		if !reads && verb != "create" {
			conflict := apierrors.NewConflict(schema.GroupResource{}, "simulated", errors.New("simulated"))
			faults = append(faults, fault(", which fails with Conflict", verdict{err: conflict}))
		}
	case response:
		if !reads {
			faults = append(faults, fault(", which is lost", verdict{lost: errNetwork}),
				fault(", which is Timeout", verdict{lost: apierrors.NewTimeoutError("simulated", 0)}))
		}
	case call:
		faults = append(faults, fault(", which fails with Unavailable", verdict{err: driverError(codes.Unavailable)}))
		// After this error, a driver that has the volume or snapshot must not respond with it.
		if !strings.HasPrefix(o.method, "Create") || !w.simulation.has(o.volume) {
			faults = append(faults, fault(", which fails with ResourceExhausted", verdict{err: driverError(codes.ResourceExhausted)}))
		}
		faults = append(faults, option{fault: true, do: func() { w.expires(o) }})
	case callResponse:
		faults = append(faults, fault(", which is lost", verdict{lost: driverError(codes.Unavailable)}))
	}
	return faults
}

// expires lets time pass until the client of o gives up. The call may take effect later.
func (w *window) expires(o *operation) {
	s := w.simulation
	s.record("time passes until %s gives up %s", o.replica.client, o.name)
	for end := time.Now().Add(quietLimit); !o.canceled() && time.Now().Before(end) && !s.isViolated(); {
		s.advance(idle)
		w.settle()
	}
	w.seen.gaveUp(w, o)
}

// disasters returns the faults of the leaders: they are killed, and restarted or replaced by the other replica, or they
// cannot reach the API server until the other replica has replaced them.
func (w *window) disasters() []option {
	var faults []option
	fault := func(do func()) { faults = append(faults, option{fault: true, do: do}) }
	for i, r := range w.simulation.replicas {
		if r == nil || !w.isLeader(r) {
			continue
		}
		fault(func() {
			w.simulation.crash(i)
			w.simulation.startReplica(i)
		})
		standby := 1 - i
		for _, lag := range w.lags(standby) {
			fault(func() {
				w.deliver(standby, lag)
				w.simulation.crash(i)
				w.simulation.onlyLeases(takeover)
			})
			fault(func() {
				w.deliver(standby, lag)
				w.isolate(r)
			})
		}
	}
	return faults
}

// isolate keeps r from reaching the API server until another replica has acquired its Leases.
func (w *window) isolate(r *replica) {
	w.simulation.record("%s cannot reach the API server for a while", r.client)
	w.simulation.loses(r)
	r.partitioned = math.MaxInt
	r.unreachable.Store(true)
	w.simulation.onlyLeases(takeover)
	w.simulation.reconnected(r)
}

// lag is which events a standby has not received when it becomes leader: none, those of one resource, or all.
type lag string

const (
	lagsNothing    lag = ""
	lagsEverything lag = "everything"
)

// lags returns the lags of a replica that differ.
func (w *window) lags(replica int) []lag {
	r, lags := w.simulation.replicas[replica], []lag{lagsNothing}
	for _, o := range w.ordered(w.simulation.gate.begin(w.simulation.step)) {
		if resource := lag(o.watched()); o.replica == r && o.kind == event && !slices.Contains(lags, resource) {
			lags = append(lags, resource)
		}
	}
	if len(lags) > 2 {
		lags = append(lags, lagsEverything)
	}
	return lags
}

// deliver starts a replica unless it runs, and delivers its events except those that it lags behind.
func (w *window) deliver(replica int, behind lag) {
	s := w.simulation
	if s.replicas[replica] == nil {
		s.startReplica(replica)
	}
	for {
		w.settle()
		pending := s.gate.begin(s.step)
		i := slices.IndexFunc(pending, func(o *operation) bool {
			return o.replica == s.replicas[replica] && o.kind == event && behind != lagsEverything && string(behind) != o.watched()
		})
		if i < 0 || s.isViolated() {
			return
		}
		w.continues(pending[i], "", verdict{})
	}
}

// isLeader reports whether r holds a Lease.
func (w *window) isLeader(r *replica) bool {
	leases := cluster.List[*coordinationv1.Lease](w.simulation.api, coordinationv1.SchemeGroupVersion.WithResource("leases"))
	return slices.ContainsFunc(leases, func(l *coordinationv1.Lease) bool { return ptr.Deref(l.Spec.HolderIdentity, "") == r.name })
}
