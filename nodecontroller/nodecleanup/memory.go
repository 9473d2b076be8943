// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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
	host     *host                   // as the caches last knew it; nil: not gathered yet
	pending  bool                    // see [Policy.pending]
	keepers  []string                // other hosts, see [volume.kept]: without them, it may be pending
	planned  bool                    // its removal was planned, see [LostNode.Planned]
	sent     map[types.UID]bool      // objects whose deletion was sent
	failed   map[types.UID]check     // of the last attempt at a volume
	retry    map[types.UID]time.Time // of volumes that the caches know differently from the API server
	resource bool                    // custom resources of its Node were found
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
		m = &memory{sent: map[types.UID]bool{}, failed: map[types.UID]check{}, retry: map[types.UID]time.Time{}}
		r.hosts[host] = m
	}
	edit(m)
}

// recall returns a copy of the memory of a host.
func (r *memories) recall(host string) (m memory) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.hosts[host]; known != nil {
		m = *known
		m.sent, m.retry, m.failed = maps.Clone(m.sent), maps.Clone(m.retry), nil
	}
	return m
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
		record, _ := r.policy.recordOf(h, cluster{now: now})
		m.host, m.pending = &h, h.state != present && r.policy.pending(h, now)
		m.planned = record.Planned
		clear(m.failed)
		m.keepers = nil
		for _, v := range h.volumes {
			m.keepers = sorted(m.keepers, v.kept())
		}
	})
}

// withResources returns the hosts that have custom resources.
func (r *memories) withResources() (hosts []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for host, m := range r.hosts {
		if m.resource {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// count adds the volumes of all hosts to the gauges. c is the cluster.
func (r *memories) count(n *counts, c cluster) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.hosts {
		if m.host == nil {
			continue
		}
		of, volumes := r.policy.decideHost(*m.host, c, true).state, 0
		for _, v := range m.host.volumes {
			if v.hosts[0].value != m.host.value { // a volume of several hosts counts once
				continue
			}
			volumes++
			st := r.policy.nextStep(v, c.now)
			switch failed := m.failed[v.pv.UID]; {
			case of == stateHeld:
				st.state, st.check = of, checkBreaker
			case of == stateSuspect:
				st.state, st.check = of, checkGrace
			case of != "":
				st.state = of
			case failed != "":
				st.check = failed
			}
			if st.check == checkPolicy && !r.policy.Deletes() { // no deletion is expected
				st.check = ""
			}
			n.states[st.state]++
			if st.check != "" {
				n.blocked[st.check]++
			}
		}
		if m.host.state == missing && volumes > 0 {
			n.missing++
		}
	}
}
