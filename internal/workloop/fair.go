// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import "sync"

// NewFair returns a loop like [New] with four lanes: for first attempts and for retries of urgent keys, then the same for the others. Each
// lane leaves a tenth of the workers to the lanes before it. So urgent keys do not wait for slow calls of others, nor first attempts for
// retries. An event ends a retry: see [Loop.Add].
//
// In each lane, the groups of keys take turns: however many keys a group has, they do not delay those of another one. The keys of one
// group hold at most four fifths of the workers that a lane may hold, and at least one, while another group has keys. So a group whose
// attempts hang leaves workers to the others. The keys of a group in a lane are first in, first out.
//
// group returns the group of a key that is added, and urgent whether it is urgent, also when a worker could take it; nil means that all
// are. They must not call the loop. The keys of group "" have no limit of their own.
func NewFair[K comparable](cfg Config, metrics *Metrics, sync Sync[K], group func(K) string, urgent func(K) bool) *Loop[K] {
	var l *Loop[K]
	q := newFairQueue(group, func(key K) (lane int) {
		if urgent != nil && !urgent(key) {
			lane = 2
		}
		if l.retries(key) {
			lane++
		}
		return lane
	})
	l = newLoop(cfg, metrics, sync, q)
	l.fair = q
	return l
}

// retries reports whether the next attempt for key is a retry that no event has caused.
func (l *Loop[K]) retries(key K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, ok := l.states[key]
	return ok && st.failures > 0 && !st.skipBackoff
}

// lanes is the number of lanes of a [fairQueue].
const lanes = 4

// fairQueue implements [workqueue.Queue], whose methods are called under a lock. Few groups can be at their limit: the cost of a key does
// not depend on the number of keys or groups.
type fairQueue[K comparable] struct {
	group func(K) string
	lane  func(K) int // from 0, the first to be taken

	mu      sync.Mutex // release is called without the lock of the workqueue
	workers int
	waiting int // number of keys that wait
	pops    int
	next    int // lane that Len has chosen
	held    heldWorkers
	groups  map[string]*fairGroup[K]
	turns   [lanes]fifo[*fairGroup[K]] // groups with waiting keys in the lane
	running map[K]fairPlace[K]
}

// fairGroup exists while keys of a group are running or waiting.
type fairGroup[K comparable] struct {
	name string
	held heldWorkers
	keys [lanes]fifo[K] // that wait
}

// fairPlace is where a running key came from.
type fairPlace[K comparable] struct {
	group *fairGroup[K]
	lane  int
}

// heldWorkers is the number of workers by lane.
type heldWorkers [lanes]int

// from returns the number of workers of this lane and those after it.
func (h heldWorkers) from(lane int) (n int) {
	for _, held := range h[lane:] {
		n += held
	}
	return n
}

func newFairQueue[K comparable](group func(K) string, lane func(K) int) *fairQueue[K] {
	return &fairQueue[K]{group: group, lane: lane, workers: 1, groups: map[string]*fairGroup[K]{}, running: map[K]fairPlace[K]{}}
}

// setWorkers sets the number of workers.
func (q *fairQueue[K]) setWorkers(workers int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.workers = workers
}

// limit returns how many workers this lane and those after it may hold.
func (q *fairQueue[K]) limit(lane int) int { return max(q.workers*(10-lane)/10, 1) }

// Touch is called when a waiting key is added again.
func (q *fairQueue[K]) Touch(K) {}

// Push adds a key that is not waiting.
func (q *fairQueue[K]) Push(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.push(key)
}

func (q *fairQueue[K]) push(key K) {
	name, lane := q.group(key), q.lane(key)
	g := q.groups[name]
	if g == nil {
		g = &fairGroup[K]{name: name}
		q.groups[name] = g
	}
	if len(g.keys[lane]) == 0 {
		q.turns[lane].push(g)
	}
	g.keys[lane].push(key)
	q.waiting++
}

