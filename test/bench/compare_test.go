// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// runOf returns results of 100 volumes in four phases that take seconds each.
func runOf(seconds float64, resident int64) *results {
	of := func(name, request string) phase {
		return phase{Name: name, Seconds: seconds, VolumesPerSecond: 100 / seconds, CPUSeconds: seconds / 10, APIServerSeconds: seconds,
			EtcdSeconds: seconds / 2, ResidentBytes: resident, Requests: map[string]int{request: 150, "update leases": 1}}
	}
	return &results{Volumes: 100, Nodes: 5, Latency: "5ms", Idle: phase{ResidentBytes: resident / 2}, Phases: []phase{
		of(created, "create persistentvolumes"), of(bound, "create persistentvolumes"), of("expand", "patch persistentvolumes"),
		of("delete", "delete persistentvolumes")}}
}

// compared is a comparison whose first run was disturbed: 8 s instead of 2.
func compared() *comparison {
	pairs := [][2]*results{
		{runOf(8, 100<<20), runOf(4, 50<<20)}, {runOf(2, 100<<20), runOf(1, 50<<20)}, {runOf(2, 100<<20), runOf(2, 50<<20)},
	}
	return &comparison{
		Date: "2026-01-02", Machine: "2 CPUs", Kubernetes: "v1.36.3",
		Sides: [2]side{{Name: "sidecars", Versions: "csi-provisioner v6.3.0"},
			{Name: "storage-controller", Versions: "storage-controller v1"}},
		Pairs: pairs, Changes: pairs,
		Footprints: []footprint{
			{Resident: [2]int64{100 << 20, 30 << 20}, Peak: [2]int64{120 << 20, 40 << 20}},
			{Own: 1024, Resident: [2]int64{120 << 20, 40 << 20}, Peak: [2]int64{140 << 20, 48 << 20},
				Start: [2]float64{4, 2}, CPU: [2]float64{8, 2}},
			{Own: 2048, Resident: [2]int64{120 << 20, 40 << 20}, Peak: [2]int64{140 << 20, 56 << 20}},
			{Foreign: 1024, Resident: [2]int64{130 << 20, 35 << 20}, Peak: [2]int64{150 << 20, 44 << 20}},
		},
		Pressure: &pressure{Detaches: 2000, Nodes: 200, Attaches: 60, Each: "10s", Every: "1s",
			Sides: [2]waiting{{170, 197, 198, 9.8}, {0.02, 0.04, 0.05, 9.7}}},
		Throttled: &throttled{Claims: 100, Sides: [2]creation{{80, 480, 1000, 470.5}, {100, 51, 90, 5}}},
		Failover: &failover{Volumes: 20000, Claims: 10, Lease: "15s", Takeover: [2]takeover{
			{Term: []float64{20, 16, 18}, Kill: []float64{19, 21, 20}}, {Term: []float64{0.5, 0.25, 0.75}, Kill: []float64{15.5}}}},
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 4}, 4}, {[]float64{9, 1, 4, 2}, 3}} {
		before := slices.Clone(c.values)
		if got := median(c.values); got != c.want || !slices.Equal(before, c.values) {
			t.Errorf("median of %v: got %v, want %v; afterwards %v", before, got, c.want, c.values)
		}
	}
}

// TestMediansOfPairs checks that a ratio compares the two runs of a pair, which ran on the same machine at the
// same time.
func TestMediansOfPairs(t *testing.T) {
	theirs, own, ratios := medians(compared().Pairs, func(r *results) float64 { return r.Phases[0].Seconds })
	if theirs != 2 || own != 2 || withRange(ratios) != "0.50 (0.50 to 1.00)" {
		t.Errorf("got %v, %v and %v, want 2, 2 and 0.5, from 0.5 to 1", theirs, own, ratios)
	}
}

