// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pressure

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// minRound bounds the frequency of changes of a limit.
	minRound = time.Second
	// minCalls is the least number of calls of a round.
	minCalls = 2
)

// limiter limits the calls of one method that run at a time.
type limiter struct {
	method  string
	changed func(l *limiter, before int) // called with the lock

	mu      sync.Mutex
	limit   int // 0: none
	reason  string
	since   time.Time // of the last time that a limit was needed
	running int
	waiting []*permit      // first in, first out within a group
	served  map[string]int // by group with waiting calls: when it got the last permit
	permits int            // that were granted
	round   round
	search  *search
}

// round sums up the calls that began since the last change of the limit.
type round struct {
	number   int
	permits  int       // that were granted
	waited   bool      // a call had to wait
	began    time.Time // zero before the first call
	peak     int
	busy     float64   // seconds of calls that ran since began
	at       time.Time // of the last change of the number that runs
	calls    int       // that ended
	bad      int
	ok       int
	last     string // error of the last bad call
	took     time.Duration
	budget   time.Duration
	byGroups map[string]*tally
}

// tally counts the calls of a group, such as a StorageClass.
type tally struct {
	calls, bad int
	took       time.Duration
}

// permit is the right to one call.
type permit struct {
	limiter *limiter
	group   string
	round   int
	alone   bool // no more than one other call ran
	warm    bool // the call counts: the first ones under a limit do not show yet how long a call takes
	granted chan struct{}
}

// acquire waits until a call may run, or until one of the contexts ends. waited is false if it did not have to wait.
func (l *limiter) acquire(ctx, until context.Context, group string) (p *permit, waited bool, err error) {
	p = &permit{limiter: l, group: group, granted: make(chan struct{})}
	l.mu.Lock()
	l.waiting = append(l.waiting, p)
	l.admit()
	l.mu.Unlock()
	select {
	case <-p.granted:
		return p, false, nil
	default:
	}
	l.mu.Lock()
	l.round.waited = true
	l.mu.Unlock()
	ended := ctx
	select {
	case <-p.granted:
		return p, true, nil
	case <-until.Done():
		ended = until
	case <-ctx.Done():
	}
	l.abandon(p)
	return nil, true, fmt.Errorf("waiting for other calls of %s to end: %w", l.method, context.Cause(ended))
}

// abandon ends the wait for p, or p if it was granted at this moment.
func (l *limiter) abandon(p *permit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.waiting, p); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		l.changed(l, l.limit)
		return
	}
	l.release()
}

// admit grants permits to the first that wait. It must be called with the lock held.
func (l *limiter) admit() {
	for len(l.waiting) > 0 && (l.limit == 0 || l.running < l.limit) {
		l.grant(l.next())
	}
	l.changed(l, l.limit)
}

// grant grants p. It must be called with the lock held.
func (l *limiter) grant(p *permit) {
	l.run(1)
	l.round.peak = max(l.round.peak, l.running)
	l.round.permits++
	p.round, p.warm, p.alone = l.round.number, l.limit == 0 || l.round.permits > l.limit, l.running <= 2
	close(p.granted)
}

