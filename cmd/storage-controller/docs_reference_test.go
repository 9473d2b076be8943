// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/app"
)

const referencePage = "../../docs/reference.md"

// readNames are the packages whose constants and literals are what the page is about.
var readNames = []string{
	"provisioner", "attacher", "capacity", "nodecontroller", "nodecontroller/nodecleanup", "nodecontroller/pvcfinalizer",
	"nodecontroller/resizenudge", "nodecontroller/webhook", "resizer", "snapshotter", "internal/claimloop",
	"internal/kube",
	"internal/volumerules", "election",
	"cmd/storage-controller", "internal/app", "internal/settings", "topolvm",
}

// driverNames are the functions that make names out of that of the driver.
var driverNames = []string{"CleanupAnnotation", "derived", "NodeFinalizer", "Finalizer", "finalizer",
	"pendingDeletion", "resizeRequested"}

// otherNames have the form of annotation names but are something else, by their meaning.
var otherNames = map[string]string{
	"storage-controller/": "user agent", "claims/": "key of a map", "records/": "key of a map",
	"forbidden/": "key of a map", "namespace/": "key of a map", "node/": "key of a map", "sweep/": "key of a map",
}

// apiNames are the constants of the Kubernetes API that our code goes by.
var apiNames = map[string]string{
	"LastAppliedConfigAnnotation": corev1.LastAppliedConfigAnnotation,
	"TaintNodeOutOfService":       corev1.TaintNodeOutOfService,
	"LabelHostname":               corev1.LabelHostname,
	"LabelTopologyZone":           corev1.LabelTopologyZone,
	"LabelTopologyRegion":         corev1.LabelTopologyRegion,
	"BetaStorageClassAnnotation":  corev1.BetaStorageClassAnnotation,
}

// helperNames are the constants of k8s.io/component-helpers that our code goes by.
var helperNames = map[string]string{
	"AnnStorageProvisioner":         storagehelpers.AnnStorageProvisioner,
	"AnnBetaStorageProvisioner":     storagehelpers.AnnBetaStorageProvisioner,
	"AnnSelectedNode":               storagehelpers.AnnSelectedNode,
	"AnnDynamicallyProvisioned":     storagehelpers.AnnDynamicallyProvisioned,
	"AnnMigratedTo":                 storagehelpers.AnnMigratedTo,
	"PVDeletionProtectionFinalizer": storagehelpers.PVDeletionProtectionFinalizer,
}

// noEvents are constants that begin like those of the reasons of events.
var noEvents = map[string]string{"reasonWaiting": "reason of a step, in the log", "reasonLast": "never sent"}

// TestDocsReference: the page names every reason of an event, annotation, label,
// finalizer, Lease and environment variable of the code, and nothing else.
func TestDocsReference(t *testing.T) {
	code := namesInCode(t)
	code.events["LeaderElection"] = "Normal, Lease: a replica became leader or stopped leading" // of client-go
	code.writeTables(t)
	delete(code.variables, "KUBERNETES_SERVICE_HOST") // of every pod; users do not set it
	page := tablesOf(t, referencePage)
	same := func(what string, want map[string]bool, have []string) {
		t.Helper()
		if len(want) == 0 {
			t.Errorf("no %s was found in the code", what)
		}
		for name := range want {
			if !slices.Contains(have, name) {
				t.Errorf("%s does not have the %s %q", referencePage, what, name)
			}
		}
		for _, name := range have {
			if !want[name] {
				t.Errorf("%s has the %s %q, which is not in the code", referencePage, what, name)
			}
		}
	}
	same("event", code.reasons(), page["Events"])
	same("environment variable", code.variables, page["Environment variables"])
	same("name", code.names, slices.Concat(page["Annotations"], page["Labels"], page["Finalizers"],
		page["Parameters and attributes"], page["Resources of pods"]))
	leases := map[string]bool{}
	for _, lease := range app.Leases("csi.example.com") {
		leases[lease] = true
	}
	same("Lease", leases, page["Leases"])
}

