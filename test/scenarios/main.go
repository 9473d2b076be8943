// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command scenarios prints which acceptance scenarios of the contracts a test
// claims to cover, so that a gap is seen without reading the tests. Run it from the
// root of the repository; arguments choose contracts by name.
//
// A test claims scenarios by its name: "014_016_not_ours", as a subtest of the function
// of its contract or as a row of a table there, covers 14 and 16. A function that is
// called from there has a longer name: attacherScenarioDetach. That the test is any
// good is for its reader to judge. A scenario whose title begins with "removed:" is not part
// of its contract any more.
package main

import (
	"embed"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed *.txt
var lists embed.FS

// contract is a list of scenarios, and how the names of the functions begin, after
// "Test" or not, whose subtests cover it.
type contract struct{ name, function string }

// contracts in the order of the report. The list of a contract is its name with ".txt".
var contracts = []contract{
	{"provisioner", "provisionerscenario"},
	{"attacher", "attacherscenario"},
	{"capacity", "capacityscenario"},
	{"nodecontroller", "nodecontrollerscenario"},
	{"resizer", "resizerscenario"},
	{"snapshotter", "snapshotterscenario"},
}

// contractOf is the contract of a function by its name.
func contractOf(function string) (contract, bool) {
	name := strings.ToLower(strings.TrimPrefix(function, "Test"))
	i := slices.IndexFunc(contracts, func(c contract) bool { return strings.HasPrefix(name, c.function) })
	if i < 0 {
		return contract{}, false
	}
	return contracts[i], true
}

// coverage is the names of tests by name of the contract and number of the scenario.
type coverage map[string]map[int][]string

func main() {
	missing := flag.Bool("missing", false, "print only the scenarios without a test")
	flag.Parse()
	if err := run(*missing, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "scenarios:", err)
		os.Exit(1)
	}
}

func run(missing bool, names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(contracts, func(c contract) bool { return c.name == name }) {
			return fmt.Errorf("no contract is called %q", name)
		}
	}
	covered, err := readTests(os.DirFS("."))
	if err != nil {
		return err
	}
	for _, c := range contracts {
		if len(names) > 0 && !slices.Contains(names, c.name) {
			continue
		}
		titles, err := c.titles()
		if err != nil {
			return err
		}
		fmt.Print(report(c.name, titles, covered[c.name], missing))
	}
	return nil
}

// titles of the scenarios of c; that of scenario n is at n-1.
func (c contract) titles() ([]string, error) {
	text, err := lists.ReadFile(c.name + ".txt")
	if err != nil {
		return nil, err
	}
	titles, err := parseTitles(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s.txt: %w", c.name, err)
	}
	return titles, nil
}

// parseTitles reads lines "NNN title", numbered from 001 without gaps, so that a number
// that was lost or given twice is an error. Lines that begin with # are comments.
func parseTitles(text string) ([]string, error) {
	var titles []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		title, ok := strings.CutPrefix(line, fmt.Sprintf("%03d ", len(titles)+1))
		if title = strings.TrimSpace(title); !ok || title == "" {
			return nil, fmt.Errorf("want scenario %03d and its title, got %q", len(titles)+1, line)
		}
		titles = append(titles, title)
	}
	return titles, nil
}

// report says how many scenarios are tested, and about each whether it is. With
// missing it leaves out those that are.
func report(name string, titles []string, tests map[int][]string, missing bool) string {
	var lines strings.Builder
	all, tested := len(titles), 0
	for i, title := range titles {
		by := tests[i+1]
		switch {
		case isRemoved(title):
			if all--; !missing {
				fmt.Fprintf(&lines, "  %03d %s\n", i+1, title)
			}
			continue
		case len(by) == 0:
			fmt.Fprintf(&lines, "  %03d MISSING %s\n", i+1, title)
			continue
		case !missing:
			fmt.Fprintf(&lines, "  %03d tested  %s (%s)\n", i+1, title, strings.Join(by, ", "))
		}
		tested++
	}
	return fmt.Sprintf("%s: %d scenarios, %d tested\n%s", name, all, tested, &lines)
}

// isRemoved reports whether a scenario is not part of its contract any more. The rest of its title is the reason.
func isRemoved(title string) bool { return strings.HasPrefix(title, "removed: ") }

// readTests looks for tests in all of a repository but what go test skips as well.
func readTests(repository fs.FS) (coverage, error) {
	all := coverage{}
	return all, fs.WalkDir(repository, ".", func(file string, entry fs.DirEntry, err error) error {
		name := path.Base(file)
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name != "." && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" ||
			name == "vendor"):
			return fs.SkipDir
		case entry.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		source, err := fs.ReadFile(repository, file)
		if err != nil {
			return err
		}
		return all.add(file, source)
	})
}

// add notes the tests in the functions of contracts that a source file has. It only
// parses, so tests that are not built here (build tags, another module) count too.
func (c coverage) add(filename string, source []byte) error {
	file, err := parser.ParseFile(token.NewFileSet(), filename, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Recv != nil || f.Body == nil {
			continue
		}
		of, ok := contractOf(f.Name.Name)
		if !ok {
			continue
		}
		for _, name := range testNames(f.Body) {
			for _, n := range numbers(name) {
				c.note(of.name, n, name)
			}
		}
	}
	return nil
}

func (c coverage) note(contract string, number int, name string) {
	if c[contract] == nil {
		c[contract] = map[int][]string{}
	}
	if !slices.Contains(c[contract][number], name) {
		c[contract][number] = append(c[contract][number], name)
	}
}

// rowName is what the name of a test in a table looks like. It is stricter than numbers,
// because tables hold other strings too.
var rowName = regexp.MustCompile(`^[0-9]{3}(_[0-9]{3})*(_[a-z0-9_]*)?$`)

// testNames is the literals in body that name a test: the first argument of X.Run, and
// keys of maps and fields of structs that look like a name.
func testNames(body ast.Node) []string {
	var names []string
	row := func(e ast.Expr) {
		if s, ok := literal(e); ok && rowName.MatchString(s) {
			names = append(names, s)
		}
	}
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Run" && len(n.Args) > 0 {
				if s, ok := literal(n.Args[0]); ok {
					names = append(names, s)
				}
			}
		case *ast.CompositeLit:
			_, list := n.Type.(*ast.ArrayType)
			for _, element := range n.Elts {
				switch kv, ok := element.(*ast.KeyValueExpr); {
				case !ok && !list: // a field without its name
					row(element)
				case ok && isIdent(kv.Key): // a field with its name
					row(kv.Value)
				case ok:
					row(kv.Key)
				}
			}
		}
		return true
	})
	return names
}

func isIdent(e ast.Expr) bool {
	_, ok := e.(*ast.Ident)
	return ok
}

// literal is the value of e if that is a string literal.
func literal(e ast.Expr) (string, bool) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}

// number is a group of a test's name that stands for a scenario: exactly three digits.
var number = regexp.MustCompile(`^[0-9]{3}$`)

// numbers of the scenarios that a test claims, which begin its name: 1 and 20 for
// "001_020_attach_300".
func numbers(name string) []int {
	var all []int
	for group := range strings.SplitSeq(name, "_") {
		if !number.MatchString(group) {
			break
		}
		n, _ := strconv.Atoi(group) // three digits always are a number
		all = append(all, n)
	}
	return all
}
