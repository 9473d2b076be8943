package workloop

import "container/list"

// ranks is how many classes of urgency a ranked queue has.
const ranks = 3

// NewRanked makes a loop like [New] that works first on what is most urgent, but for every
// fourth key, which is one of the least urgent. rank says how
// urgent a key is, from 0, the most, to 2; it is asked whenever the key is added, and
// what has become more urgent since it was queued moves up. Keys of one rank go in the
// order in which they came.
func NewRanked[K comparable](cfg Config, metrics *Metrics, sync Sync[K], rank func(K) int) *Loop[K] {
	return newLoop(cfg, metrics, sync, newRankedQueue(rank))
}

// rankedQueue is the order of a queue; client-go calls its methods under a lock.
type rankedQueue[K comparable] struct {
	rank  func(K) int
	lines [ranks]list.List // of keys
	waits map[K]queueElement
	pops  int
}

// fairnessInterval is how often the least urgent key has its turn: what never ends to be urgent must
// not keep the rest from being done at all.
const fairnessInterval = 4

// queueElement is where a key waits.
type queueElement struct {
	rank int
	at   *list.Element
}

func newRankedQueue[K comparable](rank func(K) int) *rankedQueue[K] {
	return &rankedQueue[K]{rank: rank, waits: map[K]queueElement{}}
}

// Touch is called when a key is added that waits.
func (r *rankedQueue[K]) Touch(key K) {
	old := r.waits[key]
	if rank := r.rank(key); rank < old.rank {
		r.lines[old.rank].Remove(old.at)
		r.push(key, rank)
	}
}

// Push is called for a key that does not wait.
func (r *rankedQueue[K]) Push(key K) { r.push(key, r.rank(key)) }

func (r *rankedQueue[K]) push(key K, rank int) {
	r.waits[key] = queueElement{rank: rank, at: r.lines[rank].PushBack(key)}
}

// Len is how many keys wait.
func (r *rankedQueue[K]) Len() int { return len(r.waits) }

// Pop is the most urgent key, and every fourth time the least urgent one; there is one.
func (r *rankedQueue[K]) Pop() (key K) {
	r.pops++
	for i := range r.lines {
		rank := i
		if r.pops%fairnessInterval == 0 {
			rank = ranks - 1 - i
		}
		if first := r.lines[rank].Front(); first != nil {
			key, _ = r.lines[rank].Remove(first).(K)
			delete(r.waits, key)
			return key
		}
	}
	return key
}
