// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"math"
	"sync"

	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// suspension is the time for which a process is suspended, and another replica may lead. Its requests and calls that were sent take
// effect meanwhile, and the others when it continues. It receives no response and no event. Unlike those of a suspended process, its
// timers fire: what they lead to waits at the gate until the process continues, such as the end of a term whose Lease has expired.
type suspension struct {
	mu      sync.Mutex
	ended   chan struct{} // closed when the process continues; nil: it is not suspended
	untilAt int           // the step at which it continues; zero: it is not suspended
}

func (p *suspension) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended, p.untilAt = make(chan struct{}), math.MaxInt
}

func (p *suspension) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.ended)
	p.ended, p.untilAt = nil, 0
}

// wait returns a channel that is closed when the process continues; nil: it is not suspended.
func (p *suspension) wait() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

// isSuspended reports whether r is suspended at a step.
func (r *replica) isSuspended(step int) bool { return step < r.suspension.untilAt }

// suspend suspends r. Each of its requests and calls may have been sent.
func (s *simulation) suspend(r *replica) {
	s.record("%s is suspended", r.client)
	s.loses(r)
	r.suspension.begin()
	for _, o := range s.gate.begin(s.step) {
		leaves := o.kind == request || o.kind == call && s.driver != nil
		if o.replica == r && leaves && s.choices.Pick(2) == 0 {
			o.sent = true
			s.record("%s has sent %s", r.client, o.name)
		}
	}
	s.perhapsTakeover()
	r.suspension.untilAt = s.step + 5 + s.choices.Pick(30)
}

// delayExpiry lets the end of a term wait if r is suspended, also for a while after it continues: other goroutines of r may run first.
func (s *simulation) delayExpiry(r *replica) {
	if r.suspension.wait() != nil {
		s.gate.wait(context.Background(), &operation{replica: r, kind: expiry, name: "notices that a Lease has expired"})
	}
}

// resume continues r. Each request that it sends now, and each response that has arrived, may be processed before r notices that its
// context has ended.
func (s *simulation) resume(r *replica) {
	s.record("%s continues", r.client)
	if lease := s.lease(provisioner.LeaseName(s.scale.driver())); lease != nil && ptr.Deref(lease.Spec.HolderIdentity, "") != r.name {
		s.happens("a suspended process continues while another replica leads")
	}
	r.suspension.untilAt = 0
	for _, o := range s.gate.begin(s.step) {
		o.excused = o.excused || o.replica == r && o.kind == call
		if o.replica != r || !o.expired.Load() || s.choices.Pick(2) == 0 {
			continue
		}
		s.record("%s %s, late", r.client, o.name)
		s.happens("a suspended process continues with a request or response of an ended context")
		s.gate.proceed(o, verdict{})
		s.settle()
	}
	s.reconnected(r)
	r.suspension.end()
	s.settle()
}

// outlasts waits, after the end of the context of o, until its process continues. It returns true if the schedule has continued o until
// then.
func (o *operation) outlasts() (verdict, bool) {
	resumed := o.replica.suspension.wait()
	if resumed == nil || o.kind != request && o.kind != response {
		return verdict{}, false
	}
	o.expired.Store(true)
	select {
	case v := <-o.resume:
		v.late = true
		return v, true
	case <-resumed:
	case <-o.replica.dead:
	}
	return verdict{}, false
}

// isLate reports whether the client of r was suspended and continues with its response, although its context has ended.
func (s *simulation) isLate(r apiserver.Request) bool {
	_, late := s.late.Load(r.ID)
	return late
}

// observeLate returns what [simulation.observe] returns, for a write that was sent, or took effect, after the context of its client had
// ended.
func (s *simulation) observeLate(o *operation, r apiserver.Request) func(apiserver.Result) (received func()) {
	return func(result apiserver.Result) func() {
		s.checker.writes.Add(1)
		s.tookEffectLate(o, r, result)
		return nothing
	}
}
