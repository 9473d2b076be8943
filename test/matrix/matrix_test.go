// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const root = "../.."

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestStoriesAreTests compares the stories with the functions of test/e2e.
func TestStoriesAreTests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "test/e2e/*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	functions := map[string]bool{demo: true}
	for _, file := range files {
		syntax, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range syntax.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				functions[fn.Name.Name] = true
			}
		}
	}
	roles := map[string]bool{}
	for i, s := range stories {
		roles[s.role] = true
		if !functions[s.test] {
			t.Errorf("%s: test/e2e does not have this test", s.test)
		}
		if slices.ContainsFunc(stories[:i], func(other story) bool { return other.test == s.test }) {
			t.Errorf("%s is listed twice", s.test)
		}
	}
	for _, role := range []string{"all", "provision", "attach", "capacity", "resize", "snapshot", "nodecontroller"} {
		if !roles[role] {
			t.Errorf("no story of the role %s", role)
		}
	}
}

// TestPageIsCurrent compares the page with the versions, the stories and the charts.
func TestPageIsCurrent(t *testing.T) {
	versions, err := kubetest.Versions()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]kubetest.Version{}
	for _, v := range versions {
		known[v.Kubernetes] = v
	}
	if len(known) != minors {
		t.Errorf("%d versions, want %d", len(known), minors)
	}
	text := read(t, page)
	for _, s := range stories {
		if line := fmt.Sprintf("| %s | %s | `%s` |", s.role, s.does, s.test); !strings.Contains(text, line) {
			t.Errorf("%s does not have %q: run make test-matrix", page, line)
		}
	}
	var tested []kubetest.Version
	if m := regexp.MustCompile(`(?m)^\| release \| (.+) \|$`).FindStringSubmatch(text); m != nil {
		for release := range strings.SplitSeq(m[1], " | ") {
			if _, ok := known[release]; !ok {
				t.Errorf("%s has Kubernetes %s, which test/controlplane does not have: run make test-matrix", page, release)
			}
			tested = append(tested, known[release])
		}
	}
	if len(tested) == 0 || t.Failed() {
		t.Fatalf("%s: versions %v", page, tested)
	}
	want := kubeVersion(tested[0].Minor())
	if !strings.Contains(text, "`"+want+"`") {
		t.Errorf("%s does not have the kubeVersion %q: run make test-matrix", page, want)
	}
	for _, file := range []string{"Chart.yaml", "charts/storage-controller-library/Chart.yaml"} {
		var chart struct {
			KubeVersion string `json:"kubeVersion"`
		}
		if err := yaml.Unmarshal([]byte(read(t, filepath.Join("deploy/helm/storage-controller", file))), &chart); err != nil {
			t.Fatal(err)
		}
		if chart.KubeVersion != want {
			t.Errorf("kubeVersion of %s: got %q, want %q, from the oldest version that is tested", file, chart.KubeVersion, want)
		}
	}
}

func TestNewestMinors(t *testing.T) {
	list := []string{"k8s.io/kubernetes", "v1.9.12", "v1.36.3", "v1.36.10", "v1.37.0-rc.1", "v1.35.4", "v1.34.4", "v1.36.11-beta.0"}
	for n, want := range map[int]string{
		3: "[v1.36.10 v1.35.4 v1.34.4]",
		9: "[v1.36.10 v1.35.4 v1.34.4 v1.9.12]",
	} {
		var got []string
		for _, v := range newestMinors(list, n) {
			got = append(got, v.Kubernetes)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("the newest %d: got %v, want %s", n, got, want)
		}
	}
}

// TestOutcomes feeds the output of a test binary in parts.
func TestOutcomes(t *testing.T) {
	r := &result{Minor: "1.9", Outcomes: map[string]outcome{}}
	out := &testOutput{record: func(test string, o outcome, _ string) { r.Outcomes[test] = o }}
	passing, failing, skipped, missing := stories[1], stories[2], stories[3], stories[4]
	text := fmt.Sprintf("=== RUN   %[1]s\n    --- FAIL: %[1]s/sub (0.00s)\n--- PASS: %[1]s (12.30s)\n"+
		"--- FAIL: %[2]s (1.00s)\n--- SKIP: %[3]s (0.00s)\n",
		passing.test, failing.test, skipped.test)
	for part := range slices.Chunk([]byte(text), 7) {
		if n, err := out.Write(part); n != len(part) || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	rendered := render([]*result{r})
	for _, tt := range []struct {
		story story
		want  string
	}{{passing, "passed"}, {failing, "**failed**"}, {skipped, "**not run**"}, {missing, "**not run**"}} {
		if line := fmt.Sprintf("`%s` | %s |\n", tt.story.test, tt.want); !strings.Contains(rendered, line) {
			t.Errorf("the page does not have %q:\n%s", line, rendered)
		}
	}
	if got, want := r.count(passed), 1; got != want {
		t.Errorf("%d passed, want %d", got, want)
	}
}

// TestPattern: the names of some tests begin with those of others.
func TestPattern(t *testing.T) {
	if p := pattern(); !strings.HasPrefix(p, "^(Test") || !strings.HasSuffix(p, ")$") || strings.Contains(p, demo) {
		t.Errorf("pattern %q", p)
	}
}
