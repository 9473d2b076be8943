// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// letters returns the group of a key: its letters.
func letters(key string) string { return strings.TrimRight(key, "0123456789") }

// TestFairOrder runs a script: "+k" pushes key k, "-k" releases it, and "?" pops until nothing can be taken. The keys of want were popped,
// with "|" for the end of each "?". Keys without letters have no group. Keys in capitals are not urgent. After "!k", key or group k is
// a retry, after "=k" not any more.
func TestFairOrder(t *testing.T) {
	for name, tt := range map[string]struct {
		workers      int
		script, want string
		waiting      int // at the end
	}{
		"groups take turns":               {10, "+a1 +a2 +a3 +b1 +b2 ?", "a1 b1 a2 b2 a3 |", 0},
		"a group holds four fifths":       {10, "+b1 +a1 +a2 +a3 +a4 +a5 +a6 +a7 +a8 +a9 ?", "b1 a1 a2 a3 a4 a5 a6 a7 a8 |", 1},
		"rounded down":                    {4, "+a1 +a2 +a3 +a4 +b1 ?", "a1 b1 a2 a3 |", 1},
		"and at least one":                {2, "+a1 +a2 +b1 ?", "a1 b1 |", 1},
		"all without other groups":        {2, "+a1 +a2 +a3 ?", "a1 a2 |", 1},
		"all after the other groups":      {2, "+a1 +a2 +a3 +b1 ? -b1 ?", "a1 b1 | a2 |", 1},
		"back below the limit":            {5, "+a1 +a2 +a3 +a4 +a5 +a6 ? +b1 -a1 ? -a2 ?", "a1 a2 a3 a4 a5 | b1 | a6 |", 0},
		"no group, no limit":              {3, "+1 +2 +3 +a1 ?", "1 a1 2 |", 1},
		"a released key comes again last": {1, "+a1 +a2 ? -a1 +a1 ? -a2 ?", "a1 | a2 | a1 |", 0},
		"groups that end and begin again": {1, "+a1 ? -a1 ? +a2 +a3 ? -a2 ? -a3 ?", "a1 | | a2 | a3 | |", 0},
		"urgent keys find a worker":       {10, "+A1 +A2 +A3 +A4 +A5 +A6 +A7 +A8 +A9 ? +a1 +a2 ?", "A1 A2 A3 A4 A5 A6 A7 A8 | a1 a2 |", 1},
		"urgent keys come first":          {3, "+A1 +b1 +a1 ?", "b1 a1 A1 |", 0},
		"but three times only":            {1, "+A1 +a1 +a2 +a3 +a4 ? -a1 ? -a2 ? -a3 ? -A1 ?", "a1 | a2 | a3 | A1 | a4 |", 0},
		"first attempts find a worker": {10, "!a +a0 +a1 +a2 +a3 +a4 +a5 +a6 +a7 +a8 +a9 ? +b1 ?",
			"a0 a1 a2 a3 a4 a5 a6 a7 a8 | b1 |", 1},
		"retries leave one to first ones": {10, "!A +A0 +A1 +A2 +A3 +A4 +A5 +A6 +A7 ? +B8 ? +B9 ?",
			"A0 A1 A2 A3 A4 A5 A6 | B8 | |", 2},
		"a waiting key changes its lane":         {1, "+a1 +a2 +b1 !a2 ? -a1 ? -b1 ?", "a1 | b1 | a2 |", 0},
		"a retry waits for first attempts":       {1, "!a1 +a1 +a2 ? -a2 ?", "a2 | a1 |", 0},
		"an event makes a retry a first attempt": {1, "!a1 +a1 =a1 ? !A2 +A2 =A2 -a1 ?", "a1 | A2 |", 0},
	} {
		t.Run(name, func(t *testing.T) {
			retries := map[string]bool{}
			q := newFairQueue(letters, func(key string) (lane int) {
				if strings.ToLower(key) != key {
					lane = 2
				}
				if retries[key] || retries[letters(key)] {
					lane++
				}
				return lane
			})
			q.setWorkers(tt.workers)
			running := 0
			var got []string
			for step := range strings.FieldsSeq(tt.script) {
				switch key := step[1:]; step[0] {
				case '+':
					q.Push(key)
				case '=':
					delete(retries, step[1:])
				case '!':
					retries[key] = true
				case '-':
					q.release(key)
					running--
				default:
					for running < tt.workers && q.Len() > 0 {
						got = append(got, q.Pop())
						running++
					}
					got = append(got, "|")
				}
			}
			if got := strings.Join(got, " "); got != tt.want {
				t.Errorf("popped %q, want %q", got, tt.want)
			}
			if q.total() != tt.waiting {
				t.Errorf("%d keys wait, want %d", q.total(), tt.waiting)
			}
		})
	}
}

// The lane of a key changes after Len has chosen it, and the new lane is full.
func TestFairLaneChangesBeforePop(t *testing.T) {
	lane := map[string]int{"a1": 3}
	q := newFairQueue(letters, func(key string) int { return lane[key] })
	q.setWorkers(2)
	for _, key := range []string{"a1", "b1"} {
		q.Push(key)
		if q.Len() != 1 {
			t.Fatalf("%s cannot be taken", key)
		}
		lane["b1"] = 3
		if got := q.Pop(); got != key {
			t.Errorf("popped %s instead of %s", got, key)
		}
		delete(lane, "b1")
	}
}

