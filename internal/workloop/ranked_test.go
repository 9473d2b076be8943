// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// rankedBy returns a queue that looks the rank of a key up in ranks.
func rankedBy(ranks map[string]int) *rankedQueue[string] {
	return newRankedQueue(func(key string) int { return ranks[key] })
}

func pops(r *rankedQueue[string]) string {
	var keys []string
	for r.Len() > 0 {
		keys = append(keys, r.Pop())
	}
	return strings.Join(keys, " ")
}

func TestRankedOrder(t *testing.T) {
	r := rankedBy(map[string]int{"a": 2, "b": 1, "c": 0, "d": 2, "e": 1, "f": 0})
	for key := range strings.FieldsSeq("a b c d e f") {
		r.Push(key)
	}
	if got := pops(r); got != "c f b a e d" { // the fourth pop takes the lowest priority
		t.Errorf("the order is %q", got)
	}
}

// A permanently full high rank does not starve the lowest one.
func TestRankedDoesNotStarve(t *testing.T) {
	r := rankedBy(map[string]int{"urgent": 0, "other": 2})
	r.Push("other")
	for range fairnessInterval {
		r.Push("urgent")
		if r.Pop() == "other" {
			return
		}
	}
	t.Error("the key of the lowest rank was not popped")
}

func TestRankedTouch(t *testing.T) {
	for name, tt := range map[string]struct {
		rank int // of b, when it is touched
		want string
	}{
		"moves up":        {0, "b d a c"},
		"moves up by one": {1, "d b a c"},
		"equal rank":      {2, "d a b c"},
	} {
		t.Run(name, func(t *testing.T) {
			ranks := map[string]int{"a": 2, "b": 2, "c": 2, "d": 1}
			r := rankedBy(ranks)
			for key := range strings.FieldsSeq("a b c d") {
				r.Push(key)
			}
			ranks["b"] = tt.rank
			r.Touch("b")
			r.Touch("b")
			if got := pops(r); got != tt.want {
				t.Errorf("the order is %q instead of %q", got, tt.want)
			}
		})
	}
	t.Run("never moves down", func(t *testing.T) {
		ranks := map[string]int{"a": 1, "b": 0}
		r := rankedBy(ranks)
		r.Push("a")
		r.Push("b")
		ranks["b"] = 2
		r.Touch("b")
		if got := pops(r); got != "b a" {
			t.Errorf("the order is %q", got)
		}
	})
}

// A key that was popped and is pushed again goes to the end of its rank, and leaves no element
// behind.
func TestRankedRemovesOldElements(t *testing.T) {
	ranks := map[string]int{"a": 2, "b": 2}
	r := rankedBy(ranks)
	r.Push("a")
	r.Push("b")
	for range 100 {
		ranks["a"] = 0
		r.Touch("a")
		r.pops = 0 // the next pop takes the highest priority
		if got := r.Pop(); got != "a" {
			t.Fatalf("%q is first", got)
		}
		ranks["a"] = 2
		r.Push("a")
	}
	elements := 0
	for i := range r.lists {
		elements += r.lists[i].Len()
	}
	if elements != 2 || r.Len() != 2 {
		t.Errorf("2 keys have %d elements, and the length is %d", elements, r.Len())
	}
	if got := pops(r); got != "b a" {
		t.Errorf("the order is %q", got)
	}
}

// Concurrent adds with changing ranks enqueue each key once.
func TestRankedLoopHoldsEachKeyOnce(t *testing.T) {
	const keys, adders, adds = 20, 8, 2000
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		ranks, syncs := map[int]int{}, map[int]int{}
		running := map[int]bool{}
		l := NewRanked(Config{Name: "test", RetryStart: time.Second, RetryMax: time.Second}, NewMetrics(prometheus.NewRegistry()),
			func(_ context.Context, key int) (time.Time, error) {
				mu.Lock()
				defer mu.Unlock()
				if running[key] {
					t.Errorf("two workers sync %d", key)
				}
				running[key] = true
				mu.Unlock()
				time.Sleep(time.Millisecond)
				mu.Lock()
				running[key] = false
				syncs[key]++
				return time.Time{}, nil
			}, func(key int) int {
				mu.Lock()
				defer mu.Unlock()
				return ranks[key]
			})
		add := func() {
			var adding sync.WaitGroup
			for a := range adders {
				adding.Go(func() {
					random := rand.New(rand.NewPCG(uint64(a), 1))
					for range adds {
						key := random.IntN(keys)
						mu.Lock()
						ranks[key] = random.IntN(3)
						mu.Unlock()
						l.Add(key)
					}
				})
			}
			adding.Wait()
		}
		add()
		if n := l.Len(); n != keys {
			t.Errorf("%d keys wait instead of %d", n, keys)
		}
		ctx, stop := context.WithCancelCause(t.Context())
		done := make(chan struct{})
		go func() { l.Run(ctx, 4); close(done) }()
		time.Sleep(time.Second)
		synctest.Wait()
		mu.Lock()
		for key := range keys {
			if syncs[key] != 1 {
				t.Errorf("%d was synced %d times", key, syncs[key])
			}
		}
		mu.Unlock()
		add() // while workers run
		time.Sleep(time.Second)
		synctest.Wait()
		if n := l.Len(); n != 0 {
			t.Errorf("%d keys still wait", n)
		}
		stop(ErrDrain)
		<-done
	})
}
