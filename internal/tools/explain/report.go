// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
)

// Severity ranks findings by how much they hold up the object.
type Severity string

// The severities, least first.
const (
	Fine    Severity = "fine"    // as expected
	Unknown Severity = "unknown" // relevant, but could not be determined
	Waiting Severity = "waiting" // in progress, or waiting for a user of the object
	Failing Severity = "failing" // failed so far and retried automatically
	Blocked Severity = "blocked" // no progress without intervention
)

var ranks = map[Severity]int{Fine: 0, Unknown: 1, Waiting: 2, Failing: 3, Blocked: 4}

// Finding is one fact about the object.
type Finding struct {
	Severity Severity `json:"severity"`
	Topic    string   `json:"topic"` // a word, such as class or node
	Sentence string   `json:"sentence"`
	Next     string   `json:"next,omitempty"` // an imperative for the reader, or what a component does next
	// Object is the claim that the finding is about, in the report of a pod; "" is the object of the report.
	Object string `json:"object,omitempty"`
}

// next sets the next step of f.
func (f *Finding) next(format string, args ...any) { f.Next = fmt.Sprintf(format, args...) }

// Finalizer is one finalizer of the object.
type Finalizer struct {
	Name string `json:"name"`
	By   string `json:"removedBy"` // a component, or unknown
	When string `json:"when"`
}

// Event is one event about the object.
type Event struct {
	Type     string        `json:"type"`
	Reason   string        `json:"reason"`
	Message  string        `json:"message"`
	From     string        `json:"from,omitempty"`
	Count    int32         `json:"count"`
	LastSeen time.Time     `json:"lastSeen"`
	Age      time.Duration `json:"ageNanoseconds"`
}

// Report explains one object.
type Report struct {
	Kind       string      `json:"kind"`
	Namespace  string      `json:"namespace,omitempty"`
	Name       string      `json:"name"`
	Driver     string      `json:"driver,omitempty"` // "" for none, or several
	State      string      `json:"state"`            // a sentence
	Findings   []Finding   `json:"findings"`
	Finalizers []Finalizer `json:"finalizers"`
	Events     []Event     `json:"events"` // newest first
	// EventsUnknown is the reason why the events could not be read.
	EventsUnknown string `json:"eventsUnknown,omitempty"`
	Next          string `json:"next"` // a sentence
}

// WriteJSON writes r as JSON.
func (r Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}

// WriteText writes r as text.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	fmt.Fprintf(&b, "%s %s\n%s\n", r.Kind, name, r.State)
	if r.Driver != "" {
		fmt.Fprintf(&b, "Driver: %s\n", r.Driver)
	}
	b.WriteString("\nWhy:\n")
	object := ""
	for _, f := range r.Findings {
		if f.Object != object {
			object = f.Object
			fmt.Fprintf(&b, "  %s:\n", cmp.Or(object, r.Kind+" "+name))
		}
		fmt.Fprintf(&b, "  %-8s %-10s %s\n", f.Severity, f.Topic, f.Sentence)
	}
	b.WriteString("\nFinalizers:\n")
	for _, z := range r.Finalizers {
		fmt.Fprintf(&b, "  %s\n    removed by: %s\n", z.Name, strings.TrimSpace(z.By+" "+z.When))
	}
	if len(r.Finalizers) == 0 {
		b.WriteString("  none\n")
	}
	b.WriteString("\nEvents, newest first:\n")
	for _, e := range r.Events {
		message := strings.Join(strings.Fields(e.Message), " ")
		fmt.Fprintf(&b, "  %s ago  x%d  %s %s: %s\n", duration.HumanDuration(e.Age), e.Count, e.Type, e.Reason, message)
	}
	switch {
	case r.EventsUnknown != "":
		fmt.Fprintf(&b, "  %s\n", r.EventsUnknown)
	case len(r.Events) == 0:
		b.WriteString("  none\n")
	}
	fmt.Fprintf(&b, "\nNext: %s\n", r.Next)
	_, err := io.WriteString(w, b.String())
	return err
}

// count returns n and noun, in the plural if n is not 1.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// sentence returns text, which may come from a driver, on one line and with a full stop.
func sentence(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if text == "" || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}
