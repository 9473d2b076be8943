package nodecleanup

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// state is how far the clean-up of a volume is, for the metric.
type state string

const (
	stateSuspect     state = "suspect"     // in the grace
	stateHeld        state = "held"        // by the breaker
	stateTerminating state = "terminating" // its Node is being deleted
	stateClaim       state = "claim"       // its claim exists
	stateDraining    state = "draining"    // its claim is being deleted
	stateReleased    state = "released"    // it has no claim
	stateForce       state = "force"       // it is being removed without the driver
	stateVerify      state = "verify"      // it is being deleted
)

// memory is what a term remembers about a lost host. Nothing in it must outlive the term.
type memory struct {
	steps map[string]step    // of its volumes, by name; nil: not gathered yet
	sent  map[types.UID]bool // objects whose deletion was sent
	// notBefore delays the next attempt for volumes that the caches know differently from the API server.
	notBefore map[types.UID]time.Time
	missing   bool
	pending   bool
	planned   bool      // its removal was planned, see [LostNode.Planned]
	last      types.UID // of the deleted Node that planned is for; empty: its deletion had not been observed
	resources bool      // custom resources of its Node were found
	state     state
}

// memories holds the memories of a term, by host.
type memories struct {
	policy Policy

	mu    sync.Mutex
	hosts map[string]*memory
}

// remember changes the memory of a host.
func (r *memories) remember(host string, edit func(*memory)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.hosts[host]
	if m == nil {
		m = &memory{sent: map[types.UID]bool{}, notBefore: map[types.UID]time.Time{}}
		r.hosts[host] = m
	}
	edit(m)
}

// recall returns a copy of the memory of a host, without the steps.
func (r *memories) recall(host string) (m memory, gathered bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.hosts[host]; known != nil {
		m, gathered = *known, known.steps != nil
		m.sent, m.notBefore = maps.Clone(m.sent), maps.Clone(m.notBefore)
	}
	m.steps = nil
	return m, gathered
}

// forget ends the memory of a host.
func (r *memories) forget(host string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.hosts, host)
}

// rememberHost remembers what the caches know about a host.
func (r *memories) rememberHost(h host) {
	now := time.Now()
	r.remember(h.value, func(m *memory) {
		m.steps, m.missing = make(map[string]step, len(h.volumes)), h.state == missing
		record, _ := r.policy.recordOf(h, cluster{now: now})
		m.pending, m.last = h.state != present && r.policy.pending(h, now), h.last.uid
		m.planned = record.Planned || h.state == unclear && !h.recorded && h.last.cordoned && h.drained // its CSINode is left
		for _, v := range h.volumes {
			if v.hosts[0].value == h.value { // a volume of several hosts counts once
				m.steps[v.pv.Name] = r.policy.nextStep(v, now)
			}
		}
	})
}

// rememberStep remembers the step of a volume.
func (r *memories) rememberStep(h host, v volume, st step) {
	r.remember(h.value, func(m *memory) {
		if _, ok := m.steps[v.pv.Name]; ok {
			m.steps[v.pv.Name] = st
		}
	})
}

// count adds all hosts to the gauges.
func (r *memories) count(n *counts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.hosts {
		m.count(n)
	}
}

// count adds a host to the gauges.
func (m *memory) count(n *counts) {
	if m.missing && len(m.steps) > 0 {
		n.missing++
	}
	for _, st := range m.steps {
		switch {
		case m.state == stateHeld:
			st.state, st.check = stateHeld, checkBreaker
		case m.state == stateSuspect:
			st.state, st.check = stateSuspect, checkGrace
		case m.state != "":
			st.state = m.state
		}
		if n.states[st.state]++; st.check != "" {
			n.blocked[st.check]++
		}
	}
}
