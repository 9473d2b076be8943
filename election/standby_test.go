// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// otherLease is a Lease of 15 s of another replica, which it renews and releases at these times after begin.
type otherLease struct {
	resourcelock.Interface
	begin    time.Time
	holder   string
	renewed  []time.Duration
	released time.Duration // 0: never
	reads    int
	written  resourcelock.LeaderElectionRecord
}

func (l *otherLease) Update(_ context.Context, record resourcelock.LeaderElectionRecord) error {
	l.written = record
	return nil
}

func (l *otherLease) spec() coordinationv1.LeaseSpec {
	passed := time.Since(l.begin)
	r := &resourcelock.LeaderElectionRecord{HolderIdentity: l.holder, LeaseDurationSeconds: 15, RenewTime: metav1.NewTime(l.begin)}
	for _, at := range l.renewed {
		if passed >= at {
			r.RenewTime = metav1.NewTime(l.begin.Add(at))
		}
	}
	if l.released > 0 && passed >= l.released {
		r.HolderIdentity = ""
	}
	return resourcelock.LeaderElectionRecordToLeaseSpec(r)
}

func (l *otherLease) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.reads++
	spec := l.spec()
	record := resourcelock.LeaseSpecToLeaderElectionRecord(&spec)
	return record, nil, nil
}

func (*otherLease) Identity() string { return "second" }
func (*otherLease) Describe() string { return "default/lease" }

// watched returns a watch of the Lease, which sends its first state and each change.
func (l *otherLease) watched(ctx context.Context) (watch.Interface, error) {
	w := watch.NewRaceFreeFake()
	send := func() { w.Modify(&coordinationv1.Lease{Spec: l.spec()}) }
	send()
	for _, at := range append(l.renewed, l.released) {
		if at > 0 {
			time.AfterFunc(time.Until(l.begin.Add(at)), send)
		}
	}
	context.AfterFunc(ctx, w.Stop)
	return w, nil
}

// TestStandby checks when a standby may acquire the Lease, and how often it reads it.
func TestStandby(t *testing.T) {
	forbidden := func(context.Context) (watch.Interface, error) { return nil, errors.New("forbidden") }
	hangs := func(ctx context.Context) (watch.Interface, error) { <-ctx.Done(); return nil, ctx.Err() }
	ends := func(context.Context) (watch.Interface, error) {
		w := watch.NewRaceFreeFake()
		w.Stop()
		return w, nil
	}
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		holder     string
		renewed    []time.Duration
		released   time.Duration
		watch      watchLease // nil: it works
		want       time.Duration
		wantHolder string
		reads      int
	}{
		"released":                           {"first", nil, 3200 * ms, nil, 3200 * ms, "", 2},
		"not renewed":                        {"first", nil, 0, nil, 15 * time.Second, "", 2},
		"renewed twice":                      {"first", []time.Duration{4800 * ms, 9800 * ms}, 0, nil, 24800 * ms, "", 2},
		"released, watch forbidden":          {"first", nil, 3200 * ms, forbidden, 5 * time.Second, "", 2},
		"released, watch ends":               {"first", nil, 3200 * ms, ends, 5 * time.Second, "", 2},
		"released, watch hangs":              {"first", nil, 3200 * ms, hangs, 15 * time.Second, "", 2},
		"renewed, watch forbidden":           {"first", []time.Duration{4800 * ms}, 0, forbidden, 20 * time.Second, "", 5},
		"renewed, released and watch hangs":  {"first", []time.Duration{5000 * ms}, 20 * time.Second, hangs, 30 * time.Second, "", 3},
		"its own before a restart":           {"second", nil, 0, nil, 0, "second", 1},
		"without a holder when it was read":  {"", nil, 0, nil, 0, "", 1},
		"released before the watch was open": {"first", nil, 1 * ms, nil, 1 * ms, "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				other := &otherLease{begin: time.Now(), holder: c.holder, renewed: c.renewed, released: c.released}
				if c.watch == nil {
					c.watch = other.watched
				}
				observed := &observedLock{metrics: NewMetrics(prometheus.NewRegistry()), Interface: other}
				standby := &standbyLock{observedLock: observed, watch: c.watch, period: DefaultConfig().RetryPeriod}
				defer standby.stop()
				record, _, err := standby.Get(t.Context())
				if took := time.Since(other.begin); err != nil || record.HolderIdentity != c.wantHolder || took != c.want {
					t.Errorf("got %+v, %v after %v, want the holder %q after %v", record, err, took, c.wantHolder, c.want)
				}
				if other.reads != c.reads {
					t.Errorf("read %d times, want %d", other.reads, c.reads)
				}
				if holder := observed.holder.Load(); c.released == 0 && holder != c.holder {
					t.Errorf("the status names the holder %q, want %q", holder, c.holder)
				}
			})
		})
	}
}

// TestTimesOfAcquisition: the Lease was acquired and renewed when it was written, not when the standby began to wait for it.
func TestTimesOfAcquisition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := &otherLease{begin: time.Now(), holder: "first", released: time.Hour}
		standby := &standbyLock{
			observedLock: &observedLock{metrics: NewMetrics(prometheus.NewRegistry()), Interface: other},
			watch:        other.watched, period: DefaultConfig().RetryPeriod,
		}
		for i := range 60 * 4 { // renewals
			other.renewed = append(other.renewed, time.Duration(i)*15*time.Second)
		}
		record := resourcelock.LeaderElectionRecord{HolderIdentity: "second", AcquireTime: metav1.Now(), RenewTime: metav1.Now()}
		for renewals := range 3 {
			if _, _, err := standby.Get(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := standby.Update(t.Context(), record); err != nil {
				t.Fatal(err)
			}
			acquired := other.begin.Add(time.Hour)
			if w := other.written; !w.AcquireTime.Time.Equal(acquired) || w.RenewTime.Time.Before(acquired) {
				t.Errorf("after %d renewals: acquired at %v, renewed at %v, want %v", renewals, w.AcquireTime, w.RenewTime, acquired)
			}
			time.Sleep(5 * time.Second)
			record.RenewTime = metav1.Now()
		}
	})
}

// TestStandbyEnds: the end of the campaign ends the wait and the watch.
func TestStandbyEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := &otherLease{begin: time.Now(), holder: "first"}
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(ErrLost) })
		standby := &standbyLock{
			observedLock: &observedLock{metrics: NewMetrics(prometheus.NewRegistry()), Interface: other}, watch: other.watched,
			period: DefaultConfig().RetryPeriod,
		}
		_, _, err := standby.Get(ctx)
		if !errors.Is(err, ErrLost) || time.Since(other.begin) != time.Second {
			t.Errorf("got %v after %v", err, time.Since(other.begin))
		}
	})
}
