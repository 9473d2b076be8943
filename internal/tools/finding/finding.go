// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package finding holds the findings of explain, doctor and audit, and writes them.
package finding

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/csiclient"
)

// Severity ranks findings.
type Severity string

// The severities, least first.
const (
	OK      Severity = "ok"      // as expected
	Unknown Severity = "unknown" // could not be determined, or is not relevant
	Waiting Severity = "waiting" // in progress, or waiting for a user of the object
	Warning Severity = "warning" // works with a restriction, or is to be reviewed
	Failing Severity = "failing" // does not work; retries may succeed
	Blocked Severity = "blocked" // no progress without intervention
)

var severities = []Severity{OK, Unknown, Waiting, Warning, Failing, Blocked}

// Exceeds reports whether s is more severe than other.
func (s Severity) Exceeds(other Severity) bool {
	return slices.Index(severities, s) > slices.Index(severities, other)
}

// Finding is one fact.
type Finding struct {
	Severity Severity `json:"severity"`
	Topic    string   `json:"topic"`
	// Object is what the finding is about; "" is the object of the report.
	Object  string `json:"object,omitempty"`
	Message string `json:"message"`
	// Next is the next step: an imperative for the reader, or what a component does.
	Next string `json:"next,omitempty"`
}

// New returns a finding about the object of the report.
func New(s Severity, topic, message, next string) Finding {
	return Finding{Severity: s, Topic: topic, Message: message, Next: next}
}

// SetNext sets the next step of f.
func (f *Finding) SetNext(format string, args ...any) { f.Next = fmt.Sprintf(format, args...) }

// Count returns the number of findings with severity s.
func Count(findings []Finding, s Severity) int {
	n := 0
	for _, f := range findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// The width of the column of the topics. Names of Leases may be longer.
const (
	minTopic = 10
	maxTopic = 34
)

// Text returns a line for each finding, without its object, and a line for its next step. Consecutive findings with the same next step
// share that line.
func Text(findings []Finding) string {
	var b strings.Builder
	width := minTopic
	for _, f := range findings {
		width = max(width, min(len(f.Topic), maxTopic))
	}
	for i, f := range findings {
		fmt.Fprintf(&b, "%-7s  %-*s  %s\n", Printable(string(f.Severity)), width, Printable(f.Topic), Printable(f.Message))
		isShared := i+1 < len(findings) && findings[i+1].Next == f.Next
		if f.Next != "" && !isShared {
			fmt.Fprintf(&b, "%-7s  %-*s  → %s\n", "", width, "", Printable(f.Next))
		}
	}
	return b.String()
}

// Printable returns text on one line, without characters that are invisible or change others: drivers, containers and objects have
// parts of it.
func Printable(text string) string {
	return strings.Join(strings.Fields(csiclient.Printable(text)), " ")
}

// Plural returns n and noun, in the plural if n is not 1.
func Plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// WriteJSON writes a report as indented JSON.
func WriteJSON(w io.Writer, report any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(report)
}
