package nodecontroller

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// ledger is what is known of the volumes and claims whose nodes are lost or going: what
// the breaker counts. It follows from the API, but for what was done lately.
type ledger struct {
	breaker breaker
	window  time.Duration
	drivers func() []string

	mu      sync.Mutex
	entries map[string]entry     // by name of the volume, see also [keyOfClaims]
	pending map[string]int       // by node: entries
	held    map[string]int       // by node: entries
	acted   map[string]time.Time // by node
	// forbidden is what is not done for want of a permission and stands for no single entry.
	forbidden map[string]struct{}
	// judged is the last verdict, as long as nothing has changed and until the oldest of
	// what was done lately does not count any more.
	judged *verdict
	until  time.Time
}

// entry is what a volume, or the unbound claims of a node, contribute.
type entry struct {
	nodes         []string
	pending, held bool
	place         place
	state         state
	gate          gate
}

func newLedger(b breaker, window time.Duration, drivers func() []string) *ledger {
	return &ledger{
		breaker: b, window: window, drivers: drivers, entries: map[string]entry{},
		pending: map[string]int{}, held: map[string]int{}, acted: map[string]time.Time{}, forbidden: map[string]struct{}{},
	}
}

// set replaces an entry.
func (l *ledger) set(key string, e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remove(key)
	l.entries[key] = e
	l.count(e, 1)
}

// correct is set for an entry that is still there, and for no other: what it is about may
// be gone by now. What its nodes are called and what was decided about it stays.
func (l *ledger) correct(key string, e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old, ok := l.entries[key]
	if !ok {
		return
	}
	e.nodes, e.state, e.gate = old.nodes, old.state, old.gate
	l.remove(key)
	l.entries[key] = e
	l.count(e, 1)
}

// mark notes what was decided about an entry, for the metrics.
func (l *ledger) mark(key string, st step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.entries[key]; ok {
		e.state, e.gate = st.state, st.gate
		l.entries[key] = e
	}
}

// block notes what an entry was refused; where it is on its way out stays.
func (l *ledger) block(key string, g gate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.entries[key]; ok {
		e.gate = g
		l.entries[key] = e
	}
}

// forbid notes whether a permission is missing for what, until the next time.
func (l *ledger) forbid(what string, missing bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if delete(l.forbidden, what); missing {
		l.forbidden[what] = struct{}{}
	}
}

// drop removes an entry; it tells whether there was one.
func (l *ledger) drop(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.entries[key]
	l.remove(key)
	return ok
}

// has tells whether there is an entry.
func (l *ledger) has(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.entries[key]
	return ok
}

func (l *ledger) remove(key string) {
	if e, ok := l.entries[key]; ok {
		l.count(e, -1)
		delete(l.entries, key)
	}
}

func (l *ledger) count(e entry, by int) {
	add := func(m map[string]int, node string) {
		before := m[node]
		if m[node] += by; m[node] == 0 {
			delete(m, node)
		}
		if before == 0 || m[node] == 0 {
			l.judged = nil
		}
	}
	for _, n := range e.nodes {
		if e.pending {
			add(l.pending, n)
		}
		if e.held {
			add(l.held, n)
		}
	}
}

// act notes that something was destroyed that belonged to nodes.
func (l *ledger) act(nodes []string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range nodes {
		l.acted[n] = now
	}
	l.judged = nil
}

// changed has the next verdict found anew.
func (l *ledger) changed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.judged = nil
}

// judge is the verdict of the breaker, and whether any node is held.
func (l *ledger) judge(now time.Time) (v verdict, held bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.judged == nil || !now.Before(l.until) {
		l.until = now.Add(l.window)
		maps.DeleteFunc(l.acted, func(_ string, at time.Time) bool { return !now.Before(at.Add(l.window)) })
		for _, at := range l.acted {
			if end := at.Add(l.window); end.Before(l.until) {
				l.until = end
			}
		}
		judged := l.breaker.judge(l.census())
		l.judged = &judged
	}
	return *l.judged, len(l.held) > 0
}

// judgeWith is the verdict as it would be if something were to be done for nodes as well.
func (l *ledger) judgeWith(now time.Time, nodes []string) verdict {
	v, _ := l.judge(now) // which also forgets what is over
	if len(nodes) == 0 {
		return v
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.census()
	c.pending = append(c.pending, nodes...)
	return l.breaker.judge(c)
}

// census is what counts now. The caller has to lock l.
func (l *ledger) census() census {
	return census{
		pending: slices.Collect(maps.Keys(l.pending)), acted: slices.Collect(maps.Keys(l.acted)),
		held: slices.Collect(maps.Keys(l.held)), drivers: l.drivers(),
	}
}

// isHeld tells whether something of node is held.
func (l *ledger) isHeld(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[node] > 0
}

// hold has an entry be held, if there is one.
func (l *ledger) hold(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.entries[key]; ok {
		l.remove(key)
		e.held = true
		l.entries[key] = e
		l.count(e, 1)
	}
}

// holds tells whether there is an entry that is held.
func (l *ledger) holds(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[key].held
}

// isPending tells whether there is an entry for which something is to be done.
func (l *ledger) isPending(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[key].pending
}

// keys is the keys of all entries, in no order.
func (l *ledger) keys() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.entries))
}

// tally is the numbers that metrics show.
type tally struct {
	missing  int // nodes
	held     int // nodes
	orphaned map[state]int
	blocked  map[gate]int
}

func (l *ledger) tally() tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := tally{held: len(l.held), orphaned: map[state]int{}, blocked: map[gate]int{}}
	missing := map[string]struct{}{}
	for _, e := range l.entries {
		if e.place == placeOrphan {
			for _, n := range e.nodes {
				missing[n] = struct{}{}
			}
			if e.state != "" {
				t.orphaned[e.state]++
			}
		}
		if e.gate != "" {
			t.blocked[e.gate]++
		}
	}
	if n := len(l.forbidden); n > 0 {
		t.blocked[gateForbidden] += n
	}
	t.missing = len(missing)
	return t
}
