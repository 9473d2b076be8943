// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"math"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
)

func TestLimitMemory(t *testing.T) {
	const before = 3 << 30
	initial := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(initial)
	none := func() (uint64, error) { return 0, memlimit.ErrNoLimit }
	unreadable := func() (uint64, error) { return 0, errors.New("broken cgroup") }
	for name, tt := range map[string]struct {
		provider memlimit.Provider
		env      string
		want     int64
		logged   string
	}{
		"container with a limit":    {memlimit.Limit(1000 << 20), "", 900 << 20, `follows that of the container" "bytes"=943718400`},
		"container without a limit": {none, "", math.MaxInt64, "the container has none"},
		"explicit limit":            {memlimit.Limit(1000 << 20), "3GiB", before, `"GOMEMLIMIT"="3GiB" "bytes"=3221225472`},
		"no cgroup":                 {unreadable, "", before, "broken cgroup"},
	} {
		t.Run(name, func(t *testing.T) {
			debug.SetMemoryLimit(before) // as the runtime does for 3GiB
			t.Setenv("GOMEMLIMIT", tt.env)
			var lines []string
			log := funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{})
			limitMemory(klog.NewContext(t.Context(), log), memlimit.WithProvider(tt.provider))
			if got := debug.SetMemoryLimit(-1); got != tt.want {
				t.Errorf("the limit is %d, want %d", got, tt.want)
			}
			if len(lines) != 1 || !strings.Contains(lines[0], tt.logged) {
				t.Errorf("logged %q, want one line with %q", lines, tt.logged)
			}
		})
	}
}

// TestSaveMemory: garbage is collected more often until the caches are synced, unless GOGC is set.
func TestSaveMemory(t *testing.T) {
	initial := debug.SetGCPercent(gcPercent)
	defer debug.SetGCPercent(initial)
	for env, want := range map[string]uint64{"": gcPercentOfLists, "100": gcPercent} {
		t.Run("GOGC="+env, func(t *testing.T) {
			t.Setenv("GOGC", env)
			synctest.Test(t, func(t *testing.T) {
				listing := newMember("role", true, nil)
				var wg sync.WaitGroup
				wg.Go(func() { saveMemory(t.Context(), []*member{listing}) })
				synctest.Wait()
				if got := percentOfGC(); got != want {
					t.Errorf("%d percent during the first lists, want %d", got, want)
				}
				listing.settle()
				wg.Wait()
				if got := percentOfGC(); got != gcPercent {
					t.Errorf("%d percent after them", got)
				}
			})
		})
	}
}

func percentOfGC() uint64 {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
