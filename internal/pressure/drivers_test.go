// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pressure

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
)

// model is a driver: it answers the attempt for a claim, from 1.
type model func(ctx context.Context, claim, attempt int) error

// takes waits like a call of that duration.
func takes(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return status.Error(codes.DeadlineExceeded, "context deadline exceeded")
	}
}

// queueing serves a call per interval in the order of their arrival. If it does not drop those whose deadline would pass, they are served
// although their client has gone.
func queueing(interval time.Duration, drops bool) model {
	var mu sync.Mutex
	var free time.Time
	reserve := func(ctx context.Context) (wait time.Duration, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		end := free
		if end.Before(now) {
			end = now
		}
		end = end.Add(interval)
		if deadline, _ := ctx.Deadline(); drops && end.After(deadline) {
			return 0, false
		}
		free = end
		return end.Sub(now), true
	}
	return func(ctx context.Context, _, _ int) error {
		wait, ok := reserve(ctx)
		if !ok {
			return takes(ctx, time.Hour)
		}
		return takes(ctx, wait)
	}
}

// thrashing takes a second, and longer with more than best calls at a time: fewer are completed then.
func thrashing(best int) model {
	var mu sync.Mutex
	running := 0
	change := func(n int) float64 {
		mu.Lock()
		defer mu.Unlock()
		running += n
		return max(1, float64(running)/float64(best))
	}
	return func(ctx context.Context, _, _ int) error {
		change(1)
		defer change(-1)
		for range 10 {
			slower := change(0)
			if err := takes(ctx, time.Duration(slower*slower*float64(100*time.Millisecond))); err != nil {
				return err
			}
		}
		return nil
	}
}

// always takes the same time, however many calls it gets.
func always(d time.Duration) model {
	return func(ctx context.Context, _, _ int) error { return takes(ctx, d) }
}

// repeated completes a call in the background: only the fourth attempt is answered.
func repeated(ctx context.Context, _, attempt int) error {
	if attempt < 4 {
		return takes(ctx, time.Hour)
	}
	return takes(ctx, 100*time.Millisecond)
}

// worksOn needs that long for a claim, also after the deadline of the call. Meanwhile it refuses to begin again.
func worksOn(d time.Duration) model {
	var mu sync.Mutex
	ready := map[int]time.Time{}
	return func(ctx context.Context, claim, _ int) error {
		mu.Lock()
		at, known := ready[claim]
		if !known {
			ready[claim] = time.Now().Add(d)
		}
		mu.Unlock()
		switch {
		case !known:
			return takes(ctx, d)
		case time.Now().Before(at):
			return status.Error(codes.Aborted, "an operation for the volume is running")
		}
		return nil
	}
}

// hanging never answers calls for every second claim.
func hanging(ctx context.Context, claim, _ int) error {
	if claim%2 == 0 {
		return takes(ctx, time.Hour)
	}
	return takes(ctx, time.Second)
}

// load is what a test sends to a driver.
type load struct {
	claims  int
	timeout time.Duration
	group   func(claim int) string
	at      func(claim int) time.Duration // when it comes
}

func atOnce(int) time.Duration { return 0 }

// oneByOne has that many claims come before the others.
func oneByOne(claims int) func(int) time.Duration {
	return func(claim int) time.Duration { return time.Duration(min(claim, claims)) * 2 * time.Second }
}

// bursts of 100 claims come every five minutes.
func bursts(claim int) time.Duration { return time.Duration(claim/100) * 5 * time.Minute }

// outcome is how it went.
type outcome struct {
	done    []time.Time // of the successful calls
	failed  []time.Time
	began   time.Time
	lowest  int // limit; 0: there was none
	limited bool
}

// rate returns the successful calls per second after that time.
func (o outcome) rate(after time.Duration) float64 {
	n := 0
	for _, at := range o.done {
		if at.Sub(o.began) > after {
			n++
		}
	}
	return float64(n) / (o.done[len(o.done)-1].Sub(o.began) - after).Seconds()
}

