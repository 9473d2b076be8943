// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// place is a function, or a method as type.method, of a package, whose path is relative to the root of the repository.
type place struct{ pkg, name string }

func in(pkg, name string) place { return place{pkg, name} }

// source is a function in its file.
type source struct {
	file string // relative to the root of the repository
	text []byte
	fset *token.FileSet
	fn   *ast.FuncDecl
}

// find reads the function.
func (p place) find(root string) (source, error) {
	files, err := filepath.Glob(filepath.Join(root, p.pkg, "*.go"))
	if err != nil {
		return source{}, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return source{}, err
		}
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, file, text, 0)
		if err != nil {
			return source{}, err
		}
		for _, d := range syntax.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && nameOf(fn) == p.name {
				return source{filepath.Join(p.pkg, filepath.Base(file)), text, fset, fn}, nil
			}
		}
	}
	return source{}, fmt.Errorf("%s has no function %s", p.pkg, p.name)
}

// nameOf returns the name of a function, for a method with its type.
func nameOf(fn *ast.FuncDecl) string {
	name := fn.Name.Name
	if fn.Recv == nil {
		return name
	}
	ast.Inspect(fn.Recv.List[0].Type, func(n ast.Node) bool {
		receiver, ok := n.(*ast.Ident)
		if ok && name == fn.Name.Name { // the first one: type parameters follow
			name = receiver.Name + "." + name
		}
		return true
	})
	return name
}

// target finds the parts of a function that a mutation may mean. There must be one.
type target struct {
	kind  string
	words []string // identifiers, and parts of literals, that it mentions, also !identifier
	in    func(fn ast.Node) []ast.Node
}

// replace returns the file with text instead of the target.
func (s source) replace(t target, text string) ([]byte, error) {
	offset := func(p token.Pos) int { return s.fset.Position(p).Offset }
	var found []ast.Node
	var all []string
	for _, n := range t.in(s.fn) {
		all = append(all, string(s.text[offset(n.Pos()):offset(n.End())]))
		if mentions(n, t.words) {
			found = append(found, n)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%s: %s has %d %ss with %q, want one of\n%s", s.file, nameOf(s.fn), len(found), t.kind, t.words,
			strings.Join(all, "\n"))
	}
	return slices.Concat(s.text[:offset(found[0].Pos())], []byte(text), s.text[offset(found[0].End()):]), nil
}

func mentions(n ast.Node, words []string) bool {
	left := slices.Clone(words)
	found := func(is func(word string) bool) { left = slices.DeleteFunc(left, is) }
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			found(func(w string) bool { return w == n.Name })
		case *ast.BasicLit:
			found(func(w string) bool { return strings.Contains(n.Value, w) })
		case *ast.UnaryExpr:
			if x, ok := n.X.(*ast.Ident); ok {
				found(func(w string) bool { return w == n.Op.String()+x.Name })
			}
		}
		return true
	})
	return len(left) == 0
}

// each returns what visit returns for all nodes of a function.
func each(visit func(n ast.Node) []ast.Node) func(fn ast.Node) []ast.Node {
	return func(fn ast.Node) (found []ast.Node) {
		ast.Inspect(fn, func(n ast.Node) bool {
			found = append(found, visit(n)...)
			return true
		})
		return found
	}
}

// condition is a whole condition: of an if or case, or one that is assigned or returned.
func condition(words ...string) target { return target{"condition", words, each(conditionsOf)} }

// operand is an operand of && or ||, or a condition without them.
func operand(words ...string) target {
	return target{"operand", words, each(func(n ast.Node) (found []ast.Node) {
		for _, c := range conditionsOf(n) {
			found = append(found, operandsOf(c)...)
		}
		return found
	})}
}

func conditionsOf(n ast.Node) (found []ast.Node) {
	values := func(exprs []ast.Expr) {
		for _, e := range exprs {
			switch e.(type) {
			case *ast.BinaryExpr, *ast.UnaryExpr:
				found = append(found, e)
			}
		}
	}
	switch n := n.(type) {
	case *ast.IfStmt:
		found = append(found, n.Cond)
	case *ast.CaseClause:
		for _, e := range n.List {
			found = append(found, e)
		}
	case *ast.ReturnStmt:
		values(n.Results)
	case *ast.AssignStmt:
		values(n.Rhs)
	}
	return found
}

func operandsOf(n ast.Node) []ast.Node {
	switch e := n.(type) {
	case *ast.ParenExpr:
		return operandsOf(e.X)
	case *ast.BinaryExpr:
		if e.Op == token.LAND || e.Op == token.LOR {
			return append(operandsOf(e.X), operandsOf(e.Y)...)
		}
	}
	return []ast.Node{n}
}

// call is a call of the function or method words[0].
func call(words ...string) target {
	return target{"call", words, each(callsOf(words[0], func(c *ast.CallExpr) ast.Node { return c }))}
}

// argument is the argument n of a call of the function or method name.
func argument(n int, name string, words ...string) target {
	return target{"argument", words, each(callsOf(name, func(c *ast.CallExpr) ast.Node { return c.Args[n] }))}
}

// callsOf returns the part of each call of a function or method.
func callsOf(name string, part func(*ast.CallExpr) ast.Node) func(n ast.Node) []ast.Node {
	return func(n ast.Node) []ast.Node {
		c, ok := n.(*ast.CallExpr)
		if !ok {
			return nil
		}
		called := c.Fun
		if selector, ok := called.(*ast.SelectorExpr); ok {
			called = selector.Sel
		}
		if id, ok := called.(*ast.Ident); !ok || id.Name != name {
			return nil
		}
		return []ast.Node{part(c)}
	}
}

// value is the value of a key in a composite literal.
func value(key string, words ...string) target {
	return target{"value", words, each(func(n ast.Node) []ast.Node {
		if pair, ok := n.(*ast.KeyValueExpr); ok && mentions(pair.Key, []string{key}) {
			return []ast.Node{pair.Value}
		}
		return nil
	})}
}

// statement is an assignment, a return, or a call without them.
func statement(words ...string) target {
	return target{"statement", words, each(func(n ast.Node) []ast.Node {
		switch n.(type) {
		case *ast.AssignStmt, *ast.ReturnStmt, *ast.ExprStmt:
			return []ast.Node{n}
		}
		return nil
	})}
}
