// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import "container/list"

// ranks is the number of ranks of a ranked queue.
const ranks = 3

// NewRanked returns a loop like [New] with a priority queue. rank returns the priority of a key,
// from 0, the highest, to 2. It is called on every Add; a waiting key can move up, never down.
// Keys of equal rank are first in, first out.
func NewRanked[K comparable](cfg Config, metrics *Metrics, sync Sync[K], rank func(K) int) *Loop[K] {
	return newLoop(cfg, metrics, sync, newRankedQueue(rank))
}

// rankedQueue implements [workqueue.Queue], whose methods are called under a lock.
type rankedQueue[K comparable] struct {
	rank     func(K) int
	lists    [ranks]list.List // waiting keys by rank
	elements map[K]queueElement
	pops     int
}

// fairnessInterval prevents starvation: every fourth pop takes a key of the lowest priority.
const fairnessInterval = 4

// queueElement locates a waiting key.
type queueElement struct {
	rank    int
	element *list.Element
}

func newRankedQueue[K comparable](rank func(K) int) *rankedQueue[K] {
	return &rankedQueue[K]{rank: rank, elements: map[K]queueElement{}}
}

// Touch is called when a waiting key is added again.
func (q *rankedQueue[K]) Touch(key K) {
	old := q.elements[key]
	if rank := q.rank(key); rank < old.rank {
		q.lists[old.rank].Remove(old.element)
		q.push(key, rank)
	}
}

// Push adds a key that is not waiting.
func (q *rankedQueue[K]) Push(key K) { q.push(key, q.rank(key)) }

func (q *rankedQueue[K]) push(key K, rank int) {
	q.elements[key] = queueElement{rank, q.lists[rank].PushBack(key)}
}

// Len returns the number of waiting keys.
func (q *rankedQueue[K]) Len() int { return len(q.elements) }

// Pop removes the key of the highest priority, or of the lowest on every fourth call. The queue
// must not be empty.
func (q *rankedQueue[K]) Pop() (key K) {
	q.pops++
	for i := range q.lists {
		rank := i
		if q.pops%fairnessInterval == 0 {
			rank = ranks - 1 - i
		}
		if first := q.lists[rank].Front(); first != nil {
			key, _ = q.lists[rank].Remove(first).(K)
			delete(q.elements, key)
			return key
		}
	}
	return key
}