// workers is the number of workers, as with --worker-threads.
const workers = 100

// drive has the workers process the claims until as many calls as expected have succeeded. A failed call is repeated with back-off.
func drive(gate *Gate, driver model, l load, expected int) outcome {
	type item struct{ claim, attempt int }
	queue, stop := make(chan item, 10*l.claims), make(chan struct{})
	o := outcome{began: time.Now()}
	var mu sync.Mutex
	var group sync.WaitGroup
	record := func(it item, err error) {
		mu.Lock()
		defer mu.Unlock()
		if len(o.done) == expected {
			return
		}
		for _, limit := range gate.Limits() {
			o.limited = true
			if o.lowest == 0 || limit.Limit < o.lowest {
				o.lowest = limit.Limit
			}
		}
		if err == nil {
			o.done = append(o.done, time.Now())
			if len(o.done) == expected {
				close(stop)
			}
			return
		}
		o.failed = append(o.failed, time.Now())
		// As in a workloop, with a jitter that keeps the attempts apart.
		backoff := time.Second << min(it.attempt-1, 8)
		backoff += backoff / 2 * time.Duration(it.claim) / time.Duration(l.claims)
		time.AfterFunc(backoff, func() { queue <- item{it.claim, it.attempt + 1} })
	}
	for claim := range l.claims {
		time.AfterFunc(l.at(claim), func() { queue <- item{claim, 1} })
	}
	for range workers {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				case it := <-queue:
					record(it, call(gate, l.timeout, l.group(it.claim), func(ctx context.Context) error {
						return driver(ctx, it.claim, it.attempt)
					}))
				}
			}
		})
	}
	group.Wait()
	return o
}

// call is an attempt of a worker with one call.
func call(gate *Gate, timeout time.Duration, group string, answer func(context.Context) error) error {
	ctx, end := Attempt(WithGate(context.Background(), gate), context.Background())
	defer end()
	err := Enter(ctx, "CreateVolume", group)
	if errors.Is(err, election.ErrOldRead) {
		err = Enter(ctx, "CreateVolume", group)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return Intercept(ctx, "/csi.v1.Controller/CreateVolume", nil, nil, nil,
		func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			return answer(ctx)
		})
}

func oneGroup(int) string { return "fast" }

// TestDrivers: what drivers complete under the load of 100 workers. Time is virtual.
func TestDrivers(t *testing.T) {
	for name, test := range map[string]struct {
		driver        func() model
		load          load
		rate          float64       // calls per second that must succeed, after settled
		settled       time.Duration // no call may fail after it
		unlimitedRate float64       // without limits, fewer must succeed; 0: not tried
	}{
		"two per second, others wait for their deadline": {
			func() model { return queueing(time.Second/2, true) }, load{400, 5 * time.Second, oneGroup, atOnce}, 1.9, 15 * time.Second, 1},
		"100 claims": {
			func() model { return queueing(time.Second/2, true) }, load{100, 5 * time.Second, oneGroup, atOnce}, 1.9, 6 * time.Second, 1},
		"two per second, also for clients that have gone": {
			func() model { return queueing(time.Second/2, false) }, load{400, 5 * time.Second, oneGroup, atOnce}, 1.9, 3 * time.Minute, 0.2,
		},
		"slower with more than ten calls, until their deadline": {
			func() model { return thrashing(10) }, load{2000, 15 * time.Second, oneGroup, atOnce}, 9, 2 * time.Minute, 1},
		"slower with more than ten calls": {
			func() model { return thrashing(10) }, load{4000, 10 * time.Minute, oneGroup, oneByOne(5)}, 8.9, 5 * time.Minute, 1.2},
		"slow":              {func() model { return always(10 * time.Second) }, load{8e3, 15 * time.Second, oneGroup, atOnce}, 9.5, 0, 0},
		"slow, not near it": {func() model { return always(10 * time.Second) }, load{8e3, time.Minute, oneGroup, atOnce}, 9.99, 0, 0},
		"fast": {
			func() model { return always(5 * time.Millisecond) }, load{9999, 15 * time.Second, oneGroup, atOnce}, 1e4, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := drive(New(klog.Background(), prometheus.NewRegistry(), 0), test.driver(), test.load, test.load.claims)
				t.Logf("%.3g/s, %d failed, lowest limit %d", o.rate(test.settled), len(o.failed), o.lowest)
				if got := o.rate(test.settled); got < test.rate {
					t.Errorf("%.3g calls per second succeeded after %v, want %v", got, test.settled, test.rate)
				}
				if n := len(o.failed); n > 0 && o.failed[n-1].Sub(o.began) > test.settled {
					t.Errorf("%d calls failed, the last one after %v", n, o.failed[n-1].Sub(o.began))
				}
			})
			if test.unlimitedRate == 0 {
				return
			}
			synctest.Test(t, func(t *testing.T) {
				o := drive(nil, test.driver(), test.load, test.load.claims)
				if got := o.rate(0); got > test.unlimitedRate {
					t.Errorf("%.3g calls per second succeeded without limits", got)
				}
			})
		})
	}
}

