// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

var (
	seeds = flag.Int("seeds", 40, "number of seeds")
	from  = flag.Uint64("from", 1, "the first seed")
	stop  = flag.Bool("stop", false, "stop after the first violation, without a shorter history")
	runs  = flag.Int("runs", 3, "runs of each seed that must give the same history")
)

func TestMain(m *testing.M) {
	os.Setenv("GODEBUG", "randseednop=0") // for math/rand.Seed
	os.Setenv("GOMEMLIMIT", "off")        // the processes need not read it from the cgroup
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	runtime.GOMAXPROCS(1)
	// The handler behind the first limits the rate of errors, with a global clock that the histories would share.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	os.Exit(m.Run())
}

// TestSeeds runs a history for each seed. A violation is reported with its seed, which replays it, and with a
// shorter history that has a violation, too.
func TestSeeds(t *testing.T) {
	begin, steps, faults := time.Now(), 0, 0
	for i := range *seeds {
		n := *from + uint64(i)
		h := Run(t, n, nil, logr.Discard())
		steps, faults = steps+h.Steps, faults+h.Faults
		if *seeds == 1 {
			t.Log(strings.Join(h.Lines, "\n"))
		}
		if h.Violation != "" && *stop {
			t.Fatalf("seed %d: %s", n, h.Violation)
		}
		if h.Violation != "" {
			short := Minimize(t, h)
			t.Errorf("seed %d: %s\nminimized: %s\n%s", n, h.Violation, short.Violation, strings.Join(short.Lines, "\n"))
		}
		if (i+1)%1000 == 0 {
			t.Logf("%d seeds, %d steps, %d faults, %v", i+1, steps, faults, time.Since(begin).Round(time.Second))
		}
	}
	t.Logf("%d seeds, %d steps, %d faults, %v per seed", *seeds, steps, faults, time.Since(begin)/time.Duration(*seeds))
}

func TestSameSeedSameHistory(t *testing.T) {
	for n := *from; n < *from+3; n++ {
		first := Run(t, n, nil, logr.Discard())
		for range *runs - 1 {
			if diff := cmp.Diff(first.Lines, Run(t, n, nil, logr.Discard()).Lines); diff != "" {
				t.Fatalf("seed %d: %s", n, diff)
			}
		}
		if diff := cmp.Diff(first.Lines, Run(t, 0, first.Choices, logr.Discard()).Lines); diff != "" {
			t.Errorf("seed %d: the replay of its choices differs: %s", n, diff)
		}
	}
}
