// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"cmp"
	"fmt"
	"go/ast"
	"maps"
	"slices"
	"strings"
	"testing"
)

// TestShape prints the sizes of product code with -v. They are advice: a limit would become the design.
func TestShape(t *testing.T) {
	files, functions, parameters := map[string]int{}, map[string]int{}, map[string]int{}
	methods, first := map[string]int{}, map[string]int{} // by directory and type
	embedded := map[string][]string{}
	for _, f := range goFiles(t) {
		if ast.IsGenerated(f.syntax) || !f.product() {
			continue
		}
		files[f.path] = strings.Count(f.text, "\n")
		for _, d := range f.syntax.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				name := f.dir() + " " + d.Name.Name
				functions[name] = f.line(d.End()) - f.line(d.Pos()) + 1
				parameters[name] = d.Type.Params.NumFields()
				if d.Recv != nil {
					methods[f.dir()+"."+typeName(d.Recv.List[0].Type)]++
				} else if len(d.Type.Params.List) > 0 {
					first[f.dir()+"."+typeName(d.Type.Params.List[0].Type)]++
				}
			case *ast.GenDecl:
				for name, types := range embeddedIn(d) {
					for _, e := range types {
						embedded[f.dir()+"."+name] = append(embedded[f.dir()+"."+name], f.dir()+"."+e)
					}
				}
			}
		}
	}
	promoted := map[string]int{}
	for name := range embedded {
		promoted[name] = promotedBy(name, embedded, methods)
	}
	maps.DeleteFunc(first, func(name string, _ int) bool { return methods[name] == 0 })
	t.Logf("%d lines in %d files, %d functions, median %d lines", sum(files), len(files), len(functions), median(functions))
	t.Log("lines of files: ", largest(files))
	t.Log("lines of functions: ", largest(functions))
	t.Log("parameters: ", largest(parameters))
	t.Log("methods: ", largest(methods))
	t.Log("promoted methods, of types of the same package: ", largest(promoted))
	t.Log("functions whose first parameter is a type with methods: ", largest(first))
}

// typeName returns the name of a type without its pointer and type parameters.
func typeName(expr ast.Expr) string {
	switch e := expr.(type) {
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.IndexExpr:
		return typeName(e.X)
	case *ast.IndexListExpr:
		return typeName(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// embeddedIn returns the embedded types of each struct of a declaration.
func embeddedIn(d *ast.GenDecl) map[string][]string {
	found := map[string][]string{}
	for _, spec := range d.Specs {
		named, ok := spec.(*ast.TypeSpec)
		if !ok {
			continue
		}
		if s, ok := named.Type.(*ast.StructType); ok {
			for _, field := range s.Fields.List {
				if len(field.Names) == 0 {
					found[named.Name.Name] = append(found[named.Name.Name], typeName(field.Type))
				}
			}
		}
	}
	return found
}

func promotedBy(name string, embedded map[string][]string, methods map[string]int) (n int) {
	for _, e := range embedded[name] {
		n += methods[e] + promotedBy(e, embedded, methods)
	}
	return n
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

func median(counts map[string]int) int { return slices.Sorted(maps.Values(counts))[len(counts)/2] }

// largest returns the largest counts with their names.
func largest(counts map[string]int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return cmp.Or(counts[b]-counts[a], strings.Compare(a, b)) })
	var b strings.Builder
	for _, name := range names[:min(8, len(names))] {
		fmt.Fprintf(&b, "%s %d, ", name, counts[name])
	}
	return strings.TrimSuffix(b.String(), ", ")
}
