// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

// attempts records when sync was called, as seconds since the start.
type attempts struct {
	start time.Time
	mu    sync.Mutex
	at    []float64
}

func (a *attempts) add() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = append(a.at, time.Since(a.start).Seconds())
	return len(a.at)
}

func run(t *testing.T, cfg Config, sync Sync[string], test func(l *Loop[string], m *Metrics, stop context.CancelCauseFunc)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		if cfg.Name == "" {
			cfg.Name = "test"
		}
		if cfg.RetryStart == 0 {
			cfg.RetryStart, cfg.RetryMax = time.Second, 8*time.Second
		}
		m := NewMetrics(prometheus.NewRegistry())
		l := New(cfg, m, sync)
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 2); close(done) }()
		test(l, m, stop)
		stop(nil)
		<-done
	})
}

// TestEnqueue: keys that are added before the workers start, later and after a failure reach them when the function of the metrics has
// added them.
func TestEnqueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var held []string
		var adds []func()
		m := NewMetrics(prometheus.NewRegistry())
		m.Enqueue = func(loop string, key any, add func()) {
			held, adds = append(held, fmt.Sprint(loop, " ", key)), append(adds, add)
		}
		var synced []string
		cfg := Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second}
		l := New(cfg, m, func(_ context.Context, key string) (time.Time, error) {
			synced = append(synced, key)
			return time.Time{}, errors.New("no")
		})
		l.Add("early")
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 1); close(done) }()
		synctest.Wait()
		l.Add("late")
		if diff := cmp.Diff([]string{"test early", "test late"}, held); diff != "" || synced != nil {
			t.Errorf("%s; synced: %q", diff, synced)
		}
		adds[1]()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]string{"test early", "test late", "test late"}, held); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"late"}, synced); diff != "" {
			t.Error(diff)
		}
		stop(nil)
		<-done
	})
}

func TestBackoff(t *testing.T) {
	for failures, want := range map[int]time.Duration{0: time.Second, 1: 2 * time.Second, 8: 256 * time.Second, 9: 5 * time.Minute,
		10000: 5 * time.Minute} {
		if got := Backoff(time.Second, 5*time.Minute, failures); got != want {
			t.Errorf("after %d failures: %v, want %v", failures, got, want)
		}
	}
}

func TestBackoffDoublesUpToTheMaximum(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		a.add()
		return time.Time{}, errors.New("no")
	}, func(l *Loop[string], m *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 1, 3, 7, 15, 23}, a.at); diff != "" {
			t.Error(diff)
		}
		if n := testutil.ToFloat64(m.retries.WithLabelValues("test")); n != 6 {
			t.Errorf("retries = %v, want 6", n)
		}
	})
}

// TestOldReadIsRepeated: a sync whose read is too old reads and decides again, three times before it backs off.
func TestOldReadIsRepeated(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		a.add()
		return time.Time{}, fmt.Errorf("deleting: %w", election.ErrOldRead)
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 0, 0, 0, 1, 1, 1, 1}, a.at); diff != "" {
			t.Error(diff)
		}
	})
}

func TestJitterLengthensTheBackoff(t *testing.T) {
	a := &attempts{}
	run(t, Config{Jitter: 0.5}, func(context.Context, string) (time.Time, error) {
		a.add()
		return time.Time{}, errors.New("no")
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		even := true
		for i, want := range []float64{1, 2, 4, 8} {
			got := a.at[i+1] - a.at[i]
			if even = even && got == want; got < want || got > 1.5*want {
				t.Errorf("delay %d is %v s", i, got)
			}
		}
		if even {
			t.Error("no delay is longer")
		}
	})
}

func TestEventCutsBackoffShortButKeepsTheCount(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		a.add()
		return time.Time{}, errors.New("no")
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k") // 0, then 1, 3, and 7 is due
		time.Sleep(4 * time.Second)
		l.Resync("k") // does not count as an event
		synctest.Wait()
		l.Add("k") // 4, so the next is due at 4+8, and the timer for 7 is stale
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 1, 3, 4, 12}, a.at); diff != "" {
			t.Error(diff)
		}
	})
}

