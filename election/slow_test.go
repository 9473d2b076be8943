// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// candidateFor returns a candidate for a Lease on server.
func candidateFor(t *testing.T, server *apiserver.Server) *Candidate {
	t.Helper()
	t.Setenv("POD_NAME", "slow")
	client, err := kubernetes.NewForConfig(server.Config("slow"))
	if err != nil {
		t.Fatal(err)
	}
	lock, err := NewLock(client.CoordinationV1(), "default", "lease", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	candidate, err := NewCandidate(DefaultConfig(), lock, NewMetrics(prometheus.NewRegistry()))
	if err != nil {
		t.Fatal(err)
	}
	return candidate
}

// TestRestartedHolderEnds: the API server no longer executes writes when a container restarts that held the Lease. It
// is healthy, and stops at once when it is told to, though it is still the holder.
func TestRestartedHolderEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		server := apiserver.New(apiserver.Hooks{Before: func(_ context.Context, r apiserver.Request) error {
			if down.Load() && r.Verb == "update" {
				return errors.New("connection refused")
			}
			return nil
		}})
		ctx, cancel := context.WithCancel(t.Context())
		if err := candidateFor(t, server).Campaign(ctx, func(context.Context) error { // killed: it does not release the Lease
			down.Store(true)
			cancel()
			return nil
		}); err != nil {
			t.Error(err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin, candidate := time.Now(), candidateFor(t, server)
		time.AfterFunc(time.Minute-time.Nanosecond, func() {
			if err := candidate.Check(nil); err != nil {
				t.Error(err)
			}
		})
		if err := candidate.Campaign(ctx, func(context.Context) error { return errors.New("it leads") }); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > time.Minute+DefaultConfig().RenewDeadline {
			t.Errorf("it stopped after %v", took)
		}
	})
}

// TestSlowRenewal: the API server executes a renewal and responds to it late, and then responds to nothing. The
// leader's term ends before a standby that has observed the renewal may acquire the Lease.
func TestSlowRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var updates atomic.Int32
		var observed atomic.Pointer[time.Time] // the last renewal, by a standby at the earliest
		hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		server := apiserver.New(apiserver.Hooks{
			Before: func(ctx context.Context, r apiserver.Request) error {
				if updates.Load() >= 3 {
					return hang(ctx)
				}
				return nil
			},
			After: func(ctx context.Context, r apiserver.Request, _ apiserver.Result) error {
				if r.Verb != "update" || updates.Add(1) < 3 {
					return nil
				}
				now := time.Now()
				observed.Store(&now)
				time.Sleep(7 * time.Second) // less than the renew deadline
				return nil
			},
		})
		candidate, cfg := candidateFor(t, server), DefaultConfig()
		ctx, cancel := context.WithCancel(t.Context())
		err := candidate.Campaign(ctx, func(term context.Context) error {
			<-term.Done()
			defer cancel()
			if since := time.Since(*observed.Load()); since >= cfg.LeaseDuration || since < cfg.RenewDeadline {
				t.Errorf("the term ended %v after the last renewal, want %v to %v", since, cfg.RenewDeadline, cfg.LeaseDuration)
			}
			return context.Cause(term)
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestLeaseIsLostDuringADrain: the work of a term may go on after the end of its context, and learns that the Lease is lost.
func TestLeaseIsLostDuringADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		candidate := candidateFor(t, apiserver.New(apiserver.Hooks{Before: func(context.Context, apiserver.Request) error {
			if down.Load() {
				return errors.New("connection refused")
			}
			return nil
		}}))
		ctx, drain := context.WithCancel(t.Context())
		if err := candidate.Campaign(ctx, func(term context.Context) error {
			drain()
			<-term.Done()
			down.Store(true)
			begin, held := time.Now(), Held(term)
			select {
			case <-held.Done():
			case <-time.After(time.Hour):
			}
			if took := time.Since(begin); took > DefaultConfig().LeaseDuration || !errors.Is(context.Cause(held), ErrLost) {
				t.Errorf("the Lease was held for %v, cause %v", took, context.Cause(held))
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}

// TestLeadEndsTerms: a term that lead has ended with ErrLost is followed by another, not at once. Between terms, and after the
// last, the candidate is healthy and does not call itself the holder.
func TestLeadEndsTerms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidate, broken := candidateFor(t, apiserver.New(apiserver.Hooks{})), errors.New("broken")
		terms, begin := 0, time.Now()
		if err := candidate.Campaign(t.Context(), func(context.Context) error {
			if terms++; terms == 10 {
				return broken
			}
			return ErrLost
		}); !errors.Is(err, broken) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begin); took < 20*time.Minute || took > time.Hour {
			t.Errorf("10 terms took %v", took)
		}
		time.Sleep(time.Hour)
		if err := candidate.Check(nil); err != nil || candidate.Status().Holder != "" {
			t.Errorf("status %+v, %v", candidate.Status(), err)
		}
	})
}

// TestMayCallNow: a suspended process continues before its timers have ended the term.
func TestMayCallNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var takeOver atomic.Bool
		candidate := candidateFor(t, apiserver.New(apiserver.Hooks{Before: func(context.Context, apiserver.Request) error {
			if takeOver.Load() {
				return errors.New("connection refused")
			}
			return nil
		}}))
		duration := DefaultConfig().LeaseDuration
		ctx, cancel := context.WithCancel(t.Context())
		if err := candidate.Campaign(ctx, func(term context.Context) error {
			defer cancel()
			time.Sleep(time.Hour) // the Lease is renewed
			read := Now()
			if err := MayCallNow(term, read); err != nil {
				t.Errorf("a leader with a read may not call: %v", err)
			}
			time.Sleep(maxReadAge + time.Millisecond)
			if err := MayCallNow(term, read); !errors.Is(err, ErrOldRead) {
				t.Errorf("after an old read: %v", err)
			}
			if err := MayCallNow(term, Moment{}); err != nil {
				t.Errorf("without a read: %v", err)
			}
			// As in a process that was suspended since its last renewal: no timer has ended the term yet.
			candidate.lock.mu.Lock()
			sent := candidate.lock.sent
			candidate.lock.sent = Moment{time.Now().Add(-duration)}
			candidate.lock.mu.Unlock()
			if err := MayCallNow(term, Now()); !errors.Is(err, ErrLost) || term.Err() != nil {
				t.Errorf("after the end of the Lease: %v, term %v", err, term.Err())
			}
			candidate.lock.mu.Lock()
			candidate.lock.sent = sent
			candidate.lock.mu.Unlock()
			takeOver.Store(true)
			<-term.Done()
			if err := MayCallNow(term, Moment{}); !errors.Is(err, ErrLost) {
				t.Errorf("after the term: %v", err)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}

func TestMomentCountsTheLargerAge(t *testing.T) {
	for name, read := range map[string]Moment{
		"the machine was suspended": {time.Now().Round(0).Add(-time.Minute)}, // a time without the monotonic clock
		"by both clocks":            {time.Now().Add(-time.Minute)},
	} {
		if err := MayCallNow(t.Context(), read); !errors.Is(err, ErrOldRead) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := MayCallNow(t.Context(), Now()); err != nil {
		t.Error(err)
	}
}
