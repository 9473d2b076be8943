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
