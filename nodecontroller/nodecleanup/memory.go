package nodecleanup

import (
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// memory is what a term remembers about a lost host. Nothing in it must outlive the term.
type memory struct {
	steps     map[string]step    // of its volumes, by name; nil: not gathered yet
	sent      map[types.UID]bool // objects whose deletion was sent
	missing   bool
	pending   bool
	resources bool // custom resources of its Node were found
	forbidden bool // a permission is missing
	state     state
}

// remember changes the memory of a host.
func (t *term) remember(host string, edit func(*memory)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.memories[host]
	if m == nil {
		m = &memory{sent: map[types.UID]bool{}}
		t.memories[host] = m
	}
	edit(m)
}

// recall returns a copy of the memory of a host, without the steps.
func (t *term) recall(host string) (m memory, gathered bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known := t.memories[host]; known != nil {
		m, gathered = *known, known.steps != nil
		m.sent = maps.Clone(m.sent)
	}
	m.steps = nil
	return m, gathered
}

// forget ends the memory of a host.
func (t *term) forget(host string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.memories, host)
}

// rememberHost remembers what the caches know about a host.
func (t *term) rememberHost(h host) {
	now := time.Now()
	t.remember(h.value, func(m *memory) {
		m.steps, m.missing = make(map[string]step, len(h.volumes)), h.state == missing
		m.pending = h.state != present && t.policy.pending(h, now)
		for _, v := range h.volumes {
			if v.hosts[0].value == h.value { // a volume of several hosts counts once
				m.steps[v.pv.Name] = t.policy.nextStep(v, now)
			}
		}
	})
}

// rememberStep remembers the step of a volume.
func (t *term) rememberStep(h host, v volume, st step) {
	t.remember(h.value, func(m *memory) {
		if _, ok := m.steps[v.pv.Name]; ok {
			m.steps[v.pv.Name] = st
		}
	})
}

// count adds a host to the gauges.
func (m *memory) count(n *counts) {
	if m.missing && len(m.steps) > 0 {
		n.missing++
	}
	if m.forbidden {
		n.blocked[checkForbidden]++
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
