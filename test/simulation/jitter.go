// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
	_ "unsafe" // for go:linkname
)

// jitterRand is the random number with which client-go and the product lengthen their delays. From a sequence, several goroutines
// would draw their numbers in another order in each run.
//
//go:linkname jitterRand k8s.io/apimachinery/pkg/util/wait.jitterRand
var jitterRand func() float64

func init() { jitterRand = jitter }

// jitterStep is the step of the history that runs.
var jitterStep atomic.Uint64

// jitter returns a number from 0 to 1 that depends on the step and the virtual time only.
func jitter() float64 {
	return rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), jitterStep.Load())).Float64()
}
