// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// file is a parsed Go file of the module.
type file struct {
	path   string // in the repository
	text   string
	syntax *ast.File
	set    *token.FileSet
}

// dir returns the package directory of f.
func (f file) dir() string { return filepath.ToSlash(filepath.Dir(f.path)) }

// product reports whether f is part of the program, not of its tests.
func (f file) product() bool {
	return !strings.HasSuffix(f.path, "_test.go") && !strings.HasPrefix(f.path, "test/")
}

func (f file) line(pos token.Pos) int { return f.set.Position(pos).Line }

// header is the licence header that starts each Go file.
const header = "// Copyright The storage-controller Authors\n// SPDX-License-Identifier: Apache-2.0\n\n"

func TestGoFilesHaveTheLicenceHeader(t *testing.T) {
	for _, f := range goFiles(t) {
		if !strings.HasPrefix(f.text, header) {
			t.Errorf("%s: does not start with the licence header: %q", f.path, header)
		}
	}
}

// tracked returns the paths of the files of the repository that match patterns of git.
func tracked(t *testing.T, patterns ...string) []string {
	t.Helper()
	args := append([]string{"-C", "../..", "ls-files", "--cached", "--others", "--exclude-standard", "--"}, patterns...)
	out, err := exec.Command("git", args...).Output()
	if err != nil {
		t.Fatalf("git ls-files: %v. The tests of the repository need a git clone", err)
	}
	var paths []string
	for path := range strings.FieldsSeq(string(out)) {
		if _, err := os.Stat(filepath.Join("../..", path)); err == nil { // else deleted but not committed
			paths = append(paths, path)
		}
	}
	return paths
}

// goFiles returns the parsed Go files of the repository.
func goFiles(t *testing.T) []file {
	t.Helper()
	var files []file
	for _, path := range tracked(t, "*.go") {
		text, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		syntax, err := parser.ParseFile(set, path, text, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{path: path, text: string(text), syntax: syntax, set: set})
	}
	return files
}

// TestConditionsHaveNoEffect: the statement before the semicolon of an if or switch only defines variables, or sets err.
func TestConditionsHaveNoEffect(t *testing.T) {
	for _, f := range goFiles(t) {
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			var before ast.Stmt
			switch n := n.(type) {
			case *ast.IfStmt:
				before = n.Init
			case *ast.SwitchStmt:
				before = n.Init
			}
			if before != nil && f.product() && !setsError(before) {
				t.Errorf("%s:%d: an effect in a condition: write it on a line of its own", f.path, f.line(before.Pos()))
			}
			return true
		})
	}
}

// setsError reports whether s defines variables, or sets err.
func setsError(s ast.Stmt) bool {
	assign, ok := s.(*ast.AssignStmt)
	isError := func(e ast.Expr) bool { id, ok := e.(*ast.Ident); return ok && id.Name == "err" }
	return ok && (assign.Tok == token.DEFINE || slices.ContainsFunc(assign.Lhs, isError))
}

// maxColumns is the width of Go lines, with tabs of 4.
const maxColumns = 140

func TestColumns(t *testing.T) {
	for _, f := range goFiles(t) {
		if ast.IsGenerated(f.syntax) {
			continue
		}
		raw := rawLines(f)
		for i, line := range strings.Split(f.text, "\n") {
			columns := utf8.RuneCountInString(line) + 3*strings.Count(line, "\t")
			if columns > maxColumns && !strings.Contains(line, "`") && !raw[i+1] { // a raw string literal cannot be broken
				t.Errorf("%s:%d: %d columns, at most %d", f.path, i+1, columns, maxColumns)
			}
		}
	}
}

// rawLines returns the numbers of the lines that belong to raw string literals of several lines.
func rawLines(f file) map[int]bool {
	raw := map[int]bool{}
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok {
			for line := f.line(literal.Pos()); line < f.line(literal.End()); line++ {
				raw[line+1] = true
			}
		}
		return true
	})
	return raw
}
