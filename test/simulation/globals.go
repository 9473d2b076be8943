// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"math/rand"
	"sync"
)

// globals is the global source of random numbers, from which libraries draw.
type globals struct {
	calls int64    // of seed
	next  []uint64 // the next numbers, unless a library has drawn some
}

// unseeded is the number of calls of seed after which the source is seeded in any case. Two runs of a history in which
// libraries have drawn numbers at different times are equal from then on.
const unseeded = 16

// seed makes the next random numbers depend on the number of calls only. Seeding is expensive: a source from which
// nothing was drawn since the last call stays as it is.
func (g *globals) seed() {
	g.calls++
	if len(g.next) > 0 && rand.Uint64() == g.next[0] {
		g.next = g.next[1:]
		return
	}
	//lint:ignore SA1019 wait.Jitter uses the global source
	rand.Seed(g.calls)
	g.next = first(g.calls)[:unseeded-g.calls%unseeded-1]
}

// first returns the first numbers after a seed.
var first = func() func(seed int64) []uint64 {
	var mu sync.Mutex
	known := map[int64][]uint64{}
	return func(seed int64) []uint64 {
		mu.Lock()
		defer mu.Unlock()
		if numbers, ok := known[seed]; ok {
			return numbers
		}
		source, numbers := rand.New(rand.NewSource(seed)), make([]uint64, unseeded)
		for i := range numbers {
			numbers[i] = source.Uint64()
		}
		known[seed] = numbers
		return numbers
	}
}()
