// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Replacement is a new container with the sidecars that it replaces.
type Replacement struct {
	Object, Container string
	Sidecars          []OldContainer
}

// OldContainer is a replaced container. Its arguments were copied, apart from Changed.
type OldContainer struct {
	Name, Image string
	// Appended are the flags that its section has in addition, because of a default that differs.
	Appended []string
	Changed  []FlagChange
}

// FlagChange is an argument of a sidecar and that of the new container, which is empty if there is none.
type FlagChange struct{ Before, After string }

// Report returns the replacements with their flags, and the notes by level, as text.
func (r Result) Report() string {
	var b strings.Builder
	for _, c := range r.Replacements {
		var names []string
		for _, s := range c.Sidecars {
			names = append(names, s.Name)
		}
		task := "is new"
		if len(names) > 0 {
			task = "replaces " + enumerate(names)
		}
		fmt.Fprintf(&b, "%s: container %s %s\n", c.Object, c.Container, task)
		for _, s := range c.Sidecars {
			s.write(&b)
		}
	}
	for _, level := range []Level{Required, Changed, Information} {
		r.writeNotes(&b, level)
	}
	return b.String()
}

func (s OldContainer) write(b *strings.Builder) {
	fmt.Fprintf(b, "  %s (%s): copied\n", s.Name, s.Image)
	for _, f := range s.Changed {
		fmt.Fprintf(b, "    %s  → %s\n", f.Before, cmp.Or(f.After, "(dropped)"))
	}
	for _, f := range s.Appended {
		fmt.Fprintf(b, "    (default)  → %s\n", f)
	}
}

// writeNotes writes the notes of one level, under the name of their object and container.
func (r Result) writeNotes(b *strings.Builder, level Level) {
	at := ""
	for i, n := range r.Notes {
		if n.Level != level || slices.ContainsFunc(r.Notes[:i], n.isSame) {
			continue
		}
		var containers []string
		for _, other := range r.Notes[i:] {
			if n.isSame(other) && other.Container != "" {
				containers = append(containers, other.Container)
			}
		}
		where := cmp.Or(n.Object, "the manifest")
		if len(containers) > 0 {
			where += ", container " + enumerate(containers)
		}
		if at == "" {
			fmt.Fprintf(b, "%s:\n", headings[level])
		}
		if where != at {
			fmt.Fprintf(b, "  %s\n", where)
		}
		fmt.Fprintf(b, "    - %s\n", n.Text)
		at = where
	}
}

// isSame reports whether two notes differ only in their container.
func (n Note) isSame(other Note) bool {
	return n.Level == other.Level && n.Object == other.Object && n.Text == other.Text
}

// replacementOf returns the report about the arguments of g.
func replacementOf(g *group) Replacement {
	r := Replacement{Object: g.object.name, Container: g.name}
	for _, s := range g.sources {
		old := OldContainer{Name: s.name, Image: text(get(s.node, "image")), Changed: s.literals}
		for _, f := range s.appended {
			old.Appended = append(old.Appended, f.argument())
		}
		r.Sidecars = append(r.Sidecars, old)
	}
	return r
}
