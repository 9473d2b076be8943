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

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// letters returns the group of a key: its letters.
func letters(key string) string { return strings.TrimRight(key, "0123456789") }

// TestFairOrder runs a script: "+k" pushes key k, "-k" releases it, and "?" pops until nothing can be
// taken. The keys of want were popped, with "|" for the end of each "?". Keys without letters have no
// group.
func TestFairOrder(t *testing.T) {
	for name, tt := range map[string]struct {
		workers      int
		script, want string
		waiting      int // at the end
	}{
		"a group holds four fifths":        {10, "+a1 +a2 +a3 +a4 +a5 +a6 +a7 +a8 +a9 +b1 ?", "a1 a2 a3 a4 a5 a6 a7 a8 b1 |", 1},
		"rounded down":                     {4, "+a1 +a2 +a3 +a4 +b1 ?", "a1 a2 a3 b1 |", 1},
		"and at least one":                 {1, "+a1 +a2 +b1 ?", "a1 b1 |", 1},
		"all without other groups":         {2, "+a1 +a2 +a3 ?", "a1 a2 |", 1},
		"all after the other groups":       {2, "+a1 +a2 +a3 +b1 ? -b1 ?", "a1 b1 | a2 |", 1},
		"back below the limit":             {5, "+a1 +a2 +a3 +a4 +a5 +a6 ? +b1 -a1 ? -a2 ?", "a1 a2 a3 a4 a5 | b1 | a6 |", 0},
		"another group overtakes":          {2, "+a1 +a2 +b1 +a3 ?", "a1 b1 |", 2},
		"first in, first out below":        {10, "+a1 +b1 +a2 +b2 ?", "a1 b1 a2 b2 |", 0},
		"no group, no limit":               {2, "+1 +2 +3 ?", "1 2 3 |", 0},
		"each release admits one":          {2, "+b1 +a1 +a2 +a3 ? -a1 ? -a2 ?", "b1 a1 | a2 | a3 |", 0},
		"held back before later arrivals":  {2, "+b1 +a1 +a2 ? +c1 -a1 ?", "b1 a1 | a2 c1 |", 0},
		"releases of another group do not": {2, "+a1 +a2 +b1 +b2 ? -b1 ?", "a1 b1 | b2 |", 1},
		"several releases, then pops":      {5, "+b1 +a1 +a2 +a3 +a4 +a5 +a6 +a7 ? -a1 -a2 ?", "b1 a1 a2 a3 a4 | a5 a6 |", 1},
		"a released key comes again last":  {2, "+b1 +a1 +a2 ? -a1 +a1 ? -a2 ?", "b1 a1 | a2 | a1 |", 0},
		"groups that end and begin again":  {1, "+a1 ? -a1 ? +a2 +a3 ? -a2 ? -a3 ?", "a1 | | a2 | a3 | |", 0},
	} {
		t.Run(name, func(t *testing.T) {
			q := newFairQueue(letters)
			q.setWorkers(tt.workers)
			var got []string
			for step := range strings.FieldsSeq(tt.script) {
				switch key := step[1:]; step[0] {
				case '+':
					q.Push(key)
				case '-':
					q.release(key)
				default:
					for q.Len() > 0 {
						got = append(got, q.Pop())
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

// The group of a key is that of the time when the key is taken, also after it was held back.
func TestFairGroupChanges(t *testing.T) {
	groups := map[string]string{"1": "a", "2": "a", "3": "a", "4": "a"}
	q := newFairQueue(func(key string) string { return groups[key] })
	pop := func() string {
		if q.Len() == 0 {
			return ""
		}
		return q.Pop()
	}
	q.setWorkers(2)
	groups["other"] = "d"
	q.Push("other")
	for key := range strings.FieldsSeq("1 2 3 4") {
		q.Push(key)
	}
	got := []string{pop(), pop(), pop()} // 2, 3 and 4 are held back
	groups["2"], groups["1"] = "b", "c"
	q.release("1") // which was of group a
	got = append(got, pop(), pop(), pop())
	groups["4"] = "b"
	q.release("3")
	got = append(got, pop()) // b is at its limit
	q.release("2")
	got = append(got, pop())
	q.release("4")
	q.release("other")
	if diff := cmp.Diff([]string{"other", "1", "", "2", "3", "", "", "4"}, got); diff != "" {
		t.Error(diff)
	}
	if len(q.groups)+len(q.running)+len(q.names)+len(q.work)+q.total() != 0 {
		t.Errorf("the queue holds %d groups, %d running and %d waiting keys", len(q.groups), len(q.running), q.total())
	}
}

// In any order of events, no key is lost, no group exceeds its limit, the keys of a group keep their
// order, and a worker waits only if all keys are of groups at their limits.
func TestFairInvariants(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		q := newFairQueue(letters)
		q.setWorkers(1 + random.IntN(10))
		var waiting, running []string // waiting: in the order of arrival
		held := map[string]int{}      // workers by group
		for i := range 300 {
			switch {
			case random.IntN(2) == 0 && i < 250:
				key := fmt.Sprintf("%c%d", 'a'+random.IntN(4), i)
				waiting = append(waiting, key)
				q.Push(key)
			case len(running) > 0 && random.IntN(2) == 0:
				j := random.IntN(len(running))
				q.release(running[j])
				held[letters(running[j])]--
				running = slices.Delete(running, j, j+1)
			}
			first := slices.IndexFunc(waiting, func(key string) bool { return held[letters(key)] < q.limit() })
			if (q.Len() > 0) != (first >= 0) {
				t.Fatalf("seed %d: Len is %d; running %v, waiting %v", seed, q.Len(), running, waiting)
			}
			if first < 0 {
				continue
			}
			key := q.Pop()
			if key != waiting[first] {
				t.Fatalf("seed %d: popped %s instead of %s", seed, key, waiting[first])
			}
			waiting, running = slices.Delete(waiting, first, first+1), append(running, key)
			held[letters(key)]++
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
			}, letters)
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
			if d, ok := took[key]; !ok || d > 15*time.Second {
				t.Fatalf("%s has waited for more than an attempt: %t, %v", key, ok, d)
			}
			mu.Unlock()
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
			}, letters)
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