// Len returns the number of waiting keys, or 0 if none of them can be taken.
func (q *fairQueue[K]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	// Pop must not choose again: the lane of a key may change meanwhile, and its new one be full.
	q.next = q.choose()
	if q.next < 0 {
		return 0
	}
	return q.waiting
}

// Pop removes the next key. Len must have returned a positive number.
func (q *fairQueue[K]) Pop() K {
	q.mu.Lock()
	defer q.mu.Unlock()
	lane := q.next
	key, g := q.take(lane)
	q.pops++
	q.held[lane]++
	g.held[lane]++
	q.running[key] = fairPlace[K]{g, lane}
	return key
}

// total returns the number of waiting keys.
func (q *fairQueue[K]) total() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}

// release ends the processing of a popped key. The worker must pop the next key: it may be one that could not be taken.
func (q *fairQueue[K]) release(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	place := q.running[key]
	delete(q.running, key)
	q.held[place.lane]--
	place.group.held[place.lane]--
	q.prune(place.group)
}

// choose returns the lane of the next key, or -1. Every fourth key is of the last lane that has one: the first lanes do not starve it.
func (q *fairQueue[K]) choose() int {
	for moved := true; moved; { // perhaps to a lane that was looked at before
		moved = false
		for n := range lanes {
			lane := n
			if q.pops%fairnessInterval == fairnessInterval-1 {
				lane = lanes - 1 - n
			}
			has, left := q.hasNext(lane)
			if has {
				return lane
			}
			moved = moved || left
		}
	}
	return -1
}

// hasNext reports whether the first group of the lane has a key to take. Groups at their limit lose their turn, and keys that belong to
// another lane by now are moved there, which moved reports.
func (q *fairQueue[K]) hasNext(lane int) (has, moved bool) {
	if !q.admits(lane, q.held, q.limit) {
		return false, false
	}
	turns := &q.turns[lane]
	for lost := 0; lost < len(*turns); {
		g := (*turns)[0]
		if !q.admits(lane, g.held, func(lane int) int { return q.groupLimit(g, lane) }) {
			turns.push(turns.pop())
			lost++
			continue
		}
		if q.lane(g.keys[lane][0]) == lane {
			return true, moved
		}
		key, _ := q.take(lane)
		q.push(key)
		q.prune(g)
		moved = true
	}
	return false, moved
}

// admits reports whether another key of the lane keeps held within the limits of the lane and those before it.
func (q *fairQueue[K]) admits(lane int, held heldWorkers, limit func(lane int) int) bool {
	for first := range lane + 1 {
		if held.from(first) >= limit(first) {
			return false
		}
	}
	return true
}

// groupLimit returns how many workers g may hold in this lane and those after it.
func (q *fairQueue[K]) groupLimit(g *fairGroup[K], lane int) int {
	if len(q.groups) == 1 || g.name == "" {
		return q.workers
	}
	return max(q.limit(lane)*4/5, 1)
}

// take removes the first key of the first group of the lane, which goes to the end.
func (q *fairQueue[K]) take(lane int) (K, *fairGroup[K]) {
	g := q.turns[lane].pop()
	key := g.keys[lane].pop()
	if len(g.keys[lane]) > 0 {
		q.turns[lane].push(g)
	}
	q.waiting--
	return key, g
}

// prune drops g if it has no keys.
func (q *fairQueue[K]) prune(g *fairGroup[K]) {
	for _, keys := range g.keys {
		if len(keys) > 0 {
			return
		}
	}
	if g.held.from(0) == 0 {
		delete(q.groups, g.name)
	}
}

// fifo is a queue.
type fifo[T any] []T

func (f *fifo[T]) push(v T) { *f = append(*f, v) }

func (f *fifo[T]) pop() T {
	first := (*f)[0]
	clear((*f)[:1]) // the array outlives the element
	*f = (*f)[1:]
	return first
}
