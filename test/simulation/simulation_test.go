// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

var (
	seeds    = flag.Int("seeds", 100, "number of seeds")
	from     = flag.Uint64("from", 1, "the first seed")
	every    = flag.Uint64("every", 1, "distance of the seeds: 5 from 2 on are those with TopoLVM")
	stop     = flag.Bool("stop", false, "stop after the first violation, without a shorter history")
	same     = flag.Int("same", 300, "number of seeds that must give the same history in each run")
	sameFrom = flag.Uint64("same-from", 0, "the first of these; 0: one that no earlier run had")
	runs     = flag.Int("runs", 1, "number of histories of each seed")

	reverse   = flag.Bool("reverse", false, "run the last seed first")
	procs     = flag.Int("procs", 1, "GOMAXPROCS; with more than one, goroutines run in more orders")
	histories = flag.String("histories", "", "file to which the histories are written")
)

func TestMain(m *testing.M) {
	os.Setenv("GOMEMLIMIT", "off") // the processes need not read it from the cgroup
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	// The handler after the first limits the rate of errors, with a global clock that the histories would share.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	os.Exit(m.Run())
}

// TestSeeds runs a history for each seed. A violation is reported with its seed, which replays it, and with a
// shorter history that has the same violation.
func TestSeeds(t *testing.T) { run(t, *from, *seeds) }

// TestTopolvmSituations: histories with TopoLVM have all situations that its invariants need.
func TestTopolvmSituations(t *testing.T) {
	missing, all := slices.Clone(topolvmSituations), statistics{}
	for n := uint64(2); len(missing) > 0 && n < 1000; n += 5 {
		all.add(Run(t, n, nil))
		missing = slices.DeleteFunc(missing, func(situation string) bool { return all.situations[situation] > 0 })
	}
	if len(missing) > 0 {
		t.Errorf("never: %q; counted: %v", missing, all.situations)
	}
	t.Logf("all after %d histories", len(all.steps))
}

// historyLimit is a thousand times what a history takes.
const historyLimit = 2 * time.Minute

func run(t *testing.T, from uint64, seeds int) {
	begin, all := time.Now(), statistics{}
	n := from
	defer func() {
		if t.Failed() { // also after a data race, which ends the test at once
			t.Logf("the last seed: %d", n)
		}
	}()
	record := recorder(t)
	for i := range seeds * *runs {
		n = from + uint64(i / *runs)**every
		if *reverse {
			n = from + uint64(seeds-1 - i / *runs)**every
		}
		ended := make(chan struct{})
		stuck := time.AfterFunc(historyLimit, func() {
			select {
			case <-ended: // the process had been stopped
			case <-time.After(historyLimit):
				debug.SetTraceback("all")
				panic(fmt.Sprintf("seed %d: virtual time stands still: "+
					"a goroutine waits for a mutex that another one holds during a request", n))
			}
		})
		h := Run(t, n, nil)
		stuck.Stop()
		close(ended)
		record(h)
		all.add(h)
		if seeds == 1 {
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
			t.Logf("%d seeds, %v", i+1, time.Since(begin).Round(time.Second))
		}
	}
	t.Logf("%d seeds, %v per seed, %v of virtual time\n%s\n%s\n%v", seeds, time.Since(begin)/time.Duration(max(seeds, 1)),
		all.virtual.Round(time.Minute), histogram("steps", all.steps), histogram("faults", all.faults), all.situations)
}

// recorder returns a function that writes a history to the file of the flag.
func recorder(t *testing.T) func(History) {
	if *histories == "" {
		return func(History) {}
	}
	file, err := os.Create(*histories)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	encoder := json.NewEncoder(file)
	return func(h History) {
		if err := encoder.Encode(h); err != nil {
			t.Fatal(err)
		}
	}
}

// statistics are what histories consist of.
type statistics struct {
	steps, faults []int
	virtual       time.Duration
	situations    map[string]int
}

func (s *statistics) add(h History) {
	s.steps, s.faults, s.virtual = append(s.steps, h.Steps), append(s.faults, h.Faults), s.virtual+h.Duration
	if s.situations == nil {
		s.situations = map[string]int{}
	}
	for situation, n := range h.Situations {
		s.situations[situation] += n
	}
}

