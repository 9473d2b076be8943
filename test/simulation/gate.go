// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// operation is something that a replica has begun and that waits until the schedule continues it: a
// request, the response to it, an event of a watch, or a call of the driver.
type operation struct {
	replica *replica
	kind    kind
	name    string // the same in each run of a seed
	body    string // of a request
	key     string // that a worker processes
	verb    string // of a request
	lease   bool   // a request for a Lease, or its response
	method  string // of a call
	volume  string // of a call: the name or ID of the volume or snapshot
	term    string // of a call: the Lease whose holder may make it
	arrived int
	// late is called instead of resuming a call or a write whose client has given up: it is executed nevertheless.
	late  func()
	ended atomic.Bool // the client has canceled it
	// sent: the process had sent it when it was suspended. expired: its context has ended while the process was suspended.
	// excused: the process has begun the call before it was suspended, or another replica led.
	sent    bool
	excused bool
	expired atomic.Bool
	gaveUp  time.Time // when it has
	resume  chan verdict
	broken  chan struct{} // closed when the connection of a call breaks
}

// kind is the kind of an operation.
type kind int

const (
	request kind = iota
	response
	event
	call
	callResponse
	expiry
)

// verdict is how an operation continues.
type verdict struct {
	err   error // instead of executing the operation
	lost  error // after executing it, instead of its response
	delay bool  // the response is an operation of its own
	late  bool  // its context has ended, and its process, which was suspended, has not noticed that

	// executed records the result of a request, and returns a function that records that its response arrives.
	executed func(apiserver.Result) (received func())
	unready  bool // the response says that the snapshot is not ready
}

// gate holds operations until the schedule continues them, so that only one of them runs at a time.
type gate struct {
	mu      sync.Mutex
	pending []*operation
	held    []heldKey
	step    int
	changed chan struct{} // has an element after a change of pending or held
}

// heldKey is a key that will be added to the queue of a loop.
type heldKey struct {
	replica   *replica
	loop, key string
	add       func()
}

func newGate() *gate { return &gate{changed: make(chan struct{}, 1)} }

// hold keeps a key until [gate.release] adds it to the queue of a loop.
func (g *gate) hold(r *replica, loop string, key any, add func()) {
	k := heldKey{r, loop, fmt.Sprintf("%#v", key), add}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = append(g.held, k)
	g.signal()
}

// release adds the first of the keys that are held to its queue, by process, loop and key. It returns false if there is none.
func (g *gate) release() bool {
	g.mu.Lock()
	if len(g.held) == 0 {
		g.mu.Unlock()
		return false
	}
	order := func(a, b heldKey) int {
		return cmp.Or(strings.Compare(a.replica.client, b.replica.client), strings.Compare(a.loop, b.loop), strings.Compare(a.key, b.key))
	}
	first := slices.MinFunc(g.held, order)
	g.held = slices.DeleteFunc(g.held, func(k heldKey) bool { return order(k, first) == 0 })
	g.mu.Unlock()
	first.add()
	return true
}

// wait returns when the schedule continues o, or with false at the end of ctx.
func (g *gate) wait(ctx context.Context, o *operation) (verdict, bool) {
	o.resume, o.broken = make(chan verdict, 1), make(chan struct{})
	g.mu.Lock()
	o.arrived = g.step
	g.pending = append(g.pending, o)
	g.signal()
	g.mu.Unlock()
	select {
	case v := <-o.resume:
		return v, true
	case <-ctx.Done():
		if v, ok := o.outlasts(); ok {
			return v, true
		}
	case <-o.broken:
	case <-o.replica.dead:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	o.gaveUp = time.Now()
	o.ended.Store(true)
	if i := slices.Index(g.pending, o); i >= 0 && o.late == nil {
		g.pending = slices.Delete(g.pending, i, i+1)
	}
	g.signal()
	return verdict{}, false
}

// outlasting is the time that [outlast] takes.
const outlasting = time.Millisecond

// outlast returns after all timers with the deadline of ctx have fired, if it has passed since then: the client has one, too, and its
// error would depend on the order.
func outlast(ctx context.Context, since time.Time) {
	if ctx.Err() == context.DeadlineExceeded && time.Now().After(since) {
		time.Sleep(outlasting)
	}
}

func (g *gate) signal() {
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// entry is an operation at the gate.
type entry struct {
	*operation
	canceled bool
}

// state returns the operations at the gate.
func (g *gate) state() []entry {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []entry
	for _, o := range g.pending {
		all = append(all, entry{o, o.canceled()})
	}
	return all
}

// begin sets the number of the step and returns the pending operations, the oldest first.
func (g *gate) begin(step int) []*operation {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.step = step
	select {
	case <-g.changed:
	default:
	}
	slices.SortStableFunc(g.pending, func(a, b *operation) int {
		if a.arrived != b.arrived {
			return a.arrived - b.arrived
		}
		if a.replica.name != b.replica.name {
			return strings.Compare(a.replica.name, b.replica.name)
		}
		return cmp.Or(strings.Compare(a.name, b.name), strings.Compare(a.body, b.body), strings.Compare(a.key, b.key))
	})
	return slices.Clone(g.pending)
}

// proceed continues o, and operations of other goroutines that equal it: their order differs between runs of a seed.
func (g *gate) proceed(o *operation, v verdict) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pending = slices.DeleteFunc(g.pending, func(other *operation) bool {
		equal := other.replica == o.replica && other.kind == o.kind && other.arrived == o.arrived &&
			other.name == o.name && other.body == o.body && other.key == o.key
		if equal && other != o {
			other.resume <- v
		}
		return equal
	})
	o.resume <- v
}

// running returns the calls whose clients wait for the response.
func (g *gate) running() []*operation {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(g.pending), func(o *operation) bool { return o.kind != call || o.term == "" || o.canceled() })
}

// canceled reports whether the client has given up.
func (o *operation) canceled() bool { return o.ended.Load() }

// remove drops o.
func (g *gate) remove(o *operation) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.pending, o); i >= 0 {
		g.pending = slices.Delete(g.pending, i, i+1)
	}
}