// namesFound holds the names in the code. Of a name with the name of the driver in it, it holds only the fixed parts.
type namesFound struct {
	names, variables map[string]bool
	events           map[string]string            // by reason: "TYPE, KIND: when", the comment of its constant
	constants        map[string]map[string]string // comments by "annotations", "labels" or "finalizers", and name
}

func (f namesFound) reasons() map[string]bool {
	reasons := map[string]bool{}
	for reason := range f.events {
		reasons[reason] = true
	}
	return reasons
}

// kindOf returns which kind of name a constant holds, or "".
func kindOf(constant string) string {
	switch lower := strings.ToLower(constant); {
	case strings.HasPrefix(lower, "ann"), constant == "lastApplied":
		return "annotations"
	case strings.HasPrefix(lower, "label"):
		return "labels"
	case strings.HasSuffix(lower, "finalizer"), strings.HasSuffix(lower, "protection"):
		return "finalizers"
	}
	return ""
}

// constant adds a constant to the tables of the page: its comment, without its name.
func (f namesFound) constant(name, value string, comment *ast.CommentGroup) {
	doc := strings.Join(strings.Fields(comment.Text()), " ")
	if strings.HasPrefix(name, "reason") && noEvents[name] == "" && value != "" && f.events[value] == "" {
		f.events[value] = doc
	}
	kind := kindOf(name)
	if kind == "" || !qualified.MatchString(value) || otherNames[value] != "" || doc == "" || f.constants[kind][value] != "" {
		return // the name of another package that has it, too, or a row that is written by hand
	}
	doc = strings.TrimPrefix(strings.TrimPrefix(doc, name+" "), "is ")
	f.constants[kind][value] = strings.TrimSuffix(doc, ".")
}

// writeTables compares the generated tables of the page with the comments of the constants, or writes them when UPDATE is set.
func (f namesFound) writeTables(t *testing.T) {
	t.Helper()
	rows := map[string]string{"events": "| reason | type, object | sent when |\n|---|---|---|\n"}
	for _, reason := range slices.Sorted(maps.Keys(f.events)) {
		about, when, ok := strings.Cut(f.events[reason], ": ")
		if !ok || !strings.HasPrefix(about, "Normal, ") && !strings.HasPrefix(about, "Warning, ") {
			t.Errorf("the comment of the reason %s is %q, want the form \"Warning, PVC: an attempt failed\"", reason, f.events[reason])
		}
		rows["events"] += "| `" + reason + "` | " + about + " | " + when + " |\n"
	}
	for kind, comments := range f.constants {
		rows[kind] = "| name | meaning |\n|---|---|\n"
		for _, name := range slices.Sorted(maps.Keys(comments)) {
			rows[kind] += "| `" + name + "` | " + comments[name] + " |\n"
		}
	}
	data, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	want := string(data)
	for part, table := range rows {
		table = "<!-- " + part + ": begin -->\n" + table + "<!-- " + part + ": end -->"
		old := regexp.MustCompile("(?s)<!-- " + part + ": begin -->.*?<!-- " + part + ": end -->")
		if !old.MatchString(want) {
			t.Errorf("%s has no place for the table of %s", referencePage, part)
		}
		want = old.ReplaceAllLiteralString(want, table)
	}
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(referencePage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(data) != want {
		t.Errorf("the tables of %s are stale, run make generate", referencePage)
	}
}

var (
	qualified  = regexp.MustCompile(`^[a-z0-9-]+(\.[a-z0-9-]+)+/[A-Za-z0-9][-A-Za-z0-9_.]*$`)
	prefixed   = regexp.MustCompile(`^[a-z0-9.-]+/$`)
	formatted  = regexp.MustCompile(`%s(/[a-z]+)`)
	apiVersion = regexp.MustCompile(`/v[0-9]+((alpha|beta)[0-9]+)?$`) // of an API group
)

func namesInCode(t *testing.T) namesFound {
	t.Helper()
	found := namesFound{map[string]bool{}, map[string]bool{}, map[string]string{},
		map[string]map[string]string{"annotations": {}, "labels": {}, "finalizers": {}}}
	makers := map[string]bool{}
	for _, dir := range readNames {
		files, err := filepath.Glob("../../" + dir + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", dir, len(files), err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			set := gotoken.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			for _, decl := range file.Decls {
				if d, ok := decl.(*ast.GenDecl); ok && d.Tok == gotoken.IMPORT {
					continue
				} else if ok && !d.Lparen.IsValid() { // a single constant, whose comment is that of the declaration
					if v, ok := d.Specs[0].(*ast.ValueSpec); ok {
						v.Doc = d.Doc
					}
				}
				if f, ok := decl.(*ast.FuncDecl); ok && slices.Contains(driverNames, f.Name.Name) {
					makers[f.Name.Name] = true
					found.made(f)
				}
				ast.Inspect(decl, func(n ast.Node) bool {
					if bad := found.node(n); bad != "" {
						t.Errorf("%s: %s", set.Position(n.Pos()), bad)
					}
					return true
				})
			}
		}
	}
	found.elsewhere(t)
	for _, name := range driverNames {
		if !makers[name] {
			t.Errorf("there is no function %s any more", name)
		}
	}
	return found
}

