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

// deployed is a path in deploy/ or docs/runbooks, as texts name it.
var deployed = regexp.MustCompile(`\b(deploy/[a-z][a-z/-]*(\.(yaml|json|txt|svg))?|docs/runbooks/[A-Za-z]+\.md)`)

// TestNamedManifestsExist: what pages, messages and manifests say of deploy/ is there.
func TestNamedManifestsExist(t *testing.T) {
	out, err := exec.Command("git", "-C", "../..", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.go", "*.yaml",
		"*.notes", "*.txt").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for file := range strings.FieldsSeq(string(out)) {
		text, err := os.ReadFile(filepath.Join("../..", file))
		if os.IsNotExist(err) { // removed, and not yet committed
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range deployed.FindAllStringIndex(string(text), -1) {
			path, next := string(text[at[0]:at[1]]), strings.TrimPrefix(string(text[at[1]:]), "*")
			if begin := string(text[max(0, at[0]-5):at[0]]); strings.HasSuffix(begin, "test/") || next != string(text[at[1]:]) {
				continue // test/deploy is another, and a pattern is none
			}
			seen++
			if strings.HasSuffix(path, "-") || strings.HasSuffix(path, "/") && path != "deploy/" {
				continue // the begin of several
			}
			if _, err := os.Stat(filepath.Join("../..", path)); err != nil {
				t.Errorf("%s names %s, which does not exist", file, path)
			}
		}
	}
	if seen < 50 {
		t.Errorf("%d paths: the pattern finds too little", seen)
	}
}
