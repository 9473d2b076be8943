// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"k8s.io/klog/v2"
)

// memoryLimitRefresh is the interval at which the memory limit of the container is read again, because
// a resize of the pod changes it without a restart.
const memoryLimitRefresh = time.Minute

// limitMemory sets the memory limit of the Go runtime to 90% of the container's until ctx ends, unless
// the environment variable GOMEMLIMIT is set. The rest is for memory that Go does not manage.
func limitMemory(ctx context.Context, options ...memlimit.Option) {
	log := klog.FromContext(ctx)
	if os.Getenv("GOMEMLIMIT") == "" {
		_ = os.Unsetenv("GOMEMLIMIT") // memlimit takes an empty value for a limit
	}
	limit, err := memlimit.Set(append(options, memlimit.WithRefreshInterval(ctx, memoryLimitRefresh))...)
	env := os.Getenv("GOMEMLIMIT")
	switch {
	case err != nil:
		log.Info("Go memory limit unchanged: cannot read the memory limit of the container", "bytes", limit, "err", err)
	case env != "":
		log.Info("Go memory limit set by the environment", "GOMEMLIMIT", env, "bytes", limit)
	case limit == math.MaxInt64:
		log.Info("Go memory limit not set: the container has none")
	default:
		log.Info("Go memory limit follows that of the container", "bytes", limit)
	}
}

const (
	// gcPercent is the growth of the heap between two garbage collections, unless the environment variable GOGC is set.
	gcPercent = 100
	// gcPercentOfLists is that growth until the first lists are complete.
	gcPercentOfLists = 50
	// firstEvents is the time after the first lists in which a new leader handles an event for each object.
	firstEvents = 5 * time.Second
)

// saveMemory collects garbage more often until members have synced their caches: decoding the first lists, and the first events, need
// a multiple of the memory that is in use later. Then it returns this memory to the operating system.
func saveMemory(ctx context.Context, members []*member) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercentOfLists)
		defer debug.SetGCPercent(gcPercent)
	}
	if !settled(ctx, members) {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(firstEvents):
		debug.FreeOSMemory()
	}
}
