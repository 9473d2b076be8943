// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import "math/rand/v2"

// choices is the source of everything random in a history. Each choice is a number below a limit; 0 is
// the simplest one, such as no fault. The choices that were taken replay the history.
type choices struct {
	rng    *rand.Rand // nil: a replay
	replay []uint16
	taken  []uint16
}

func newChoices(seed uint64) *choices { return &choices{rng: rand.New(rand.NewPCG(seed, 0))} }

// Pick returns a number below n. A replay that has ended returns 0.
func (c *choices) Pick(n int) int {
	v := 0
	switch {
	case n <= 1:
		return 0
	case c.rng != nil:
		v = c.rng.IntN(n)
	case len(c.taken) < len(c.replay):
		v = int(c.replay[len(c.taken)]) % n
	}
	c.taken = append(c.taken, uint16(v))
	return v
}

// Chance returns true with a probability of percent/100.
func (c *choices) Chance(percent int) bool { return c.Pick(100) >= 100-percent }
