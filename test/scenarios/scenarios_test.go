// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestLists relies on parseTitles, which refuses gaps and duplicates.
func TestLists(t *testing.T) {
	want := map[string]int{"provisioner": 130, "attacher": 75, "capacity": 67, "nodecontroller": 87, "resizer": 80, "snapshotter": 80}
	for _, c := range contracts {
		titles, err := c.titles()
		if err != nil {
			t.Fatal(err)
		}
		removed := 0
		for _, title := range titles {
			if isRemoved(title) {
				removed++
			}
		}
		if n := len(titles) - removed; n != want[c.name] {
			t.Errorf("%s has %d scenarios, want %d", c.name, n, want[c.name])
		}
		number := map[string]int{}
		for i, title := range titles {
			if n := number[title]; n > 0 {
				t.Errorf("%s: %03d and %03d have the same title", c.name, n, i+1)
			}
			number[title] = i + 1
			if n := len(strings.Fields(title)); n < 4 || n > 14 {
				t.Errorf("%s: the title of %03d has %d words, want 4 to 14", c.name, i+1, n)
			}
		}
	}
}

// A number that is not in the list is a misspelt one: the scenario that was meant would
// be reported as missing, or worse, another as tested.
func TestNumbersOfTestsAreInTheLists(t *testing.T) {
	covered, err := readTests(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range contracts {
		titles, err := c.titles()
		if err != nil {
			t.Fatal(err)
		}
		for n, names := range covered[c.name] {
			if n < 1 || n > len(titles) || isRemoved(titles[n-1]) {
				t.Errorf("%s has no scenario %03d, which %q claim to test", c.name, n, names)
			}
		}
	}
}

func TestParseTitles(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want []string // nil: an error
	}{
		"comments do not count":    {"# a list\n001 one\n002 two words\n", []string{"one", "two words"}},
		"no newline at the end":    {"001 one", []string{"one"}},
		"does not begin with 001":  {"002 two\n", nil},
		"a gap":                    {"001 one\n003 three\n", nil},
		"a duplicate":              {"001 one\n001 one\n", nil},
		"an empty line":            {"001 one\n\n002 two\n", nil},
		"a number without a title": {"001 \n", nil},
		"a number of two digits":   {"01 one\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseTitles(test.text)
			if (err != nil) != (test.want == nil) {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestNumbers(t *testing.T) {
	for name, want := range map[string][]int{
		"001":                {1},
		"001_attach":         {1},
		"014_016_017_others": {14, 16, 17},
		"001_020_attach_300": {1, 20},
		"001_0020_attach":    {1},
		"0014_attach":        nil,
		"14_attach":          nil,
		"014 attach":         nil,
		"attach_014":         nil,
		"":                   nil,
	} {
		if diff := cmp.Diff(want, numbers(name)); diff != "" {
			t.Errorf("%q: %s", name, diff)
		}
	}
}

func TestCoverage(t *testing.T) {
	for name, test := range map[string]struct {
		body string
		want map[int][]string
	}{
		"subtests": {`t.Run("001_002_a", f); s.t.Run("003_B", f)`,
			map[int][]string{1: {"001_002_a"}, 2: {"001_002_a"}, 3: {"003_B"}}},
		"a subtest within another": {`for range 3 { t.Run("group", func(t *testing.T) { t.Run("004_a", f) }) }`,
			map[int][]string{4: {"004_a"}}},
		"two tests of one": {`t.Run("005_a", f); t.Run("005_b", f)`, map[int][]string{5: {"005_a", "005_b"}}},
		"a raw literal":    {"t.Run(`006_a`, f)", map[int][]string{6: {"006_a"}}},
		"the key of a map": {`for n, f := range map[string]func(){"007_a": nil, "008": nil} { t.Run(n, f) }`,
			map[int][]string{7: {"007_a"}, 8: {"008"}}},
		"a field with its name":    {`_ = []row{{name: "009_010_a", size: 3}}`, map[int][]string{9: {"009_010_a"}, 10: {"009_010_a"}}},
		"a field without its name": {`_ = []row{{"011_a", 3}}; _ = row{"012_a", 3}`, map[int][]string{11: {"011_a"}, 12: {"012_a"}}},
		"in rows other strings":    {`_ = []row{{name: "013 a"}, {name: "014_A"}, {name: "0150"}}`, nil},
		"the value of a map":       {`_ = map[string]string{"a": "016"}`, nil},
		"an element of a list":     {`_ = []string{"017"}; _ = [...]string{0: "018"}`, nil},
		"calls of other functions": {`t.Log("019_a"); Run("020_a"); t.Run(); t.Run(name, f)`, nil},
		"plain strings":            {`x := "021_a"; _ = x`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := coverage{}
			if err := got.add("x_test.go", []byte("package x\nfunc TestCapacityScenario(t *testing.T) {"+test.body+"}")); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got["capacity"]); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCoverageIsOfTheFunctionsOfContracts(t *testing.T) {
	got := coverage{}
	for _, source := range []string{
		`package a; func TestAttacherScenario(t *testing.T) { t.Run("001_a", nil) }; func TestOther(t *testing.T) { t.Run("002_a", nil) }`,
		`package b; func TestAttacherScenario(t *testing.T) { t.Run("001_b", nil) }; func (s) TestAttacherScenario() { t.Run("003_a", nil) }`,
		`package c; func TestProvisionerScenario(t *testing.T) { t.Run("004_a", nil) }; func TestNodeControllerScenario(t *testing.T)`,
	} {
		if err := got.add("x_test.go", []byte(source)); err != nil {
			t.Fatal(err)
		}
	}
	want := coverage{"attacher": {1: {"001_a", "001_b"}}, "provisioner": {4: {"004_a"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if err := got.add("x_test.go", []byte("no source")); err == nil {
		t.Error("no error for a file that is not Go source")
	}
}

func TestReport(t *testing.T) {
	titles, tests := []string{"one", "two"}, map[int][]string{2: {"002_a", "002_b"}}
	all := "x: 2 scenarios, 1 tested\n  001 MISSING one\n  002 tested  two (002_a, 002_b)\n"
	if diff := cmp.Diff(all, report("x", titles, tests, false)); diff != "" {
		t.Error(diff)
	}
	titles = append(titles, "removed: three")
	missing := "x: 2 scenarios, 1 tested\n  001 MISSING one\n"
	if diff := cmp.Diff(missing, report("x", titles, tests, true)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(all+"  003 removed: three\n", report("x", titles, tests, false)); diff != "" {
		t.Error(diff)
	}
}
