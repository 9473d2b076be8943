// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPinned holds that the builds run the code that a review saw: a tag can be moved, a digest or commit cannot.
func TestPinned(t *testing.T) {
	workflows, err := filepath.Glob("../../.github/workflows/*")
	if err != nil || len(workflows) == 0 {
		t.Fatalf("%v: no workflows", err)
	}
	uses, pinned := regexp.MustCompile(`(?m)^.*\buses:.*$`), regexp.MustCompile(`uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	for _, path := range workflows {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range uses.FindAllString(string(text), -1) {
			if !pinned.MatchString(line) {
				t.Errorf("%s: %s: name the commit, and the version as a comment", path, strings.TrimSpace(line))
			}
		}
	}
	stages, digest := map[string]bool{"scratch": true}, regexp.MustCompile(`@sha256:[0-9a-f]{64}$`)
	for _, i := range dockerfile(t) {
		if i.name != "FROM" {
			continue
		}
		from, stage, _ := strings.Cut(i.rest, " AS ")
		if !stages[from] && !digest.MatchString(from) {
			t.Errorf("Dockerfile: FROM %s: name the digest", i.rest)
		}
		stages[stage] = true
	}
	if text, err := os.ReadFile("../../Dockerfile"); err != nil || strings.HasPrefix(string(text), "# syntax=") {
		t.Errorf("%v, or the Dockerfile names a frontend, which BuildKit loads. Its own one is enough", err)
	}
}

// TestVulncheck runs the target with a program in the place of Go, which prints what govulncheck does.
func TestVulncheck(t *testing.T) {
	const unreachable = "govulncheck: fetching vulnerabilities: Get https://vuln.go.dev: dial tcp: lookup vuln.go.dev: no such host"
	for _, tt := range []struct {
		name, output, code, required string
		passes                       bool
	}{
		{"without findings", "No vulnerabilities found.", "0", "1", true},
		{"with findings", "Vulnerability #1: GO-2026-6061", "3", "", false},
		{"without the database", unreachable, "1", "", true},
		{"without the database in a release", unreachable, "1", "1", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			script := "#!/bin/sh\necho '" + tt.output + "'\nexit " + tt.code + "\n"
			if err := os.WriteFile(filepath.Join(dir, "go"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("make", "-C", "../..", "vulncheck", "REQUIRED="+tt.required)
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
			if out, err := cmd.CombinedOutput(); (err == nil) != tt.passes || !strings.Contains(string(out), tt.output) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	for _, path := range []string{"ci", "release"} {
		text, err := os.ReadFile("../../.github/workflows/" + path + ".yaml")
		if err != nil || !strings.Contains(string(text), "make vulncheck REQUIRED=1\n") {
			t.Errorf("%v, or %s passes without the database", err, path)
		}
	}
}