func TestEventDuringAFailingAttemptIsNotDelayed(t *testing.T) {
	for name, event := range map[string]func(*Loop[string]){
		"an event":      func(l *Loop[string]) { l.Add("k") },
		"a new request": func(l *Loop[string]) { l.Forget("k"); l.Add("k") },
		"a deletion":    func(l *Loop[string]) { l.Add("k"); l.Forget("k") },
	} {
		t.Run(name, func(t *testing.T) {
			a := &attempts{}
			run(t, Config{RetryStart: time.Hour, RetryMax: time.Hour}, func(context.Context, string) (time.Time, error) {
				if a.add() == 1 {
					time.Sleep(2 * time.Second)
					return time.Time{}, errors.New("no")
				}
				return time.Time{}, nil
			}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
				a.start = time.Now()
				l.Add("k")
				time.Sleep(time.Second)
				event(l)
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if diff := cmp.Diff([]float64{0, 2}, a.at); diff != "" {
					t.Error(diff)
				}
				if len(l.states) != 0 {
					t.Errorf("%d states are left", len(l.states))
				}
			})
		})
	}
}

func TestSuccessAndForgetResetTheBackoff(t *testing.T) {
	for name, forget := range map[string]bool{"success": false, "forget": true} {
		t.Run(name, func(t *testing.T) {
			a := &attempts{}
			run(t, Config{}, func(context.Context, string) (time.Time, error) {
				if n := a.add(); !forget && n == 3 {
					return time.Time{}, nil
				}
				return time.Time{}, errors.New("no")
			}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
				a.start = time.Now()
				l.Add("k") // 0, 1, 3
				time.Sleep(3500 * time.Millisecond)
				synctest.Wait()
				if forget {
					l.Forget("k")
				}
				l.Add("k") // 3.5, and one second later again
				time.Sleep(1500 * time.Millisecond)
				synctest.Wait()
				if diff := cmp.Diff([]float64{0, 1, 3, 3.5, 4.5}, a.at); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestNextTimeIsNoFailure(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		if a.add() == 1 {
			return time.Now().Add(5 * time.Second), nil
		}
		return time.Time{}, nil
	}, func(l *Loop[string], m *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 5}, a.at); diff != "" {
			t.Error(diff)
		}
		if n := testutil.ToFloat64(m.retries.WithLabelValues("test")); n != 0 {
			t.Errorf("retries = %v, want 0", n)
		}
	})
}

func TestManyEventsAreOneSyncAtATime(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		a.add()
		time.Sleep(time.Second)
		return time.Time{}, nil
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		for range 50 {
			l.Add("k")
		}
		synctest.Wait()
		for range 50 {
			l.Add("k")
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 1}, a.at); diff != "" {
			t.Error(diff)
		}
	})
}

func TestPanicCostsOneAttempt(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(_ context.Context, key string) (time.Time, error) {
		if a.add() == 1 {
			panic("boom")
		}
		return time.Time{}, nil
	}, func(l *Loop[string], m *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]float64{0, 1}, a.at); diff != "" {
			t.Error(diff)
		}
		if n := testutil.ToFloat64(m.panics.WithLabelValues("test")); n != 1 {
			t.Errorf("panics = %v, want 1", n)
		}
	})
}

func TestWaitReadyHoldsWorkers(t *testing.T) {
	a := &attempts{}
	var open chan struct{} // created in the bubble of the test
	waitReady := func(ctx context.Context) error {
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	run(t, Config{WaitReady: waitReady}, func(context.Context, string) (time.Time, error) {
		a.add()
		return time.Time{}, nil
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		open = make(chan struct{})
		for i := range 5 {
			l.Add(fmt.Sprint(i))
		}
		time.Sleep(time.Minute)
		close(open)
		synctest.Wait()
		if diff := cmp.Diff([]float64{60, 60, 60, 60, 60}, a.at); diff != "" {
			t.Error(diff)
		}
	})
}

func TestStopping(t *testing.T) {
	lost := errors.New("lease lost")
	tests := map[string]struct {
		cause     error
		lost      time.Duration // until the Lease is lost; zero: never
		grace     time.Duration
		wantEnd   time.Duration
		wantError error // cause that the running sync sees
	}{
		"draining lets a running sync finish":               {ErrDrain, 0, 10 * time.Second, 5 * time.Second, nil},
		"draining ends with the grace period":               {ErrDrain, 0, 2 * time.Second, 2 * time.Second, ErrDrain},
		"draining without grace period cancels immediately": {ErrDrain, 0, 0, 0, ErrDrain},
		"draining ends when the Lease is lost":              {ErrDrain, time.Second, 10 * time.Second, time.Second, lost},
		"another cause cancels a running sync":              {lost, 0, 10 * time.Second, 0, lost},
		"a wrapped drain":                                   {fmt.Errorf("TERM: %w", ErrDrain), 0, 10 * time.Second, 5 * time.Second, nil},
		"without a cause the running sync is cancelled":     {nil, 0, 10 * time.Second, 0, context.Canceled},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var saw error
			synced := 0
			synctest.Test(t, func(t *testing.T) {
				metrics := NewMetrics(prometheus.NewRegistry())
				l := New(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second, GracePeriod: tt.grace},
					metrics, func(ctx context.Context, _ string) (time.Time, error) {
						synced++
						select {
						case <-time.After(5 * time.Second):
						case <-ctx.Done():
							saw = context.Cause(ctx)
						}
						return time.Time{}, nil
					})
				held, lose := context.WithCancelCause(t.Context())
				defer lose(nil)
				if tt.lost > 0 {
					time.AfterFunc(tt.lost, func() { lose(lost) })
				}
				ctx, stop := context.WithCancelCause(election.WithLease(t.Context(), election.Lease{Lost: held}))
				l.Add("running")
				l.Add("queued")
				l.Add("left")
				done := make(chan struct{})
				go func() { l.Run(ctx, 1); close(done) }()
				synctest.Wait()
				start := time.Now()
				stop(tt.cause)
				<-done
				if took := time.Since(start); took != tt.wantEnd {
					t.Errorf("Run returned after %v, want %v", took, tt.wantEnd)
				}
				l.Stop()
				if depth := testutil.ToFloat64(metrics.depth); depth != 0 {
					t.Errorf("%v keys are queued after the end", depth)
				}
			})
			if !errors.Is(saw, tt.wantError) {
				t.Errorf("the running sync saw %v, want %v", saw, tt.wantError)
			}
			if synced != 1 {
				t.Errorf("%d syncs were started, want 1: none after the end of the context", synced)
			}
		})
	}
}