// histogram returns the number of histories with each number of what, in eight intervals.
func histogram(what string, values []int) string {
	const intervals, width = 8, 50
	if len(values) == 0 {
		return ""
	}
	size, sum, counts := slices.Max(values)/intervals+1, 0, [intervals]int{}
	for _, v := range values {
		counts[v/size]++
		sum += v
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s per history: %d on average\n", what, sum/len(values))
	for i, n := range counts {
		fmt.Fprintf(&b, "%5d-%-5d %7d %s\n", i*size, (i+1)*size-1, n, strings.Repeat("#", n*width/slices.Max(counts[:])))
	}
	return b.String()
}

func TestHistogram(t *testing.T) {
	got := histogram("steps", []int{0, 1, 15, 15, 16})
	bar := strings.Repeat("#", 50)
	want := "steps per history: 9 on average\n" +
		"    0-2           2 " + bar[:33] + "\n" +
		"    3-5           0 \n    6-8           0 \n    9-11          0 \n   12-14          0 \n" +
		"   15-17          3 " + bar + "\n" +
		"   18-20          0 \n   21-23          0 \n"
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestSameSeedSameHistory runs seeds in two processes, in opposite orders: their histories are equal, apart from a few. With -procs=2, the
// second process has two processors, which finds more.
func TestSameSeedSameHistory(t *testing.T) {
	first := cmp.Or(*sameFrom, uint64(time.Now().UnixNano()))
	files := []string{filepath.Join(t.TempDir(), "forward"), filepath.Join(t.TempDir(), "reverse")}
	var group errgroup.Group
	for i, args := range [][]string{{"-procs=1"}, {fmt.Sprint("-procs=", *procs), "-reverse"}} {
		group.Go(func() error {
			args = append(args, "-test.run=^TestSeeds$", "-test.timeout=24h", fmt.Sprint("-from=", first), fmt.Sprint("-seeds=", *same),
				fmt.Sprint("-runs=", *runs), "-histories="+files[i])
			out, err := exec.CommandContext(t.Context(), os.Args[0], args...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	known, compared, different := map[uint64]History{}, 0, 0
	for _, file := range files {
		n, differ := compare(t, file, known)
		compared, different = compared+n, different+differ
	}
	t.Logf("%d of %d histories differ", different, compared)
	if different*100 > *same**runs {
		t.Errorf("%d of %d histories differ, more than one in 100 seeds", different, compared)
	}
	if compared != 2**same**runs {
		t.Errorf("%d histories instead of %d", compared, 2**same**runs)
	}
}

// compare compares the histories in file with those that are known, and returns how many there are and how many differ.
func compare(t *testing.T, file string, known map[uint64]History) (n, different int) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for decoder := json.NewDecoder(f); decoder.More(); n++ {
		var h History
		if err := decoder.Decode(&h); err != nil {
			t.Fatal(err)
		}
		first, ok := known[h.Seed]
		if !ok {
			known[h.Seed] = h
			continue
		}
		if !gocmp.Equal(first, h) {
			same := commonLines(first, h)
			different++
			t.Logf("seed %d: the histories differ after\n%s\none continues with\n%s\nand one with\n%s", h.Seed,
				lines(first, same-5, same), lines(first, same, same+3), lines(h, same, same+3))
		}
	}
	return n, different
}

// commonLines returns the number of lines with which both histories begin.
func commonLines(a, b History) int {
	n := 0
	for n < min(len(a.Lines), len(b.Lines)) && a.Lines[n] == b.Lines[n] {
		n++
	}
	return n
}

// lines returns some lines of a history.
func lines(h History, from, to int) string {
	return strings.Join(h.Lines[min(max(from, 0), len(h.Lines)):min(to, len(h.Lines))], "\n")
}

// TestReplay: the choices of a history replay it.
func TestReplay(t *testing.T) {
	for n := uint64(1); n <= 3; n++ {
		first := Run(t, n, nil)
		if diff := gocmp.Diff(first, Run(t, n, first.Choices)); diff != "" {
			t.Errorf("seed %d: %s", n, diff)
		}
	}
}
