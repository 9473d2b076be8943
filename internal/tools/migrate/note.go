// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"slices"
	"strings"
)

// Level is the importance of a note.
type Level int

// The levels of notes.
const (
	Information Level = iota // nothing to do
	Changed                  // the new container works differently
	Required                 // to be done before the rollout
)

// headings are the headings of the levels in a report.
var headings = map[Level]string{
	Required: "You must do, before the rollout", Changed: "Changed meaning", Information: "Information",
}

// Note is a remark for the reader of the result.
type Note struct {
	Level     Level
	Object    string // kind and name; empty for the manifest as a whole
	Container string // in the result; empty for the object as a whole
	Text      string
}

func (m *migration) note(level Level, object, container, format string, args ...any) {
	n := Note{Level: level, Object: object, Container: container, Text: fmt.Sprintf(format, args...)}
	if !slices.Contains(m.notes, n) {
		m.notes = append(m.notes, n)
	}
}

func (g *group) must(format string, args ...any)    { g.note(Required, format, args...) }
func (g *group) changed(format string, args ...any) { g.note(Changed, format, args...) }
func (g *group) info(format string, args ...any)    { g.note(Information, format, args...) }

func (g *group) note(level Level, format string, args ...any) {
	g.m.note(level, g.object.name, g.name, format, args...)
}

// enumerate joins items with commas and "and".
func enumerate(all []string) string {
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}