// TestUnlimited: the limit of a driver that does not complete more with fewer calls ends.
func TestUnlimited(t *testing.T) {
	for name, test := range map[string]struct {
		driver   model
		load     load
		expected int
		limited  bool
		within   time.Duration
	}{
		"answers only repeated calls":          {repeated, load{400, 15 * time.Second, oneGroup, atOnce}, 400, true, 8 * time.Minute},
		"hangs for one of two classes":         {hanging, load{200, 15 * time.Second, halves, atOnce}, 100, false, 20 * time.Second},
		"restarts during slow calls":           {restarting, load{300, 10 * time.Minute, oneGroup, atOnce}, 300, false, 15 * time.Minute},
		"most calls are of a class that hangs": {hangingMost, load{200, 15 * time.Second, most, atOnce}, 20, false, time.Minute},
		"fails for a reason of its own":        {failing, load{100, 15 * time.Second, oneGroup, atOnce}, 100, false, time.Minute},
		"works on after the deadline": {
			worksOn(20 * time.Second), load{1000, 15 * time.Second, oneGroup, oneByOne(1000)}, 1000, true, 35 * time.Minute},
		"slow, in bursts": {
			always(8 * time.Second), load{300, 15 * time.Second, oneGroup, bursts}, 300, true, 10*time.Minute + 9*time.Second},
		"hangs, but gets few calls": {hanging, load{7, 15 * time.Second, oneGroup, atOnce}, 3, false, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := drive(New(klog.Background(), prometheus.NewRegistry(), 0), test.driver, test.load, test.expected)
				if took := o.done[test.expected-1].Sub(o.began); took > test.within {
					t.Errorf("took %v, more than %v", took, test.within)
				}
				if o.limited != test.limited {
					t.Errorf("limited: %t", o.limited)
				}
			})
		})
	}
}

// halves returns the class of every second claim.
func halves(claim int) string { return fmt.Sprint(claim % 2) }

// most returns the class of claims of which nine of ten are of the same one.
func most(claim int) string { return fmt.Sprint(claim%10 == 0) }

// hangingMost never answers calls for the class of most claims.
func hangingMost(ctx context.Context, claim, _ int) error {
	if claim%10 != 0 {
		return takes(ctx, time.Hour)
	}
	return takes(ctx, time.Second)
}

// restarting takes two minutes for a call. Its first calls end with a restart of the driver.
func restarting(ctx context.Context, claim, attempt int) error {
	if claim < workers && attempt == 1 {
		_ = takes(ctx, time.Minute)
		return status.Error(codes.Unavailable, "error reading from server: EOF")
	}
	return takes(ctx, 2*time.Minute)
}

// failing answers the third attempt.
func failing(ctx context.Context, _, attempt int) error {
	if attempt < 3 {
		return status.Error(codes.Internal, "no such pool")
	}
	return takes(ctx, time.Second)
}