// In any order of events, no key is lost, no group and no lane exceeds its limit, and the keys of a group in a lane keep their order.
func TestFairInvariants(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		lane := func(key string) int { return int(key[len(key)-1] - '0') }
		q := newFairQueue(func(key string) string { return key[:1] }, lane)
		workers := 1 + random.IntN(10)
		q.setWorkers(workers)
		var waiting, running []string // waiting: in the order of arrival
		held := map[int]int{}         // workers by lane
		for i := range 300 {
			switch {
			case random.IntN(2) == 0 && i < 250:
				key := fmt.Sprintf("%c%d/%d", 'a'+random.IntN(4), i, random.IntN(lanes))
				waiting = append(waiting, key)
				q.Push(key)
			case len(running) > 0 && random.IntN(2) == 0:
				j := random.IntN(len(running))
				q.release(running[j])
				held[lane(running[j])]--
				running = slices.Delete(running, j, j+1)
			}
			if len(running) == workers || q.Len() == 0 {
				continue
			}
			key := q.Pop()
			at := slices.Index(waiting, key)
			older := func(other string) bool { return other[0] == key[0] && lane(other) == lane(key) }
			if at < 0 || slices.ContainsFunc(waiting[:at], older) {
				t.Fatalf("seed %d: popped %s of %v", seed, key, waiting)
			}
			waiting, running = slices.Delete(waiting, at, at+1), append(running, key)
			held[lane(key)]++
			for i, later := lanes-1, 0; i >= 0; i-- {
				later += held[i]
				if later > max(workers*(10-i)/10, 1) {
					t.Fatalf("seed %d: of %d workers, lane %d and those after it hold %v", seed, workers, i, held)
				}
			}
		}
		if q.total() != len(waiting) || len(q.running) != len(running) {
			t.Fatalf("seed %d: %d wait and %d run, want %d and %d", seed, q.total(), len(q.running), len(waiting), len(running))
		}
	}
}

// A group that hangs, whose attempts fail and are retried, leaves the next worker to another one, and each
// of its keys is attempted again and again.
func TestFairLoopWithGroupThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		running, most := 0, 0
		started := map[string]int{}
		took := map[string]time.Duration{}
		begin := time.Now()
		l := NewFair(Config{Name: "test", RetryStart: time.Second, RetryMax: 8 * time.Second}, NewMetrics(prometheus.NewRegistry()),
			func(ctx context.Context, key string) (time.Time, error) {
				mu.Lock()
				defer mu.Unlock()
				if started[key]++; letters(key) != "hangs" {
					took[key] = time.Since(begin)
					return time.Time{}, nil
				}
				running++
				most = max(most, running)
				mu.Unlock()
				defer func() { running-- }() // with the lock
				defer mu.Lock()
				select {
				case <-ctx.Done():
				case <-time.After(15 * time.Second):
				}
				return time.Time{}, errors.New("timeout")
			}, letters, nil)
		for i := range 100 {
			l.Add(fmt.Sprint("hangs", i))
		}
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 10); close(done) }()
		for i := range 100 {
			synctest.Wait()
			begin = time.Now()
			key := fmt.Sprint("answers", i)
			l.Add(key)
			time.Sleep(16 * time.Second)
			synctest.Wait()
			mu.Lock()
			d, ok := took[key]
			mu.Unlock()
			if !ok || d > 15*time.Second {
				t.Errorf("%s has waited for more than an attempt: %t, %v", key, ok, d)
			}
		}
		mu.Lock()
		if most != 10 {
			t.Errorf("the group held %d workers, want 10", most)
		}
		// Ten workers make 1066 attempts in 1600 s.
		for i := range 100 {
			if n := started[fmt.Sprint("hangs", i)]; n < 9 || n > 11 {
				t.Errorf("key %d was attempted %d times", i, n)
			}
		}
		mu.Unlock()
		if n := l.Len(); n < 80 || n > 92 || n != l.Status().Waiting {
			t.Errorf("%d keys wait, %d in the status", n, l.Status().Waiting)
		}
		stop(nil)
		<-done
	})
}

// A group whose keys arrive while workers wait always holds as many workers as it may.
func TestFairLoopReachesTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		synced := 0
		l := NewFair(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second}, NewMetrics(prometheus.NewRegistry()),
			func(context.Context, string) (time.Time, error) {
				time.Sleep(time.Second)
				mu.Lock()
				defer mu.Unlock()
				synced++
				return time.Time{}, nil
			}, letters, nil)
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 10); close(done) }()
		synctest.Wait()
		for i := range 100 {
			l.Add(fmt.Sprint("a", i))
		}
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		mu.Lock()
		if synced != 100 { // 10 per second
			t.Errorf("%d keys were synced, want 100", synced)
		}
		mu.Unlock()
		stop(nil)
		<-done
	})
}

// An urgent key waits neither for keys that are not urgent nor for retries, which hold all workers that they may.
func TestFairLoopWithUrgentKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		begun := map[string]time.Time{}
		l := NewFair(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second}, NewMetrics(prometheus.NewRegistry()),
			func(_ context.Context, key string) (time.Time, error) {
				mu.Lock()
				begun[key] = time.Now()
				mu.Unlock()
				time.Sleep(10 * time.Second)
				if strings.HasPrefix(key, "fails") {
					return time.Time{}, errors.New("timeout")
				}
				return time.Time{}, nil
			}, letters, func(key string) bool { return !strings.HasPrefix(key, "detach") })
		for i := range 100 {
			l.Add(fmt.Sprint("fails", i))
		}
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 100); close(done) }()
		for i := range 2000 {
			l.Add(fmt.Sprintf("detach%c%d", 'a'+i%26, i))
		}
		time.Sleep(time.Minute)
		for i := range 300 {
			key := fmt.Sprint("attach", i)
			added := time.Now()
			l.Add(key)
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			at, ok := begun[key]
			mu.Unlock()
			if waited := at.Sub(added); !ok || waited > 0 {
				t.Fatalf("%s has waited for %v: %t", key, waited, !ok)
			}
		}
		stop(nil)
		<-done
	})
}