// ownPrefix is the prefix of names that this program defines.
const ownPrefix = "storage-controller.io/"

// elsewhere reads all other packages of the program. It adds names with our own prefix; events and environment
// variables are errors there.
func (f namesFound) elsewhere(t *testing.T) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		dir := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../../")
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
			slices.Contains(readNames, dir) || dir == "test" || strings.HasPrefix(dir, "test/") || strings.HasSuffix(dir, "test") {
			return err
		}
		seen++
		set := gotoken.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.BasicLit:
				if name := text(n); strings.HasPrefix(name, ownPrefix) && qualified.MatchString(name) {
					f.names[name] = true
				}
			case *ast.CallExpr:
				switch called(n) {
				case "Event", "Eventf", "AnnotatedEventf", "Getenv", "LookupEnv":
					if called(n) == "Getenv" && dir == "internal/tracing" { // those of OpenTelemetry, which are not ours
						break
					}
					t.Errorf("%s: %s is called in a package that is not in readNames of this test", set.Position(n.Pos()), called(n))
				}
			}
			return true
		})
		return nil
	})
	if err != nil || seen < 20 {
		t.Errorf("%d files in other packages: %v", seen, err)
	}
}

// called is the last part of the name of what n calls.
func called(n *ast.CallExpr) string {
	switch fun := n.Fun.(type) {
	case *ast.Ident:
		return fun.Name
	case *ast.SelectorExpr:
		return fun.Sel.Name
	}
	return ""
}

// isReason tells whether e can only be one of the constants that are on the page.
func isReason(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return strings.HasPrefix(e.Name, "reason")
	case *ast.SelectorExpr:
		return e.Sel.Name == "reason" || e.Sel.Name == "event" // fields of event and nodeStep
	}
	return false
}

