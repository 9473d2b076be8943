// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// throttle is the rate limit of a driver, or of the cloud behind it: a token bucket for calls that change something.
type throttle struct {
	every time.Duration // a call; zero: no limit
	waits bool          // a call waits for its turn, else it is refused at once
	calls int           // that may run now
	since time.Time     // when the last one was added
	// refused are the refusals in a row of each call. Attempts that are repeated at the same times could be refused without end.
	refused map[string]int
}

// mostRefusals is the number of refusals after which a call runs without a turn.
const mostRefusals = 5

// burst is the number of calls that a throttle lets through at a time.
const burst = 2

// pickThrottle adds a throttle to one in four histories, and to some of them so many claims that the product limits its calls.
func (s *simulation) pickThrottle(size *scale) {
	pick := s.choices.Pick
	if size.features.Topolvm || pick(4) < 3 {
		return
	}
	s.throttle.refused = map[string]int{}
	s.throttle.every = []time.Duration{time.Second / 2, time.Second, 3 * time.Second}[pick(3)]
	s.throttle.waits = pick(2) == 1
	if pick(2) == 1 {
		size.claims, size.threads = 10, 10
	}
}

// isThrottled reports whether the driver counts o.
func (t *throttle) isThrottled(o *operation) bool {
	return t.every > 0 && o.kind == call && o.term != "" && !o.canceled()
}

// free reports whether a call may run now.
func (t *throttle) free() bool {
	if t.since.IsZero() {
		t.calls, t.since = burst, time.Now()
	}
	added := time.Since(t.since) / t.every
	t.calls, t.since = min(burst, t.calls+int(added)), t.since.Add(added*t.every)
	return t.calls > 0
}

// holdsCall reports whether o waits for its turn.
func (s *simulation) holdsCall(o *operation) bool {
	return s.throttle.waits && s.throttle.isThrottled(o) && !s.throttle.free()
}

// refusesCall refuses o if it has no turn, and reports whether it did. The driver finds what it has created without a turn: after a
// refusal, the product assumes that nothing exists.
func (s *simulation) refusesCall(o *operation) bool {
	t, key := &s.throttle, o.method+" "+o.volume
	switch {
	case !t.isThrottled(o):
		return false
	case t.free():
		t.calls--
		delete(t.refused, key)
		return false
	case t.refused[key] == mostRefusals:
		delete(t.refused, key)
		return false
	case strings.HasPrefix(o.method, "Create") && (s.has(o.volume) || s.runsLate(o)):
		return false
	}
	t.refused[key]++
	s.happens("a call is throttled")
	s.checker.refusals.Add(1)
	s.record("%s %s, which is throttled", o.replica.client, o.name)
	s.gate.proceed(o, verdict{err: status.Error(codes.ResourceExhausted, "simulated: throttled")})
	return true
}

// runsLate reports whether a call equal to o, whose client has given up, may still take effect.
func (s *simulation) runsLate(o *operation) bool {
	for _, other := range s.gate.begin(s.step) {
		if other.method == o.method && other.volume == o.volume && other.canceled() {
			return true
		}
	}
	return false
}