func TestForgottenKeyIsSyncedOnceMore(t *testing.T) {
	a := &attempts{}
	run(t, Config{}, func(context.Context, string) (time.Time, error) {
		if a.add() == 1 {
			return time.Time{}, errors.New("no")
		}
		return time.Time{}, nil
	}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
		a.start = time.Now()
		l.Add("k")
		synctest.Wait()
		l.Forget("k")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		// The timer still fires: a sync of a deleted object is cheap.
		if diff := cmp.Diff([]float64{0, 1}, a.at); diff != "" {
			t.Error(diff)
		}
	})
}

func TestResyncDuringAnAttemptIsNotLost(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want []float64
	}{
		"that succeeds":                 {nil, []float64{0, 2}},
		"that fails, after its backoff": {errors.New("no"), []float64{0, 12}},
	} {
		t.Run(name, func(t *testing.T) {
			a := &attempts{}
			run(t, Config{RetryStart: 10 * time.Second, RetryMax: time.Hour}, func(context.Context, string) (time.Time, error) {
				if a.add() == 1 {
					time.Sleep(2 * time.Second)
					return time.Time{}, tt.err
				}
				return time.Time{}, nil
			}, func(l *Loop[string], _ *Metrics, _ context.CancelCauseFunc) {
				a.start = time.Now()
				l.Add("k")
				time.Sleep(time.Second)
				l.Resync("k")
				time.Sleep(20 * time.Second)
				synctest.Wait()
				if diff := cmp.Diff(tt.want, a.at); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// TestDrainWhileCallsWait: at shutdown, attempts that wait for other calls of the driver end at once. They start no call.
func TestDrainWhileCallsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := funcr.New(func(_, line string) { t.Errorf("shutting down is no failure, logged: %s", line) }, funcr.Options{})
		gate := pressure.New(klog.Background(), prometheus.NewRegistry(), 1)
		const workers = 100
		calls := 0
		l := New(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second, GracePeriod: 25 * time.Second},
			NewMetrics(prometheus.NewRegistry()), func(ctx context.Context, _ string) (time.Time, error) {
				if err := pressure.Enter(ctx, "CreateVolume", ""); err != nil {
					return time.Time{}, err
				}
				calls++
				time.Sleep(5 * time.Second)
				return time.Time{}, nil
			})
		for i := range workers {
			l.Add(fmt.Sprint(i))
		}
		ctx, stop := context.WithCancelCause(klog.NewContext(pressure.WithGate(t.Context(), gate), log))
		done := make(chan struct{})
		go func() { l.Run(ctx, workers); close(done) }()
		synctest.Wait()
		start := time.Now()
		stop(ErrDrain)
		<-done
		l.Stop()
		if took := time.Since(start); took != 5*time.Second || calls != 1 {
			t.Errorf("Run returned after %v and %d calls, want 5s and one call", took, calls)
		}
	})
}
