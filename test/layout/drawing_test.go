// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	box   = regexp.MustCompile(`(\w+)\["([^"]+)"\]`)
	arrow = regexp.MustCompile(`(?m)^\s*(\w+)(?:\["[^"]+"\])? --> (\w+)`)
)

// drawing returns the boxes of the import drawing in docs/architecture.md with their packages, and
// the arrows between them.
func drawing(t *testing.T) (boxes map[string][]string, arrows map[[2]string]bool) {
	t.Helper()
	page, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "flowchart TD\n")
	text, _, _ = strings.Cut(text, "```")
	boxes, arrows = map[string][]string{}, map[[2]string]bool{}
	for _, m := range box.FindAllStringSubmatch(text, -1) {
		boxes[m[1]] = strings.Split(m[2], ", ")
	}
	for _, m := range arrow.FindAllStringSubmatch(text, -1) {
		arrows[[2]string{m[1], m[2]}] = true
	}
	return boxes, arrows
}

// TestDrawingShowsTheImports compares the drawing with the imports of the packages.
func TestDrawingShowsTheImports(t *testing.T) {
	boxes, arrows := drawing(t)
	boxOf := func(pkg string) string {
		for name, patterns := range boxes {
			if slices.ContainsFunc(patterns, func(p string) bool { ok, _ := path.Match(p, pkg); return ok }) {
				return name
			}
		}
		return ""
	}
	used := map[[2]string]bool{}
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		from := boxOf(name)
		if from == "" { // tests and their fixtures
			continue
		}
		for _, i := range p.Imports {
			imported, ours := strings.CutPrefix(i, module+"/")
			if !ours {
				continue
			}
			edge := [2]string{from, boxOf(imported)}
			if edge[0] == edge[1] {
				continue
			}
			used[edge] = true
			if !arrows[edge] {
				t.Errorf("%s imports %s: the drawing in docs/architecture.md has no arrow from %q to %q", name, imported, edge[0], edge[1])
			}
		}
	}
	for edge := range arrows {
		if !used[edge] {
			t.Errorf("the drawing in docs/architecture.md has an arrow from %q to %q, which no package uses", edge[0], edge[1])
		}
	}
}
