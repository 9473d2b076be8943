// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
)

// ErrLost is the cancellation cause of a term whose Lease could not be renewed in time, or was
// acquired by another replica. A [Lead] that returns it releases the Lease, and the election begins again.
var ErrLost = errors.New("lost the Lease")

// Config configures the timing of leader election.
type Config struct {
	// LeaseDuration is the time after which a standby may acquire a Lease that is not renewed.
	LeaseDuration time.Duration
	// RenewDeadline is the time for which a leader retries to renew the Lease before it stops.
	RenewDeadline time.Duration
	// RetryPeriod is the time between two renewals of the Lease, and between two reads of a standby that cannot watch it.
	RetryPeriod time.Duration
}

// DefaultConfig returns the defaults of the flags.
func DefaultConfig() Config {
	return Config{LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 5 * time.Second}
}

// Validate returns all errors in c.
func (c Config) Validate() error {
	var errs []error
	if c.RetryPeriod <= 0 {
		errs = append(errs, fmt.Errorf("--leader-election-retry-period: must be positive, got %v", c.RetryPeriod))
	}
	if least := time.Duration(leaderelection.JitterFactor * float64(c.RetryPeriod)); c.RenewDeadline <= least {
		errs = append(errs, fmt.Errorf(
			"--leader-election-renew-deadline: must be more than %v (%v × --leader-election-retry-period), got %v",
			least, leaderelection.JitterFactor, c.RenewDeadline))
	}
	if c.wholeSeconds() <= c.RenewDeadline {
		errs = append(errs, fmt.Errorf(
			"--leader-election-lease-duration: must be more than %v (--leader-election-renew-deadline) in whole seconds, got %v",
			c.RenewDeadline, c.LeaseDuration))
	}
	return errors.Join(errs...)
}

// wholeSeconds returns the duration that a Lease has in the API.
func (c Config) wholeSeconds() time.Duration { return c.LeaseDuration.Truncate(time.Second) }

// Lead is the work of the leader during one term. It must return soon after the end of ctx, whose
// cause is [ErrLost] or the cause of [Candidate.Campaign]'s context.
type Lead func(ctx context.Context) error

// Candidate is this replica in the election of one Lease.
type Candidate struct {
	cfg     Config
	lock    *observedLock
	watch   watchLease
	health  *leaderelection.HealthzAdaptor
	elector atomic.Pointer[leaderelection.LeaderElector] // of the current term; nil between terms
}

// Status describes a candidate for /statusz.
type Status struct {
	Lease    string    `json:"lease"` // namespace/name
	Identity string    `json:"identity"`
	Holder   string    `json:"holder,omitempty"` // as last observed; empty without a holder
	Leader   bool      `json:"leading"`
	Since    time.Time `json:"since,omitzero"` // when this replica became leader
}

// Status returns the current state of c.
func (c *Candidate) Status() Status {
	s := Status{Lease: c.lock.Describe(), Identity: c.lock.Identity(), Leader: c.lock.leading.Load()}
	if s.Leader {
		s.Since = time.Unix(0, c.lock.since.Load())
	}
	if c.elector.Load() != nil {
		s.Holder, _ = c.lock.holder.Load().(string)
	}
	return s
}

// tolerance is the time after the expiry of its Lease after which a leader fails [Candidate.Check].
const tolerance = 20 * time.Second

// NewCandidate returns a candidate for the Lease of lock.
func NewCandidate(cfg Config, lock *resourcelock.LeaseLock, metrics *Metrics) (*Candidate, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	observed := &observedLock{Interface: lock, metrics: metrics, duration: cfg.wholeSeconds(), delay: func() {}}
	metrics.slowpath.WithLabelValues(observed.name())
	return &Candidate{cfg: cfg, lock: observed, watch: watchOf(lock), health: leaderelection.NewLeaderHealthzAdaptor(tolerance)}, nil
}

// DelayExpiry has delay called when the Lease of a term has expired, before the term ends. It may block, as the timers of a suspended
// process do. Call it before [Candidate.Campaign].
func (c *Candidate) DelayExpiry(delay func()) { c.lock.delay = delay }

// Check fails if this replica is leader and has not renewed the Lease for its duration plus 20 s. For client-go, also a replica
// that only reads its own expired Lease is leader.
func (c *Candidate) Check(r *http.Request) error {
	_, acquired := c.lock.written()
	if !acquired {
		return nil
	}
	return c.health.Check(r)
}

