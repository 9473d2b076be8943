// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import "sync"

// NewFair returns a loop like [New] in which the keys of one group hold at most four fifths of the
// workers, and at least one, while keys of other groups are waiting or processed. So a group whose
// attempts hang leaves workers to the keys of other groups; the first of them waits for at most one
// attempt. The keys of a group are first in, first out.
//
// group returns the group of a key. It is called when the key is added and when a worker could take it,
// and must not call the loop. The keys of group "" have no limit.
func NewFair[K comparable](cfg Config, metrics *Metrics, sync Sync[K], group func(K) string) *Loop[K] {
	q := newFairQueue(group)
	l := newLoop(cfg, metrics, sync, q)
	l.fair = q
	return l
}

// fairQueue implements [workqueue.Queue], whose methods are called under a lock. It holds the keys of
// groups at their limit back. The cost of a key does not depend on the number of keys: a key is
// looked at when it has arrived, and when it is the first that its group holds back.
type fairQueue[K comparable] struct {
	group func(K) string

	mu      sync.Mutex // release is called without the lock of the workqueue
	workers int
	waiting int            // number of keys that wait
	names   map[K]string   // groups of the waiting and running keys when they were added
	work    map[string]int // number of these keys by group, without those of group ""
	arrived fifo[K]
	groups  map[string]*fairGroup[K]
	resumed fifo[*fairGroup[K]] // groups that hold keys back and have fallen below the limit
	running map[K]*fairGroup[K]
	next    *K // the key that the next Pop returns; nil: not chosen
}

// fairGroup exists while keys of a group are running or held back.
type fairGroup[K comparable] struct {
	name     string
	running  int
	heldBack fifo[K]
	resumed  bool // in fairQueue.resumed
}

func newFairQueue[K comparable](group func(K) string) *fairQueue[K] {
	return &fairQueue[K]{group: group, workers: 1, names: map[K]string{}, work: map[string]int{},
		groups: map[string]*fairGroup[K]{}, running: map[K]*fairGroup[K]{}}
}

// setWorkers sets the number of workers.
func (q *fairQueue[K]) setWorkers(workers int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.workers = workers
}

// limit returns the number of running keys that a group may have.
func (q *fairQueue[K]) limit() int {
	if len(q.work) <= 1 {
		return q.workers
	}
	return max(q.workers*4/5, 1)
}

// Touch is called when a waiting key is added again.
func (q *fairQueue[K]) Touch(K) {}

// Push adds a key that is not waiting.
func (q *fairQueue[K]) Push(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting++
	q.arrived.push(key)
	if name := q.group(key); name != "" {
		q.names[key] = name
		q.work[name]++
	}
}

// Len returns the number of waiting keys, or 0 if all of them are held back.
func (q *fairQueue[K]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.next == nil && !q.choose() {
		return 0
	}
	return q.waiting
}

// Pop removes the oldest key that is not held back. Len must have returned a positive number.
func (q *fairQueue[K]) Pop() (key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	key, q.next = *q.next, nil
	q.waiting--
	return key
}

// total returns the number of waiting keys.
func (q *fairQueue[K]) total() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}

// release ends the processing of a popped key. The worker must pop the next key: it may be one that
// was held back.
func (q *fairQueue[K]) release(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if name, ok := q.names[key]; ok {
		delete(q.names, key)
		q.work[name]--
		if q.work[name] == 0 {
			delete(q.work, name)
		}
	}
	if g := q.running[key]; g != nil {
		delete(q.running, key)
		g.running--
		q.resume(g)
		q.prune(g)
	}
	if len(q.work) == 1 { // the group that remains has a higher limit now
		for _, g := range q.groups {
			q.resume(g)
		}
	}
}

// resume has choose look at the keys that g holds back.
func (q *fairQueue[K]) resume(g *fairGroup[K]) {
	if len(g.heldBack) > 0 && !g.resumed {
		g.resumed = true
		q.resumed.push(g)
	}
}

// choose sets next. It returns false if no key can be taken. Keys that were held back are older than
// those that it has not looked at yet.
func (q *fairQueue[K]) choose() bool {
	for len(q.resumed) > 0 {
		g := q.resumed[0]
		if len(g.heldBack) == 0 || g.running >= q.limit() {
			g.resumed = false
			q.resumed.pop()
			continue
		}
		taken := q.take(g.heldBack.pop())
		q.prune(g)
		if taken {
			return true
		}
	}
	for len(q.arrived) > 0 {
		if q.take(q.arrived.pop()) {
			return true
		}
	}
	return false
}

// take makes key the next one, or has its group hold it back and returns false.
func (q *fairQueue[K]) take(key K) bool {
	name := q.group(key)
	if name == "" {
		q.next = &key
		return true
	}
	g := q.groups[name]
	if g == nil {
		g = &fairGroup[K]{name: name}
		q.groups[name] = g
	}
	if g.running >= q.limit() {
		g.heldBack.push(key)
		return false
	}
	g.running++
	q.running[key], q.next = g, &key
	return true
}

// prune drops g if it has no keys.
func (q *fairQueue[K]) prune(g *fairGroup[K]) {
	if g.running == 0 && len(g.heldBack) == 0 {
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