// node adds the names in n, and returns the error in it.
func (f namesFound) node(n ast.Node) string {
	switch n := n.(type) {
	case *ast.BasicLit:
		if name := text(n); otherNames[name] == "" && !apiVersion.MatchString(name) &&
			(qualified.MatchString(name) || prefixed.MatchString(name)) {
			f.names[name] = true
		}
	case *ast.SelectorExpr:
		x, ok := n.X.(*ast.Ident)
		if ok && x.Name == "storagehelpers" {
			if helperNames[n.Sel.Name] == "" && isHelperName.MatchString(n.Sel.Name) {
				return "storagehelpers." + n.Sel.Name + " is not in helperNames of this test"
			}
			if name := helperNames[n.Sel.Name]; name != "" {
				f.names[name] = true
			}
		}
		if ok && x.Name == "corev1" && isNameOfAPI(n.Sel.Name) {
			name, known := apiNames[n.Sel.Name]
			if !known {
				return "corev1." + n.Sel.Name + " is not in apiNames of this test"
			}
			f.names[name] = true
		}
	case *ast.ValueSpec:
		for i, name := range n.Names {
			if i < len(n.Values) {
				f.constant(name.Name, text(n.Values[i]), n.Doc)
			}
		}
	case *ast.CompositeLit:
		if of, ok := n.Type.(*ast.Ident); ok && of.Name == "event" && len(n.Elts) > 1 && !isReason(n.Elts[1]) {
			return noReason
		}
	case *ast.KeyValueExpr:
		if key, ok := n.Key.(*ast.Ident); ok && key.Name == "event" && !isReason(n.Value) {
			return noReason
		}
	case *ast.CallExpr:
		return f.call(n)
	}
	return ""
}

const noReason = "the reason of an event is no constant with a name that begins with reason"

func (f namesFound) call(n *ast.CallExpr) string {
	name := called(n)
	reason := map[string]int{"Event": 2, "Eventf": 2, "AnnotatedEventf": 3, "warning": 0, "normal": 0}
	if i, sends := reason[name]; sends && i < len(n.Args) && !isReason(n.Args[i]) {
		return noReason
	}
	if name == "Getenv" && len(n.Args) == 1 && text(n.Args[0]) != "" {
		f.variables[text(n.Args[0])] = true
	}
	return ""
}

var isHelperName = regexp.MustCompile(`^Ann[A-Z]|Finalizer$`)

func isNameOfAPI(name string) bool {
	return strings.HasPrefix(name, "Label") || strings.HasPrefix(name, "Annotation") || strings.HasSuffix(name, "Annotation") ||
		strings.HasPrefix(name, "TaintNode")
}

// made notes the names that a function makes by putting the name of the driver between texts.
func (f namesFound) made(maker *ast.FuncDecl) {
	ast.Inspect(maker, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BinaryExpr:
			fixed := fixedParts(n)
			if !strings.Contains(fixed, "/") { // what it is added to ends with one
				fixed = "/" + fixed
			}
			if fixed != "/" {
				f.names[fixed] = true
			}
			return false
		case *ast.BasicLit:
			for _, part := range formatted.FindAllStringSubmatch(text(n), -1) {
				f.names[part[1]] = true
			}
		}
		return true
	})
}

func fixedParts(e ast.Expr) string {
	if sum, ok := e.(*ast.BinaryExpr); ok {
		return fixedParts(sum.X) + fixedParts(sum.Y)
	}
	return text(e)
}

// text is the value of a literal string, else "".
func text(e ast.Expr) string {
	if literal, ok := e.(*ast.BasicLit); ok && literal.Kind == gotoken.STRING {
		if s, err := strconv.Unquote(literal.Value); err == nil {
			return s
		}
	}
	return ""
}

var (
	inCode      = regexp.MustCompile("`([^`]+)`")
	placeholder = regexp.MustCompile(`<[a-z ]+>`)
)

// tablesOf is the names in the first column of the tables of a page, by their headings.
// A name stands there without its parts in angle brackets.
func tablesOf(t *testing.T, path string) map[string][]string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tables, heading := map[string][]string{}, ""
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if title, ok := strings.CutPrefix(line, "## "); ok {
			heading = title
		}
		cell, ok := strings.CutPrefix(line, "|")
		if !ok {
			continue
		}
		cell, _, _ = strings.Cut(cell, "|")
		for _, name := range inCode.FindAllStringSubmatch(cell, -1) {
			tables[heading] = append(tables[heading], placeholder.ReplaceAllString(name[1], ""))
		}
	}
	if len(slices.Collect(maps.Keys(tables))) == 0 {
		t.Errorf("%s has no tables", path)
	}
	return tables
}
