// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Limits of the shape of product code. Lines are limited in tests, too.
const (
	maxColumns        = 140
	maxFileLines      = 400
	maxFunctionLines  = 60
	maxParameters     = 6
	maxMethods        = 25
	maxMedianFunction = 12
)

// TestShape holds files, functions and types to the limits.
func TestShape(t *testing.T) {
	methods := map[string]int{} // by directory and type
	var lengths []int
	for _, f := range goFiles(t) {
		if ast.IsGenerated(f.syntax) {
			continue
		}
		raw := rawLines(f)
		for i, line := range strings.Split(f.text, "\n") {
			if strings.Contains(line, "`") || raw[i+1] {
				continue // a raw string literal cannot be broken
			}
			if columns := utf8.RuneCountInString(line) + 3*strings.Count(line, "\t"); columns > maxColumns {
				t.Errorf("%s:%d: %d columns, at most %d, with tabs of 4", f.path, i+1, columns, maxColumns)
			}
		}
		if !f.product() {
			continue
		}
		if lines := strings.Count(f.text, "\n"); lines > maxFileLines {
			t.Errorf("%s: %d lines, at most %d", f.path, lines, maxFileLines)
		}
		for _, d := range f.syntax.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			lines := f.line(fn.End()) - f.line(fn.Pos()) + 1
			lengths = append(lengths, lines)
			if lines > maxFunctionLines {
				t.Errorf("%s: function %s has %d lines, at most %d", f.path, fn.Name.Name, lines, maxFunctionLines)
			}
			if n := fn.Type.Params.NumFields(); n > maxParameters && !isInterceptor(fn) {
				t.Errorf("%s: function %s has %d parameters, at most %d", f.path, fn.Name.Name, n, maxParameters)
			}
			if name := receiver(fn); name != "" && !isServerMethod(fn) {
				methods[f.dir()+"."+name]++
			}
		}
	}
	for name, n := range methods {
		if n > maxMethods {
			t.Errorf("type %s has %d methods, at most %d", name, n, maxMethods)
		}
	}
	slices.Sort(lengths)
	median := lengths[len(lengths)/2]
	t.Logf("%d functions, median %d lines, longest %d", len(lengths), median, lengths[len(lengths)-1])
	if median > maxMedianFunction {
		t.Errorf("the median function has %d lines, at most %d", median, maxMedianFunction)
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

// receiver returns the name of the type that fn is a method of, and "" for a function.
func receiver(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return ""
	}
	expr := fn.Recv.List[0].Type
	for {
		switch e := expr.(type) {
		case *ast.StarExpr:
			expr = e.X
		case *ast.IndexExpr: // one type parameter
			expr = e.X
		case *ast.IndexListExpr: // several
			expr = e.X
		case *ast.Ident:
			return e.Name
		default:
			return ""
		}
	}
}

// isInterceptor reports whether fn is a client interceptor, whose parameters gRPC defines.
func isInterceptor(fn *ast.FuncDecl) bool {
	return slices.ContainsFunc(fn.Type.Params.List, func(p *ast.Field) bool {
		s, ok := p.Type.(*ast.SelectorExpr)
		return ok && s.Sel.Name == "UnaryInvoker"
	})
}

// isServerMethod reports whether fn implements an RPC of a generated gRPC server interface.
func isServerMethod(fn *ast.FuncDecl) bool {
	params := fn.Type.Params.List
	if len(params) != 2 {
		return false
	}
	pointer, ok := params[1].Type.(*ast.StarExpr)
	if !ok {
		return false
	}
	s, ok := pointer.X.(*ast.SelectorExpr)
	return ok && s.Sel.Name == fn.Name.Name+"Request"
}
