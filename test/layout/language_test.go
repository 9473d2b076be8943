// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// banned matches words that a storage engineer would have to translate. CONTRIBUTING.md names the replacement of each.
var banned = regexp.MustCompile(
	`(?i)\b(afresh|anew|for ever|into being|let go|mend(s|ed|ing)?|nobody|odd|somebody|the like|whoever|what is|is gone` +
		`|takes that|goes on|all the same|by itself|just now|tells of)\b`)

// TestWords looks for banned words in comments, string literals and pages.
func TestWords(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.path == "test/layout/language_test.go" {
			continue
		}
		for _, group := range f.syntax.Comments {
			reportBanned(t, f.path, f.line(group.Pos()), group.Text())
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
				reportBanned(t, f.path, f.line(literal.Pos()), literal.Value)
			}
			return true
		})
	}
	for _, path := range tracked(t, "*.md") {
		if path == "CONTRIBUTING.md" { // it lists the words
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil {
			t.Fatal(err)
		}
		line := 1
		for paragraph := range strings.SplitSeq(string(text), "\n\n") {
			reportBanned(t, path, line, paragraph)
			line += strings.Count(paragraph, "\n") + 2
		}
	}
}

// reportBanned joins the lines of text, because a banned expression may be wrapped.
func reportBanned(t *testing.T, path string, line int, text string) {
	t.Helper()
	for _, word := range banned.FindAllString(strings.Join(strings.Fields(text), " "), -1) {
		t.Errorf("%s:%d: banned words %q: CONTRIBUTING.md, section Testing, has what to write instead", path, line, word)
	}
}

// maxDefinitions is the largest share of function comments that may begin with "Name is": a
// comment says what a function does.
const maxDefinitions = 0.2

// TestFunctionComments counts, per package, the function comments that define instead of describe.
func TestFunctionComments(t *testing.T) {
	type count struct{ all, definitions int }
	packages := map[string]*count{}
	for _, f := range goFiles(t) {
		if !f.product() {
			continue
		}
		c := packages[f.dir()]
		if c == nil {
			c = &count{}
			packages[f.dir()] = c
		}
		for _, d := range f.syntax.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Doc == nil {
				continue
			}
			c.all++
			if words := strings.Fields(fn.Doc.Text()); len(words) > 1 && (words[1] == "is" || words[1] == "are") {
				c.definitions++
			}
		}
	}
	total := count{}
	for dir, c := range packages {
		total.all, total.definitions = total.all+c.all, total.definitions+c.definitions
		if c.all >= 10 && float64(c.definitions) > maxDefinitions*float64(c.all) {
			t.Errorf("%s: %d of %d function comments begin with \"Name is\" or \"Name are\", at most %.0f %% may", dir, c.definitions,
				c.all, 100*maxDefinitions)
		}
	}
	t.Logf("%d of %d function comments begin with \"Name is\" or \"Name are\"", total.definitions, total.all)
	if total.all < 500 {
		t.Errorf("%d function comments: the test reads too little", total.all)
	}
}