// Campaign tries to acquire the Lease until ctx ends, and calls lead in each term. If lead returns
// before the end of its context with another error than [ErrLost], Campaign returns its error. If lead returns
// ErrLost, the next term begins after a delay, which doubles from the retry period to five minutes, and is short again
// after lead has worked for longer than that. The Lease is released before Campaign returns.
func (c *Candidate) Campaign(ctx context.Context, lead Lead) error {
	status := c.lock.metrics.status
	status.WithLabelValues(c.lock.name()).Set(0) // exported before the first term; without a campaign, no leader is missing
	defer status.DeleteLabelValues(c.lock.name())
	delay := c.cfg.RetryPeriod
	for {
		var began time.Time
		released, err := c.term(ctx, func(term context.Context) error {
			began = time.Now()
			return lead(term)
		})
		switch {
		case ctx.Err() != nil:
			return nil
		case !errors.Is(err, ErrLost):
			return err
		}
		log := klog.FromContext(ctx).WithValues("lease", c.lock.Describe(), "cause", err.Error())
		if time.Since(began) > maxDelay {
			delay = c.cfg.RetryPeriod
		}
		if !released {
			log.Info("Lost the Lease, now a standby")
			continue
		}
		log.Info("Released the Lease, campaigning again", "retryAfter", delay.String())
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
		delay = min(2*delay, maxDelay)
	}
}

// maxDelay is the longest delay after a term that lead ended with [ErrLost].
const maxDelay = 5 * time.Minute

// term waits for the Lease and calls lead. It returns after lead, with the Lease released or lost. released reports that
// lead has ended the term, with err.
func (c *Candidate) term(ctx context.Context, lead Lead) (released bool, err error) {
	// The Lease is renewed until lead returns, even after the end of ctx.
	renewing, stopRenewing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRenewing()
	held, loseLease := context.WithCancelCause(context.WithoutCancel(ctx))
	defer loseLease(nil)
	lost := fmt.Errorf("%w %s", ErrLost, c.lock.Describe())
	term, endTerm := context.WithCancelCause(WithLease(ctx, Lease{Lost: held, Held: c.lock.held(lost)}))
	defer endTerm(nil)
	lose := func() { loseLease(lost); endTerm(lost) }
	c.lock.begin()
	var result error
	done := make(chan struct{}) // closed when lead has returned, if it was called
	standby := &standbyLock{observedLock: c.lock, watch: c.watch, period: c.cfg.RetryPeriod}
	defer standby.stop()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: standby, Name: c.lock.Describe(), WatchDog: c.health,
		LeaseDuration: c.cfg.LeaseDuration, RenewDeadline: c.cfg.RenewDeadline, RetryPeriod: c.cfg.RetryPeriod,
		// client-go would release the Lease while lead is running.
		ReleaseOnCancel: false,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) {
				defer close(done)
				defer stopRenewing()
				defer c.lock.lead()()
				defer c.lock.limit(lose)()
				if ctx.Err() == nil { // else it was acquired after the end of ctx
					result = lead(term)
				}
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return false, fmt.Errorf("creating the leader elector for Lease %s: %w", c.lock.Describe(), err)
	}
	c.observe(elector)
	defer c.observe(nil) // it still regards itself as leader, and nothing renews the Lease
	// If the Lease was never acquired, lead does not run and cannot call stopRenewing. IsLeader does not help: it is also
	// true for a Lease that this replica held before a restart of its container.
	defer context.AfterFunc(ctx, func() {
		if _, acquired := c.lock.written(); !acquired {
			stopRenewing()
		}
	})()
	elector.Run(renewing)
	expired := renewing.Err() == nil // Run returned because the Lease could not be renewed
	if expired {
		lose()
	}
	tried, acquired := c.lock.written()
	if acquired {
		<-done
	}
	if tried { // a write whose response is missing may have acquired the Lease
		c.release(ctx)
	}
	if expired || context.Cause(term) == lost {
		return false, lost
	}
	return true, result
}

// observe sets the elector of the current term, nil between terms, for [Candidate.Status] and [Candidate.Check].
func (c *Candidate) observe(elector *leaderelection.LeaderElector) {
	c.health.SetLeaderElection(elector)
	c.elector.Store(elector)
}

// release releases the Lease if this replica still holds it, so that a standby can acquire it
// immediately.
func (c *Candidate) release(ctx context.Context) {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.RenewDeadline)
	defer cancel()
	// The API server may still process a renewal that was canceled.
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		record, _, err := c.lock.Get(ctx)
		if err != nil || record.HolderIdentity != c.lock.Identity() {
			return err
		}
		now := metav1.Now()
		return c.lock.Update(ctx, resourcelock.LeaderElectionRecord{
			LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now,
		})
	})
	if err != nil {
		log.Info("Failed to release Lease; other replicas wait until it expires", "lease", c.lock.Describe(), "err", err)
	}
}
