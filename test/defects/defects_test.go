// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// testDefects returns the entries of defects.yaml.
func testDefects(t *testing.T) []defect {
	t.Helper()
	defects, err := parse(source)
	if err != nil {
		t.Fatal(err)
	}
	return defects
}

// TestDefects checks each entry of defects.yaml. That commits exist is not checked: a clone may be shallow.
func TestDefects(t *testing.T) {
	var (
		commit   = regexp.MustCompile(`^[0-9a-f]{12}$`)
		test     = regexp.MustCompile(`^Test\w+(/[\w.*]+)*$`)
		sentence = regexp.MustCompile(`[.:] |\.$`)
	)
	isKind := func(name string) bool {
		for _, kind := range kinds {
			if kind.name == name {
				return true
			}
		}
		return false
	}
	numbers := map[string]int{}
	for i, d := range testDefects(t) {
		n := i + 1
		if !slices.Contains(roles, d.Role) {
			t.Errorf("defect %d: the role %q is unknown", n, d.Role)
		}
		if !isKind(d.Kind) {
			t.Errorf("defect %d: the kind %q is unknown", n, d.Kind)
		}
		if !slices.Contains(findings, d.Found) {
			t.Errorf("defect %d: found by %q is unknown", n, d.Found)
		}
		if !commit.MatchString(d.Fix) {
			t.Errorf("defect %d: the commit %q does not have 12 hexadecimal digits", n, d.Fix)
		}
		if !strings.HasSuffix(d.Defect, ".") || strings.ContainsAny(d.Defect, "|\n") {
			t.Errorf("defect %d: %q is no sentence in one line without |", n, d.Defect)
		}
		for _, s := range sentence.Split(d.Defect, -1) {
			if words := len(strings.Fields(s)); words > 25 {
				t.Errorf("defect %d: a sentence has %d words, at most 25 are allowed: %s", n, words, s)
			}
		}
		if d.Test == "" && d.Seed == 0 {
			t.Errorf("defect %d has neither test nor seed", n)
		}
		if hasTest := d.Test != ""; hasTest != (d.Package != "") || hasTest != (len(d.Files) > 0) || hasTest && !test.MatchString(d.Test) {
			t.Errorf("defect %d: the test %q needs the form TestName/row, a package and files: %q, %q", n, d.Test, d.Package, d.Files)
		}
		if d.Shown && d.Uncompiled {
			t.Errorf("defect %d is shown, and its test does not compile", n)
		}
		if before := numbers[d.Defect]; before != 0 {
			t.Errorf("defects %d and %d are equal: %s", before, n, d.Defect)
		}
		numbers[d.Defect] = n
	}
}

// TestDocsDefects compares docs/defects.md with defects.yaml, or writes it when UPDATE is set (make generate).
func TestDocsDefects(t *testing.T) {
	const name = "../../docs/defects.md"
	want := page(testDefects(t))
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Error("docs/defects.md is stale, run make generate")
	}
}

func TestCommands(t *testing.T) {
	d := defect{
		Fix: "0123456789ab", Package: "provisioner", Test: "TestOutcome/late_record_", Files: []string{"provisioner/outcome_test.go"},
		Seed: 17,
	}
	want := []string{
		"git switch --detach 0123456789ab~1",
		"git checkout 0123456789ab -- provisioner/outcome_test.go",
		"go test -count=1 -vet=off ./provisioner -run '^TestOutcome$/late_record_'",
		"go test -count=1 -vet=off ./test/simulation -run '^TestSeeds$' -args -from 17 -seeds 1",
	}
	if got := d.commands(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, args := range [][]string{nil, {"0"}, {"-1"}, {"1000000"}, {"x"}, {"1", "2"}} {
		if err := run(args, true); err == nil {
			t.Errorf("run(%q) has no error", args)
		}
	}
}

// TestShow shows defects in a repository with three commits: a defect, its fix with a test, and a change that fixes nothing.
func TestShow(t *testing.T) {
	dir := t.TempDir()
	command := func(name string, args ...string) string {
		t.Helper()
		c := exec.Command(name, args...)
		c.Dir = dir
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	commit := func(files map[string]string) string {
		t.Helper()
		for name, text := range files {
			name = filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		command("git", "add", ".")
		command("git", "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "--message", "x")
		return command("git", "rev-parse", "--short=12", "HEAD")
	}
	command("git", "init", "--quiet")
	const test = "package p\n\nimport \"testing\"\n\nfunc TestTwo(t *testing.T) {\n\tif two() != 2 {\n\t\tt.Error(two())\n\t}\n}\n"
	commit(map[string]string{"go.mod": "module example.com/m\n\ngo 1.26\n", "p/p.go": "package p\n\nfunc two() int { return 3 }\n"})
	fix := commit(map[string]string{"p/p.go": "package p\n\nfunc two() int { return 2 }\n", "p/p_test.go": test})
	other := commit(map[string]string{"p/p_test.go": test + "\n// a comment\n"})
	broken := commit(map[string]string{"p/p_test.go": strings.ReplaceAll(test, "two()", "three()")})
	const crash = "package p\n\nimport \"testing\"\n\nfunc TestTwo(t *testing.T) {\n\tgo panic(two())\n\tselect {}\n}\n"
	panics := commit(map[string]string{"p/p_test.go": crash})

	for name, tt := range map[string]struct {
		fix  string
		show bool
	}{
		"the defect":                {fix, true},
		"the test passes":           {other, false},
		"the test does not compile": {broken, false},
		"the process panics":        {panics, true},
		"the commit does not exist": {"0123456789ab", false},
	} {
		t.Run(name, func(t *testing.T) {
			d := defect{Fix: tt.fix, Package: "p", Test: "TestTwo", Files: []string{"p/p_test.go"}}
			if err := d.show(dir, io.Discard); (err == nil) != tt.show {
				t.Errorf("got %v, want that it shows: %t", err, tt.show)
			}
			if worktrees := command("git", "worktree", "list"); strings.Contains(worktrees, "\n") {
				t.Errorf("worktrees are left: %s", worktrees)
			}
		})
	}
}
