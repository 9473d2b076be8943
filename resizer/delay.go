// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import "time"

// delay is a time until which nothing is done for target.
type delay struct {
	target string
	until  time.Time
}

// delayed returns the delay of a target that is infeasible, from now on.
func (d driver) delayed(target string, now time.Time) delay {
	return delay{target, now.Add(d.RetryIntervalMax)}
}

// wait returns the step that waits for the end of d, if that delays target at that time.
func (d delay) wait(target string, now time.Time) (wait step, delays bool) {
	return step{action: doWait, reason: stageInfeasible, until: d.until}, d.target == target && now.Before(d.until)
}

// decideExpandWait returns the step that delays the expansion to t, or false.
func (d driver) decideExpandWait(s claimState, t target) (step, bool) {
	m := s.call.Payload
	wait, delayed := m.nodeReset.wait(bytesOf(requestedSize(s.claim)), s.now)
	if delayed && resizeStatus(s.claim) == nodeInfeasible {
		return wait, true
	}
	if d.inUse == inUseAlways || d.inUse == inUseAfterError && m.inUseError {
		switch s.usage {
		case usageUnknown:
			return step{action: doWatchUsers, reason: stageInUse}, true
		case usageInUse:
			return step{action: doWaitUnused, reason: stageInUse, until: s.now.Add(d.RetryIntervalMax)}, true
		}
	}
	return d.decideSlowRetry(expand, s, t)
}

// decideSlowRetry returns the wait of an infeasible target of o, or false if there is none.
func (d driver) decideSlowRetry(o operation, s claimState, t target) (step, bool) {
	slow := s.call.Payload.slow
	if o.infeasibleTarget(s.claim) == t.key && slow.target != t.key {
		return step{action: doScheduleRetry, reason: stageInfeasible, target: t}, true
	}
	return slow.wait(t.key, s.now)
}

// scheduleRetry chooses when the operation is retried with t, which was infeasible for an earlier process.
func (a *attempt) scheduleRetry(s claimState, t target) {
	turn := a.t.restarted.ReserveN(s.now, 1).DelayFrom(s.now)
	slow := delay{t.key, retryAfterRestart(s.now, turn, a.t.c.driver.RetryIntervalMax, a.t.c.spread(a.key))}
	a.remember(0, func(m *operationMemory) { m.slow = slow })
}

// maxRestartDelay bounds the delay of the first few operations that were infeasible before a restart.
const maxRestartDelay = 10 * time.Second

// retryAfterRestart returns when an operation that was infeasible before a restart is retried: soon, because a restart may follow
// a correction of the driver, and all of them one after the other. fraction, from 0 to 1, depends on the operation; turn is the time until
// its turn.
func retryAfterRestart(now time.Time, turn, retryMax time.Duration, fraction float64) time.Time {
	delay := turn + time.Duration(fraction*float64(maxRestartDelay))
	if delay > retryMax {
		delay = time.Duration(fraction * float64(retryMax))
	}
	return now.Add(delay)
}