// exceed returns a permit that did not wait, although more calls than the limit may run until one of them ends.
func (l *limiter) exceed(group string) *permit {
	p := &permit{limiter: l, group: group, granted: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.grant(p)
	return p
}

// next removes the first permit of the group whose turn it is.
func (l *limiter) next() *permit {
	first := 0
	for i, p := range l.waiting {
		if l.served[p.group] < l.served[l.waiting[first].group] {
			first = i
		}
	}
	p := l.waiting[first]
	l.waiting = slices.Delete(l.waiting, first, first+1)
	l.permits++
	if len(l.waiting) == 0 {
		clear(l.served)
	} else {
		l.served[p.group] = l.permits
	}
	return p
}

// run changes the number of calls that run. The round begins with the first permit: no more than the limit run from then on.
func (l *limiter) run(change int) {
	now, r := time.Now(), &l.round
	switch {
	case !r.began.IsZero():
		r.busy += float64(l.running) * now.Sub(r.at).Seconds()
	case change > 0:
		r.began = now
	}
	r.at = now
	l.running += change
}

// release ends a permit. It must be called with the lock held.
func (l *limiter) release() {
	l.run(-1)
	if l.running == 0 && len(l.waiting) == 0 {
		l.restart() // a pause is no part of a round
	}
	l.admit()
}

// cancel ends a permit without a call.
func (p *permit) cancel() {
	p.limiter.mu.Lock()
	defer p.limiter.mu.Unlock()
	p.limiter.release()
}

// end ends a permit after its call, which took that long and had that budget.
func (p *permit) end(took, budget time.Duration, err error) {
	l := p.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.alone && err == nil {
		l.search.learn(p.group, took)
	}
	if p.round == l.round.number && p.warm {
		l.round.count(p.group, took, budget, err)
		l.decide()
	}
	l.release()
}

func (r *round) count(group string, took, budget time.Duration, err error) {
	if r.byGroups == nil {
		r.byGroups = map[string]*tally{}
	}
	t := r.byGroups[group]
	if t == nil {
		t = &tally{}
		r.byGroups[group] = t
	}
	r.calls++
	r.took += took
	r.budget += budget
	t.calls++
	t.took += took
	switch {
	case err == nil:
		r.ok++
	case isOverload(err):
		r.bad++
		t.bad++
		r.last = status.Convert(err).Message()
	}
}

// decide ends the round if it has enough calls. It must be called with the lock held, before the release of the last call.
func (l *limiter) decide() {
	now := time.Now()
	r := l.round
	elapsed := now.Sub(r.began)
	if r.calls < max(r.peak, minCalls) || elapsed < minRound {
		return
	}
	r.busy += float64(l.running) * now.Sub(r.at).Seconds()
	mean, group := r.typical()
	before := l.limit
	limit, reason := l.search.next(result{
		limit: l.limit, peak: r.peak, rate: r.rate(elapsed), good: r.good(), throttled: r.throttled(),
		mean: mean, alone: l.search.alone[group], budget: r.budget / time.Duration(r.calls), waiting: r.waited,
	}, now)
	l.limit = limit
	if reason != "" {
		l.reason = reason
	}
	if before == 0 {
		l.since = now
	}
	l.restart()
	l.changed(l, before)
}

// rate returns the successful calls per second: the average number that ran, by the mean duration of a call (Little's law). The number
// that ended would depend on when the round ends.
func (r *round) rate(elapsed time.Duration) float64 {
	return float64(r.ok) * r.busy / elapsed.Seconds() / r.took.Seconds()
}

func (l *limiter) restart() { l.round = round{number: l.round.number + 1, waited: len(l.waiting) > 0} }

// throttled returns why the calls of most groups count as throttled, or "". The trouble of one StorageClass or one node is none of
// the driver.
func (r *round) throttled() string {
	throttled := 0
	for _, t := range r.byGroups {
		if 10*t.bad >= t.calls {
			throttled++
		}
	}
	if r.bad == 0 || 2*throttled <= len(r.byGroups) {
		return ""
	}
	return fmt.Sprintf("%d of %d calls were throttled or timed out: %s", r.bad, r.calls, r.last)
}

// good returns the successes among the calls that succeeded, were throttled or timed out.
func (r *round) good() float64 {
	if r.bad == 0 {
		return 1
	}
	return float64(r.ok) / float64(r.ok+r.bad)
}

// typical returns the median of the groups' mean durations of a call, the lower one of two, and its group: the trouble of one
// StorageClass or one node is none of the driver.
func (r *round) typical() (mean time.Duration, group string) {
	meanOf := func(group string) time.Duration {
		return r.byGroups[group].took / time.Duration(r.byGroups[group].calls)
	}
	groups := slices.SortedFunc(maps.Keys(r.byGroups), func(a, b string) int {
		return cmp.Or(cmp.Compare(meanOf(a), meanOf(b)), cmp.Compare(a, b))
	})
	group = groups[(len(groups)-1)/2]
	return meanOf(group), group
}

// throttleWords are parts of the errors with which clouds throttle, in lower case. Drivers return them with various codes.
var throttleWords = []string{"throttl", "rate limit", "ratelimit", "request limit", "requestlimitexceeded", "too many requests",
	"toomanyrequests", "slow down", "slowdown"}

// isOverload reports whether err may mean that the driver has too many calls. Unavailable alone does not: a restart of the driver ends
// all calls with it.
func isOverload(err error) bool {
	switch status.Code(err) {
	case codes.DeadlineExceeded, codes.ResourceExhausted:
		return true
	}
	text := strings.ToLower(status.Convert(err).Message())
	return slices.ContainsFunc(throttleWords, func(word string) bool { return strings.Contains(text, word) })
}
