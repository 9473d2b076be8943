package workloop

// ranks is how many classes of urgency a ranked queue has.
const ranks = 3

// NewRanked makes a loop like [New] that works first on what is most urgent. rank says how
// urgent a key is, from 0, the most, to 2; it is asked whenever the key is added, and
// what has become more urgent since it was queued moves up. Keys of one rank go in the
// order in which they came.
func NewRanked[K comparable](cfg Config, metrics *Metrics, sync Sync[K], rank func(K) int) *Loop[K] {
	return newLoop(cfg, metrics, sync, &ranked[K]{rank: rank, in: map[K]int{}})
}

// ranked is the order of a queue; client-go calls its methods under a lock.
type ranked[K comparable] struct {
	rank  func(K) int
	lines [ranks][]K
	in    map[K]int // the line in which a key waits; an older place of it in another line counts no more
}

// Touch is called when a key is added that waits.
func (r *ranked[K]) Touch(key K) {
	if rank := r.rank(key); rank < r.in[key] {
		r.push(key, rank)
	}
}

// Push is called for a key that does not wait.
func (r *ranked[K]) Push(key K) { r.push(key, r.rank(key)) }

func (r *ranked[K]) push(key K, rank int) {
	r.in[key] = rank
	r.lines[rank] = append(r.lines[rank], key)
}

// Len is how many keys wait.
func (r *ranked[K]) Len() int { return len(r.in) }

// Pop is the most urgent key; there is one.
func (r *ranked[K]) Pop() (key K) {
	for rank := range r.lines {
		for len(r.lines[rank]) > 0 {
			var none K
			key, r.lines[rank][0] = r.lines[rank][0], none
			r.lines[rank] = r.lines[rank][1:]
			if in, waits := r.in[key]; waits && in == rank {
				delete(r.in, key)
				return key
			}
		}
	}
	return key
}
