// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
)

// pass deletes the due claims, volumes and custom resources of one host.
type pass struct {
	*term
	h host
}

// clean deletes everything due of the host. next is the time to continue, zero if everything was handled.
func (p pass) clean(ctx context.Context) (next time.Time, err error) {
	var errs []error
	for _, v := range shuffled(p.h.volumes) {
		at, full, err := p.cleanVolume(ctx, v)
		next = earliest(next, at)
		errs = append(errs, p.failedVolume(v, err))
		if full || err != nil && !isAnswer(err) {
			return next, errors.Join(errs...)
		}
	}
	if len(p.c.resources) > 0 {
		next, err = p.cleanHostResources(ctx, next)
	}
	return next, errors.Join(append(errs, err)...)
}

// cleanHostResources deletes the custom resources of a host once its volumes permit it.
func (p pass) cleanHostResources(ctx context.Context, next time.Time) (time.Time, error) {
	when := ResourceWhen("")
	if p.h.state == deleting {
		when = WhenNodeTerminating
	}
	at := time.Time{}
	why, err := p.keepsResources(ctx, p.c.volumes.List())
	if why == "" && err == nil {
		why, at, err = p.cleanResources(ctx, when)
	}
	if why != "" {
		klog.FromContext(ctx).V(2).Info("Custom resources are kept", "reason", why)
		p.remember(p.h.value, func(m *memory) { m.resource = false })
		if p.h.state == missing {
			next = earliest(next, time.Now().Add(later))
		}
	}
	return earliest(next, at), err
}

// cleanVolume takes the next steps for a volume. full means that the rate limit is used up.
func (p pass) cleanVolume(ctx context.Context, v volume) (next time.Time, full bool, err error) {
	for range maxRounds {
		st := p.policy.nextStep(v, time.Now())
		p.c.notify.step(v, st)
		switch {
		case v.unread != nil:
			return time.Time{}, false, v.unread
		case p.h.state == deleting && st.action != doDeleteClaim: // the rest follows without the Node, which need not wait for it
			return time.Time{}, false, nil
		case !st.action.deletes():
			return st.next, false, nil
		case p.h.state == deleting && p.leftToOthers(ctx, v):
			return time.Time{}, false, nil
		}
		if at := p.c.tokens(time.Now()); limited(v.hosts) && !at.IsZero() {
			p.failed(v, checkRate)
			return at, true, nil
		}
		if at := p.recall(p.h.value).retry[v.pv.UID]; time.Now().Before(at) {
			return at, false, nil
		}
		r, err := p.remove(ctx, v, st.action)
		switch {
		case err != nil:
			return time.Time{}, false, err
		case len(r.reasons) > 0:
			p.failed(v, r.reasons[0].check)
			if r.reasons[0].check != checkRate && r.reasons[0].check != checkLock {
				p.c.notify.skipped(v, r.reasons[0].name, r.reasons[0].String())
			}
			return p.retryAt(r.reasons), false, nil
		case !r.done: // the API server knows something else than the caches
			p.c.notify.step(v, r.step)
			next = time.Now().Add(stale)
			p.remember(p.h.value, func(m *memory) { m.retry[v.pv.UID] = next })
			return next, false, nil
		case st.action == doDeleteClaim:
			return time.Time{}, false, nil
		}
		if v, err = p.reread(ctx, v); err != nil || v.pv == nil {
			return time.Time{}, false, err
		}
	}
	return time.Time{}, false, nil
}

// remove takes one step for a volume, unless the caches already know a reason against it.
func (p pass) remove(ctx context.Context, v volume, want action) (result, error) {
	if reasons := p.policy.mayClean(v.target(), p.cachedCluster(ctx)); len(reasons) > 0 {
		return result{reasons: reasons}, nil
	}
	if p.h.state == missing {
		if err := p.list(ctx, later); err != nil {
			return result{}, err
		}
	}
	r, err := p.cleaner.remove(ctx, v, want)
	if r.done && want == doDeleteClaim {
		p.claims.MarkDeleted(v.claim) // the custom resources may follow in the same pass
	} else if r.done {
		p.remember(p.h.value, func(m *memory) { m.sent[v.pv.UID] = true })
	}
	return r, err
}

// reread returns a volume after a write to it.
func (p pass) reread(ctx context.Context, v volume) (volume, error) {
	pv, err := p.live.volume(ctx, v.pv.Name)
	switch {
	case err != nil:
		return v, err
	case pv == nil || pv.UID != v.pv.UID:
		p.volumes.MarkDeleted(v.pv)
	default:
		p.volumes.Observe(pv)
	}
	again, err := p.cached.volume(ctx, v.pv.Name)
	again.sent = true
	return again, err
}

// failed remembers the check that an attempt at a volume has failed.
func (p pass) failed(v volume, ck check) {
	p.remember(p.h.value, func(m *memory) { m.failed[v.pv.UID] = ck })
}

// leftToOthers reports whether a volume of h has other hosts that may not be cleaned up. The orphan
// path cleans it up after them, so the Node of h need not wait.
func (p pass) leftToOthers(ctx context.Context, v volume) bool {
	others := slices.DeleteFunc(slices.Clone(v.hosts), func(o host) bool { return o.value == p.h.value })
	return len(others) > 0 && len(p.policy.mayClean(target{hosts: others}, p.cachedCluster(ctx))) > 0
}

// failedVolume reports a refusal of a request for a volume, and returns err.
func (p pass) failedVolume(v volume, err error) error {
	if apierrors.IsForbidden(err) {
		p.failed(v, checkForbidden)
	}
	if isRefusal(err) {
		p.c.notify.refused(v.pv, "", err)
	}
	return err
}

// retryAt returns the time of the next attempt after a failed check.
func (p pass) retryAt(reasons []reason) time.Time {
	now := time.Now()
	switch reasons[0].check {
	case checkRate:
		return earliest(p.c.tokens(now), now.Add(later))
	case checkLock:
		return now.Add(soon)
	}
	return now.Add(later)
}
