// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// report returns a report of ginkgo with one specification per side, and the setup of the suite.
func report(t *testing.T, onReference, onOurs string) *results {
	t.Helper()
	spec := `{"ContainerHierarchyTexts":["[sig-storage] External Storage [Driver: %s.conformance.example.com]",` +
		`"[Testpattern: Dynamic PV (default fs)] [Feature:X] provisioning"],"LeafNodeText":"should [Slow] work",%s}`
	state := func(s string) string { return fmt.Sprintf(`"State":%q,"Failure":{"Message":"driver lacks it"}`, s) }
	text := fmt.Sprintf(`[{"SpecReports":[{"ContainerHierarchyTexts":null,"State":"passed"},`+spec+`,`+spec+`]}]`,
		reference, state(onReference), ours, state(onOurs))
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	specs, err := read(path)
	if err != nil {
		t.Fatal(err)
	}
	return &results{binding: "Immediate", specs: specs, suites: []string{specs[0].suite}}
}

func TestVerdict(t *testing.T) {
	for _, test := range []struct {
		onReference, onOurs, row string
		ok                       bool
	}{
		{"passed", "passed", "| 1 | 0 | 0 | 1 | 0 | 0 |", true},
		{"passed", "failed", "| 1 | 0 | 0 | 0 | 1 | 0 |", false},
		{"passed", "timedout", "| 1 | 0 | 0 | 0 | 1 | 0 |", false},
		{"passed", "skipped", "| 1 | 0 | 0 | 0 | 0 | 1 |", false},
		{"panicked", "passed", "| 0 | 1 | 0 | 1 | 0 | 0 |", true},
		{"skipped", "skipped", "| 0 | 0 | 1 | 0 | 0 | 1 |", false}, // nothing was tested
	} {
		r := []*results{report(t, test.onReference, test.onOurs)}
		if err := verdict(r); (err == nil) != test.ok {
			t.Errorf("%s, %s: %v", test.onReference, test.onOurs, err)
		}
		row, suites := "| Dynamic PV (default fs) "+test.row, "suites: provisioning\n"
		if table := tables(r); !strings.Contains(table, row) || !strings.Contains(table, suites) {
			t.Errorf("%s, %s: %q or %q is missing in\n%s", test.onReference, test.onOurs, row, suites, table)
		}
	}
}

func TestPerformanceTable(t *testing.T) {
	lifecycle := "baseline (*framework.Metrics)({\n  AvgLatency: (time.Duration) 120000000000,\n  Throughput: (float64) 0.5\n})\n" +
		"  I1130 framework.go:1] Metrics to evaluate: (*framework.Metrics)({\n  AvgLatency: (time.Duration) %d,\n" +
		"  Throughput: (float64) 25.5\n})\n"
	deletion := "Deleted PV pvc-1, PVC pvc-a in 1.5s\nDeleted PV pvc-2, PVC pvc-b in 500ms\nDeleted all PVC/PVs in 1m1.25s\n"
	specs := []spec{
		{side: reference, suite: "volume-lifecycle-performance", output: fmt.Sprintf(lifecycle, 2_500_000_000)},
		{side: reference, suite: "volume-lifecycle-performance", output: fmt.Sprintf(lifecycle, 3_500_000_000)},
		{side: ours, suite: "volume-lifecycle-performance", output: fmt.Sprintf(lifecycle, 500_000_000)},
		{side: ours, suite: "pvc-deletion-performance", output: deletion},
	}
	table, err := performanceTable(specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{
		"| volume-lifecycle-performance | PVC created until bound, average, s | 3 (2.5 to 3.5) | 0.5 (0.5 to 0.5) |",
		"| volume-lifecycle-performance | PVCs divided by the longest of these times, 1/s | 25.5 (25.5 to 25.5) | 25.5 (25.5 to 25.5) |",
		"| pvc-deletion-performance | all PVCs and PVs deleted, s | not run | 61.2 (61.2 to 61.2) |",
		"| pvc-deletion-performance | PVC deleted until PV deleted, p50, s | not run | 0.5 (0.5 to 0.5) |",
		"| pvc-deletion-performance | PVC deleted until PV deleted, p99, s | not run | 1.5 (1.5 to 1.5) |",
	} {
		if !strings.Contains(table, row+"\n") {
			t.Errorf("%q is missing in\n%s", row, table)
		}
	}
	// A newer Kubernetes may log something else.
	if table, err := performanceTable([]spec{{side: ours, suite: "volume-lifecycle-performance", output: "Metrics: none"}}); err == nil {
		t.Errorf("a specification without metrics: %s", table)
	}
}

// TestPagePartsAreKept writes the part of --performance and the rest of the page in both orders.
func TestPagePartsAreKept(t *testing.T) {
	part := func(text string) string {
		return "<!-- performance: begin -->\n" + text + "\n<!-- performance: end -->"
	}
	page := withPerformance("# Title\n", "")
	if page != "# Title\n" {
		t.Errorf("a page without the part: %q", page)
	}
	page = withPerformance(withPerformance(page, part("old")), part("new"))
	if want := "# Title\n\n" + part("new") + "\n"; page != want {
		t.Errorf("got %q, want %q", page, want)
	}
	page = withPerformance("# Other\n", performancePart.FindString(page))
	if want := "# Other\n\n" + part("new") + "\n"; page != want {
		t.Errorf("got %q, want %q", page, want)
	}
}