func TestRates(t *testing.T) {
	text := compared().rates()
	for _, want := range []string{
		"100 volumes, 5 nodes, 5ms per CSI call", "Pairs of runs: 3.", "csi-provisioner v6.3.0", "2026-01-02, Kubernetes v1.36.3, 2 CPUs",
		"| phase | | volumes/s | CPU ms: controllers | kube-apiserver | etcd | API requests |\n",
		"| created | sidecars | 50.0 | 2.00 | 20.0 | 10.0 | 1.51 |\n",
		"| bound | storage-controller | 50.0 | 2.00 | 20.0 | 10.0 | 1.51 |\n",
		"| bound | ratio | 2.00 (1.00 to 2.00) | 0.50 (0.50 to 1.00) |", "| 1.00 (1.00 to 1.00) |\n",
		"| whole life | sidecars | 16.7 | 6.00 | 60.0 | 30.0 | 4.53 |\n", "- sidecars, bound: create persistentvolumes 1.50\n",
		"| idle | 50.0 | 25.0 | 0.50 (0.50 to 0.50) |\n", "| after 100 volumes | 100 | 50.0 | 0.50 (0.50 to 0.50) |\n",
		"- storage-controller, delete: delete persistentvolumes 1.50\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// TestChanges checks that only the changes of volumes are rendered.
func TestChanges(t *testing.T) {
	text := compared().changes()
	for want, n := range map[string]int{
		"Pairs of runs: 3.": 1, "| expand | sidecars | 50.0 | 2.00 | 20.0 | 10.0 | 1.51 |\n": 1, "\n| ": 4,
		"- storage-controller, expand: patch persistentvolumes 1.50\n": 1, "create persistentvolumes": 0,
	} {
		if got := strings.Count(text, want); got != n {
			t.Errorf("%d times %q, want %d, in\n%s", got, want, n, text)
		}
	}
}

func TestMemoryLimit(t *testing.T) {
	base, own, foreign := limit(compared().Footprints)
	for _, c := range []struct{ got, want float64 }{
		{base, headroom * (40 << 20)}, {own, headroom * (8 << 10)}, {foreign, headroom * (4 << 10)},
	} {
		if math.Abs(c.got-c.want) > 1 {
			t.Errorf("got %v bytes, want %v", c.got, c.want)
		}
	}
	text := compared().memory()
	for _, want := range []string{"| 1024 | 0 | 120 | 40.0 | 0.33 | 140 | 48.0 | 0.34 |\n",
		"| 1024 | 0 | 4.0 | 2.0 | 0.50 | 8.0 | 2.0 | 0.25 |\n",
		"1.25 times the peak: 50 MiB + 10.0 KiB for each own volume + 5.0 KiB for each volume of another driver"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestPressure(t *testing.T) {
	text := compared().pressure()
	for _, want := range []string{"2000 detaches on 200 nodes", "takes 10s for each", "one of 60 attaches is requested every 1s",
		"csi-provisioner v6.3.0", "| sidecars | 170 | 197 | 198 | 9.80 |\n| storage-controller | 0.02 | 0.04 | 0.05 | 9.70 |\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestThrottled(t *testing.T) {
	text := compared().throttled()
	for _, want := range []string{"100 claims at once", "2 CreateVolume calls per second", "csi-provisioner v6.3.0",
		"| sidecars | 80 | 480 | 0.17 | 1000 | 470 |\n| storage-controller | 100 | 51.0 | 1.96 | 90 | 5.00 |\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestFailover(t *testing.T) {
	text := compared().failover()
	for _, want := range []string{
		"20000 volumes of the driver, 10 waiting claims, Leases of 15s.", "Median of 3,", "csi-provisioner v6.3.0",
		"| sidecars | 18.00 (16.00 to 20.00) | 20.00 (19.00 to 21.00) |\n" +
			"| storage-controller | 0.50 (0.25 to 0.75) | 15.50 |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// TestSpread checks that the delays of the rounds are in the middle of equal parts of 11 s.
func TestSpread(t *testing.T) {
	for round, want := range []time.Duration{1833 * time.Millisecond, 5500 * time.Millisecond, 9166 * time.Millisecond} {
		if got := spread(round, 3).Truncate(time.Millisecond); got != want {
			t.Errorf("round %d: got %v, want %v", round, got, want)
		}
	}
}

// TestWritePage checks that only what stands between the markers changes, and that a part that was not measured
// stays.
func TestWritePage(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	text := "before\n<!-- comparison: begin -->\nold\n<!-- comparison: end -->\nbetween\n" +
		"<!-- memory: begin -->\nkept\n<!-- memory: end -->\nafter\n<!-- pressure: begin -->\nolder\n<!-- pressure: end -->\n" +
		"<!-- changes: begin -->\nchanges\n<!-- changes: end -->\n<!-- throttled: begin -->\nthrottled\n<!-- throttled: end -->\n" +
		"<!-- failover: begin -->\nfailover\n<!-- failover: end -->\n"
	if err := os.WriteFile(page, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c := compared()
	c.Footprints = nil
	for range 2 {
		if err := c.writePage(page); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if want := strings.NewReplacer("old\n", c.rates(), "older\n", c.pressure(), "\nchanges\n", "\n"+c.changes(),
		"\nthrottled\n", "\n"+c.throttled(), "\nfailover\n", "\n"+c.failover()).Replace(text); err != nil || string(got) != want {
		t.Errorf("%v, got\n%s\nwant\n%s", err, got, want)
	}
	if err := os.WriteFile(page, []byte("no markers"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.writePage(page); err == nil || !strings.Contains(err.Error(), "<!-- comparison: begin -->") {
		t.Errorf("a page without markers: got %v", err)
	}
	if got, err := os.ReadFile(page); string(got) != "no markers" {
		t.Errorf("%v: the page is now %q", err, got)
	}
}

// TestExtend: rate, CPU and requests are of the same time.
func TestExtend(t *testing.T) {
	begin := time.Now()
	for last, want := range map[time.Duration]float64{time.Second: 2, 4 * time.Second: 4} {
		p := phase{Seconds: 2, VolumesPerSecond: 50, last: begin.Add(last)}
		if p.extend(begin, 100); p.Seconds != want || p.VolumesPerSecond != 100/want {
			t.Errorf("with the last request after %v: %v s, %v volumes/s", last, p.Seconds, p.VolumesPerSecond)
		}
	}
}

// TestPageIsReadFirst: a page that cannot be written is an error before anything is built and measured.
func TestPageIsReadFirst(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	page := filepath.Join(t.TempDir(), "page.md")
	for range 2 {
		c, err := compare(ended, options{comparing: true, compare: compareOptions{page: page}})
		if c != nil || err == nil || !strings.Contains(err.Error(), page) {
			t.Errorf("got %v, %v, want an error with %s", c, err, page)
		}
		if err := os.WriteFile(page, []byte("no markers"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNoForeignVolumes: zero is valid, and the formula does not name what was not measured.
func TestNoForeignVolumes(t *testing.T) {
	o := options{volumes: 1, nodes: 1, comparing: true}
	if err := o.validate(); err != nil {
		t.Error(err)
	}
	for _, n := range []*int{&o.compare.foreign, &o.compare.pairs, &o.compare.changes, &o.compare.detaches, &o.compare.throttled,
		&o.compare.failover} {
		*n = -1
		if err := o.validate(); err == nil {
			t.Error("a negative number is valid")
		}
		*n = 0
	}
	c := compared()
	c.Footprints = c.Footprints[:3]
	if text := c.memory(); !strings.Contains(text, "for each own volume.\n") {
		t.Error(text)
	}
}

// TestPageHasMarkers checks that the tables of docs/benchmark.md can be written.
func TestPageHasMarkers(t *testing.T) {
	if _, err := readPage("../../docs/benchmark.md"); err != nil {
		t.Error(err)
	}
}

func TestNumbers(t *testing.T) {
	if got, err := numbers("300,20"); err != nil || !slices.Equal(got, []int{20, 300}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := numbers(""); err != nil || got != nil {
		t.Errorf("an empty list: got %v, %v", got, err)
	}
	for _, list := range []string{"0", "5,", "x"} {
		if got, err := numbers(list); err == nil {
			t.Errorf("%q: got %v, want an error", list, got)
		}
	}
}

// TestFootprints measures the program on both sides with a few volumes.
func TestFootprints(t *testing.T) {
	got, err := measureFootprints(t.Context(), options{limit: 15 * time.Minute}, twice(t), 5, 0, 20)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Own != 0 || got[1].Own != 20 || got[1].Foreign != 5 {
		t.Fatalf("got %+v", got)
	}
	for _, f := range got {
		for s := range f.Resident {
			if f.Resident[s] < 10<<20 || f.Peak[s] < f.Resident[s] || f.Start[s] <= 0 || f.CPU[s] <= 0 {
				t.Errorf("got %+v", f)
			}
		}
	}
}

// TestMeasurePressure measures the program on both sides with a few detaches that take longer than all attaches.
func TestMeasurePressure(t *testing.T) {
	load := backlog{detaches: 200, nodes: 2, attaches: 3, each: 20 * time.Second, every: time.Millisecond}
	got, err := measurePressure(t.Context(), options{limit: 15 * time.Minute}, twice(t), load)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range got.Sides {
		if w.P50 <= 0 || w.P99 < w.P50 || w.Max < w.P99 || w.Max > load.each.Seconds() || w.Detached <= 0 {
			t.Errorf("got %+v", w)
		}
	}
}

// TestMeasureFailover measures the program on both sides with a few volumes.
func TestMeasureFailover(t *testing.T) {
	if err := exec.Command("unshare", "--uts", "true").Run(); err != nil {
		t.Skip("unshare --uts needs root:", err)
	}
	got, err := measureFailover(t.Context(), options{limit: 15 * time.Minute}, twice(t), cluster{volumes: 20, claims: 2, rounds: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, took := range got.Takeover {
		if len(took.Term) != 1 || took.Term[0] <= 0 || len(took.Kill) != 1 || took.Kill[0] < leaseDuration.Seconds()*2/3 {
			t.Errorf("got %+v", took)
		}
	}
}

// twice returns the program as both sides.
func twice(t *testing.T) [2]side {
	t.Helper()
	program, err := build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	all, err := sideOf("storage-controller", allFlags, program)
	if name, version, _ := strings.Cut(all.Versions, " "); err != nil || name != "storage-controller" || version == "" {
		t.Fatalf("version %q, %v", all.Versions, err)
	}
	return [2]side{all, all}
}
