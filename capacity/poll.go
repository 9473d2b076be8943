// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"hash/fnv"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// schedule holds when the driver is called for a pair.
type schedule struct {
	due      time.Time // zero: immediately
	refresh  bool      // an event may have changed the response
	rounds   int       // successful calls
	answered time.Time // last successful call; zero: none
	object   types.UID // the object that agreed with the response then; empty: there was none
	failing  bool      // the last call, or the write of its response, failed
}

// driftRounds is the number of shortened first intervals of a pair.
const driftRounds = 4

// nextPoll returns when a pair with that many earlier calls is due again. All pairs start
// at the same time. The first intervals are shortened by up to a half, differently for
// each pair, so that later calls spread over the interval.
func nextPoll(now time.Time, interval time.Duration, p pair, rounds int) time.Time {
	if rounds < driftRounds {
		h := fnv.New32a()
		fmt.Fprintf(h, "%s/%s/%d", p.Class, p.Segment, rounds)
		interval -= time.Duration(float64(interval) / 2 * float64(h.Sum32()) / (1 << 32))
	}
	return now.Add(interval)
}

type schedules map[pair]*schedule

// of returns the schedule of p. It adds one if there is none.
func (s schedules) of(p pair) *schedule {
	if s[p] == nil {
		s[p] = &schedule{}
	}
	return s[p]
}

// requestRefresh makes pairs due and returns those to enqueue now. Pairs in the removal
// grace are due when a node returns.
func (s *state) requestRefresh(pairs []pair) (now []pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range pairs {
		if s.desired(p) {
			s.schedules.of(p).refresh = true
			now = append(now, p)
		} else if sched := s.schedules[p]; sched != nil {
			sched.refresh = true
		}
	}
	return now
}

// callStarted clears the refresh of p. An event during the call sets it again.
func (s *state) callStarted(p pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedules.of(p).refresh = false
}

// callSucceeded records that the object of p agrees with the driver until next.
func (s *state) callSucceeded(p pair, object types.UID, next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sched := s.schedules.of(p)
	sched.due, sched.answered, sched.object, sched.failing = next, s.now(), object, false
	sched.rounds++
}

// callFailed records that the call for p, or the write of its response, failed.
func (s *state) callFailed(p pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sched := s.schedules[p]; sched != nil {
		sched.refresh, sched.failing = true, true
	}
}

// rank returns the priority of p, lowest first: pairs that were never published, then
// changed ones, then polls and failing pairs. Calls that time out must not delay others.
func (s *state) rank(p pair) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch sched := s.schedules[p]; {
	case sched != nil && sched.failing:
		return 2
	case len(s.objects[p]) == 0 && (sched == nil || sched.rounds == 0):
		return 0
	case sched != nil && sched.refresh:
		return 1
	default:
		return 2
	}
}
