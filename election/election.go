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
	"k8s.io/klog/v2"
)

// ErrLost is the cause of the end of a term whose Lease could not be renewed in
// time, or was taken by somebody else.
var ErrLost = errors.New("lost the Lease")

// Config is what an operator may set.
type Config struct {
	// LeaseDuration is how long others wait for a holder that does not renew.
	LeaseDuration time.Duration
	// RenewDeadline is how long a holder that cannot renew goes on.
	RenewDeadline time.Duration
	// RetryPeriod is the time between two attempts to win or to renew.
	RetryPeriod time.Duration
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 5 * time.Second}
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	if c.RetryPeriod <= 0 {
		errs = append(errs, fmt.Errorf("--leader-election-retry-period: must be positive, got %v", c.RetryPeriod))
	}
	if least := time.Duration(leaderelection.JitterFactor * float64(c.RetryPeriod)); c.RenewDeadline <= least {
		errs = append(errs, fmt.Errorf("--leader-election-renew-deadline: must be more than %v, which is %v of --leader-election-retry-period, got %v", least, leaderelection.JitterFactor, c.RenewDeadline))
	}
	if c.LeaseDuration <= c.RenewDeadline {
		errs = append(errs, fmt.Errorf("--leader-election-lease-duration: must be more than --leader-election-renew-deadline, which is %v, got %v", c.RenewDeadline, c.LeaseDuration))
	}
	return errors.Join(errs...)
}

// Lead is the work of one term. It returns soon after ctx ends; the cause of the end
// is [ErrLost], or that of the context given to [Candidate.Campaign].
type Lead func(ctx context.Context) error

// Candidate stands for one Lease.
type Candidate struct {
	cfg    Config
	lock   *observedLock
	health *leaderelection.HealthzAdaptor
	// elector is that of the running term; nil before the first.
	elector atomic.Pointer[leaderelection.LeaderElector]
}

// Status is where a candidate stands, for people who look at the process.
type Status struct {
	Lease    string    `json:"lease"` // namespace/name
	Identity string    `json:"identity"`
	Holder   string    `json:"holder,omitempty"` // as far as this replica knows; "" for nobody
	Leader   bool      `json:"leading"`
	Since    time.Time `json:"since,omitzero"` // when this replica began to lead
}

// Status is where c stands now.
func (c *Candidate) Status() Status {
	s := Status{Lease: c.lock.Describe(), Identity: c.lock.Identity(), Leader: c.lock.leading.Load()}
	if s.Leader {
		s.Since = time.Unix(0, c.lock.since.Load())
	}
	if elector := c.elector.Load(); elector != nil {
		s.Holder = elector.GetLeader()
	}
	return s
}

// tolerance is how much later than the end of its Lease a holder that has not
// noticed counts as stuck.
const tolerance = 20 * time.Second

// NewCandidate makes a candidate for the Lease of lock.
func NewCandidate(cfg Config, lock resourcelock.Interface, metrics *Metrics) (*Candidate, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	observed := &observedLock{Interface: lock, metrics: metrics}
	metrics.status.WithLabelValues(observed.name()).Set(0) // so that both are there before the first term
	metrics.slowpath.WithLabelValues(observed.name())
	return &Candidate{cfg: cfg, lock: observed, health: leaderelection.NewLeaderHealthzAdaptor(tolerance)}, nil
}

// Check is an error while this replica believes to hold the Lease and has not
// renewed it for longer than its duration and 20 s.
func (c *Candidate) Check(r *http.Request) error { return c.health.Check(r) }

// Campaign stands for the Lease until ctx ends, and runs lead whenever it is won.
// A term that was lost is followed by another try. The error is that of lead when
// it returned by itself, else nil; the Lease is released in both cases.
func (c *Candidate) Campaign(ctx context.Context, lead Lead) error {
	for {
		err := c.term(ctx, lead)
		switch {
		case ctx.Err() != nil:
			return nil
		case !errors.Is(err, ErrLost):
			return err
		}
		klog.FromContext(ctx).Info("Lost the Lease, waiting for it again", "lease", c.lock.Describe())
	}
}

// term stands for the Lease once. It returns after lead has, with the Lease given
// up or lost.
func (c *Candidate) term(ctx context.Context, lead Lead) error {
	// The Lease is renewed for as long as lead runs, also after ctx has ended.
	holding, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	term, endTerm := context.WithCancelCause(ctx)
	defer endTerm(nil)
	var began atomic.Bool
	var result error
	done := make(chan struct{}) // closed when lead has returned, if it was called
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: c.lock, Name: c.lock.Describe(), WatchDog: c.health,
		LeaseDuration: c.cfg.LeaseDuration, RenewDeadline: c.cfg.RenewDeadline, RetryPeriod: c.cfg.RetryPeriod,
		// client-go would release while lead is still running; see release.
		ReleaseOnCancel: false,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) {
				began.Store(true)
				defer close(done)
				defer giveUp() // there is nothing left to hold the Lease for
				defer c.lock.lead()()
				if ctx.Err() == nil { // else it was won after the end
					result = lead(term)
				}
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("standing for Lease %s: %w", c.lock.Describe(), err)
	}
	c.health.SetLeaderElection(elector)
	c.elector.Store(elector)
	// While nothing is held, nobody but ctx ends the campaign.
	defer context.AfterFunc(ctx, func() {
		if !elector.IsLeader() {
			giveUp()
		}
	})()
	elector.Run(holding)
	lost := holding.Err() == nil // nobody gave it up: it could not be renewed
	if lost {
		endTerm(fmt.Errorf("%w %s", ErrLost, c.lock.Describe()))
	}
	if lost || began.Load() || elector.IsLeader() {
		<-done
		c.release(ctx)
	}
	if lost {
		return fmt.Errorf("%w %s", ErrLost, c.lock.Describe())
	}
	return result
}

// release gives up the Lease, if it is still ours, so that the next holder need
// not wait for its end. It is called after the work has stopped.
func (c *Candidate) release(ctx context.Context) {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.RenewDeadline) // ctx has ended as a rule
	defer cancel()
	record, _, err := c.lock.Get(ctx)
	if err == nil && record.HolderIdentity == c.lock.Identity() {
		now := metav1.Now()
		err = c.lock.Update(ctx, resourcelock.LeaderElectionRecord{
			LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now,
		})
	}
	if err != nil {
		log.Info("The Lease is not released, another replica has to wait for its end", "lease", c.lock.Describe(), "err", err)
	}
}
