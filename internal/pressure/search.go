// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pressure

import (
	"fmt"
	"time"
)

const (
	// minPeak is the number of calls at a time below which a driver is never limited: it is not they that overload it.
	minPeak = 8
	// lost and gained are the ratios of two rates from which a limit is worse, or better, than the one before it.
	lost, gained = 0.9, 1.1
	// slow is the mean duration of a call below which a driver does not count as slowed down.
	slow = 500 * time.Millisecond
	// maxGroups bounds the groups of which a duration is known.
	maxGroups = 1000
	// enough is the fraction of successful calls with which a limit has helped.
	enough = 0.7
	// settling is how long calls that have timed out may still occupy the driver.
	settling = 2 * time.Minute
)

// result is what a round of calls has shown. All began after the last change of the limit.
type result struct {
	limit     int           // 0: none
	peak      int           // highest number of calls at a time
	rate      float64       // successful calls per second
	good      float64       // successes among the calls that succeeded, were throttled or timed out, from 0 to 1
	throttled string        // why most groups of calls count as throttled; empty if they do not
	mean      time.Duration // that a call of a typical group took
	budget    time.Duration // mean time that the calls had
	alone     time.Duration // that such a call takes almost alone; 0: unknown
	waiting   bool          // calls had to wait
}

// search looks for the lowest limit with which a driver completes as many calls. It moves by factors of two, and takes a step back that
// did not pay. A smaller step follows, and then a pause. Without a limit that helps there is none for a while: the calls of some drivers
// take long, or time out, however few there are.
type search struct {
	last     *measured                // the limit before the step to the present one; nil: no step has to be judged
	top      int                      // calls at a time when a limit was first needed
	alone    map[string]time.Duration // that a call of a group takes almost alone, of at most maxGroups
	down, up pause
	// fineDown, fineUp: the next step in this direction is small.
	fineDown, fineUp bool
	stuck            time.Time // since when a limit has not helped: too few calls succeed; zero if it helps
}

// measured is the rate of a limit.
type measured struct {
	limit int
	rate  float64
}

// pause keeps the search from a step that has not paid. It doubles each time.
type pause struct {
	until             time.Time
	length            time.Duration
	shortest, longest time.Duration
}

func (p *pause) extend(now time.Time) {
	p.length = min(max(2*p.length, p.shortest), p.longest)
	p.until = now.Add(p.length)
}

func newSearch() *search {
	return &search{
		alone: map[string]time.Duration{},
		down:  pause{shortest: 10 * time.Minute, longest: time.Hour}, up: pause{shortest: time.Minute, longest: 8 * time.Minute},
	}
}

// next returns the limit after r, 0 for none, and why calls are limited; empty if r does not show that.
func (s *search) next(r result, now time.Time) (limit int, reason string) {
	reason = s.overload(r)
	last, rate := s.last, r.rate
	s.last = nil
	down := last != nil && lower(r.limit, last.limit)
	up := last != nil && lower(last.limit, r.limit)
	// Without more calls than before, the rate is that of the demand.
	saturated := r.waiting || up && r.limit == 0 && r.peak > last.limit
	switch {
	case down && saturated && rate > 0 && rate < lost*last.rate:
		// Fewer calls at a time complete fewer. Without a limit before, a small step could be too short of calls to be judged.
		if !s.fineDown && last.limit > 0 {
			s.fineDown, s.last = true, last
			return s.below(last.limit, 1), reason
		}
		s.down.extend(now)
		return last.limit, reason
	case up && saturated && rate < gained*last.rate:
		// More calls at a time complete no more.
		if s.fineUp {
			s.up.extend(now)
		}
		s.fineUp = true
		return last.limit, reason
	case down && rate > 0 && last.rate > 0:
		s.down.length = 0
		s.up.extend(now)
		if reason == "" && rate > gained*last.rate {
			reason = fmt.Sprintf("%.3g calls per second succeed, with more at a time %.3g", rate, last.rate)
		}
		// All steps down together lose no more than one.
		rate = max(rate, last.rate)
	case up:
		s.up.length = 0
	}
	limit = s.step(r, reason != "", now)
	if limit != r.limit {
		s.last = &measured{r.limit, rate}
	}
	return limit, reason
}

// step returns the next limit to try after r, whose calls overload the driver or not.
func (s *search) step(r result, overload bool, now time.Time) int {
	if r.limit == 0 || r.good >= enough {
		s.stuck = time.Time{}
	} else if s.stuck.IsZero() {
		s.stuck = now
	}
	switch {
	case !s.stuck.IsZero() && now.Sub(s.stuck) >= settling:
		// It is not the number of calls.
		s.down.extend(now)
		return 0
	case overload && !now.Before(s.down.until):
		if r.limit == 0 && r.peak < minPeak {
			return 0
		}
		if r.limit == 0 {
			s.top, s.fineDown = r.peak, false
		}
		return s.below(r.limit, r.good)
	case !overload && r.limit > 0 && r.waiting && !now.Before(s.up.until):
		return s.above(r.limit)
	}
	return r.limit
}

// lower reports whether a is a lower limit than b.
func lower(a, b int) bool { return a != b && a != 0 && (b == 0 || a < b) }

// below returns the limit below another one, 0 for none, with which that fraction of the calls succeeds: half of it, three quarters in a
// small step, or the calls that a throttling driver has completed.
func (s *search) below(limit int, good float64) int {
	if limit == 0 {
		limit = s.top
	}
	s.fineUp = false
	switch {
	case good < 0.5:
		limit = int(float64(limit) * good)
	case s.fineDown:
		limit = limit * 3 / 4
	default:
		limit /= 2
	}
	return max(limit, 1)
}

// above returns the next higher limit.
func (s *search) above(limit int) int {
	limit *= 2
	s.fineDown = false
	if s.fineUp {
		limit = (limit*5 + 7) / 8
	}
	if limit >= s.top {
		return 0
	}
	return limit
}

// overload returns why fewer calls at a time could complete as many, or "".
func (s *search) overload(r result) string {
	switch {
	case r.throttled != "":
		return r.throttled
	case r.mean < slow:
		return ""
	case r.mean > r.budget/2:
		return fmt.Sprintf("calls take %v of the %v that they have", rounded(r.mean), rounded(r.budget))
	case r.alone > 0 && r.mean > 2*r.alone:
		return fmt.Sprintf("calls take %v, alone they took %v", rounded(r.mean), rounded(r.alone))
	}
	return ""
}

func rounded(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }

// learn has seen a successful call of a group that ran almost alone. The shortest duration counts, and is slowly forgotten.
func (s *search) learn(group string, took time.Duration) {
	alone, known := s.alone[group]
	switch {
	case !known && len(s.alone) == maxGroups:
		clear(s.alone)
	case known && took > alone:
		took = alone + (took-alone)/20
	}
	s.alone[group] = took
}
