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

// OldContainer is a replaced container.
type OldContainer struct {
	Name, Image string
	Flags       []FlagChange
}

// FlagChange is a flag of a sidecar and the flag of the new container with its task. Before is empty for a
// default that was written out, After for a flag that was dropped.
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

// maxFlagWidth bounds the column of the old flags. Flags may be longer.
const maxFlagWidth = 56

func (s OldContainer) write(b *strings.Builder) {
	width := 0
	for _, f := range s.Flags {
		width = max(width, min(len(f.Before), maxFlagWidth))
	}
	fmt.Fprintf(b, "  %s (%s)\n", s.Name, s.Image)
	for _, f := range s.Flags {
		before, after := cmp.Or(f.Before, "(default)"), cmp.Or(f.After, "(dropped)")
		if f.Before == f.After || f.Before+"=true" == f.After || f.Before == f.After+"=true" {
			after = "same"
		}
		fmt.Fprintf(b, "    %-*s  → %s\n", max(width, len("(default)")), before, after)
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

// replacementOf returns the table of the flags of g. after are the flags of the new container.
func replacementOf(g *group, after []setting) Replacement {
	r := Replacement{Object: g.object.name, Container: g.name}
	for _, s := range g.sources {
		r.Sidecars = append(r.Sidecars, OldContainer{
			Name: s.name, Image: text(get(s.node, "image")), Flags: changesOf(s, after),
		})
	}
	return r
}

// changesOf returns the flags of s before, and the flags in after that have their task.
func changesOf(s *source, after []setting) []FlagChange {
	var out []FlagChange
	counterpart := func(name string) string {
		names := []string{name}
		for _, r := range s.roles {
			names = append(names, r+"-"+name)
		}
		i := slices.IndexFunc(after, func(f setting) bool { return slices.Contains(names, f.name) })
		if i < 0 {
			return ""
		}
		return after[i].written()
	}
	var done []string
	for _, f := range s.before {
		name := s.renamed(f.name)
		switch {
		case s.kind == livenessprobe && (name == "health-port" || name == "http-endpoint"):
			name = driverHealth
		case name == groupSnapshots:
			name = "feature-gates"
		}
		done = append(done, name)
		out = append(out, FlagChange{f.written(), counterpart(name)})
	}
	for _, f := range s.flags {
		if !slices.Contains(done, f.name) {
			out = append(out, FlagChange{"", counterpart(f.name)})
		}
	}
	return out
}

// written returns f as in the manifest.
func (f setting) written() string {
	if f.bare {
		return "--" + f.name
	}
	return "--" + f.name + "=" + f.value
}
