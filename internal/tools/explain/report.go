// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/storage-controller/storage-controller/internal/finalizers"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

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
	Kind       string                 `json:"kind"`
	Namespace  string                 `json:"namespace,omitempty"`
	Name       string                 `json:"name"`
	Driver     string                 `json:"driver,omitempty"` // "" for none, or several
	State      string                 `json:"state"`            // a sentence
	Findings   []finding.Finding      `json:"findings"`
	Finalizers []finalizers.Finalizer `json:"finalizers"`
	Events     []Event                `json:"events"` // newest first
	// EventsUnknown is the reason why the events could not be read.
	EventsUnknown string `json:"eventsUnknown,omitempty"`
	Next          string `json:"next"` // a sentence
}

// Text returns r as text.
func (r Report) Text() string {
	var b strings.Builder
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	fmt.Fprintf(&b, "%s %s\n%s\n", r.Kind, name, finding.Printable(r.State))
	if r.Driver != "" {
		fmt.Fprintf(&b, "Driver: %s\n", finding.Printable(r.Driver))
	}
	b.WriteString("\n")
	for start, end := 0, 0; start < len(r.Findings); start = end {
		object := r.Findings[start].Object
		for end < len(r.Findings) && r.Findings[end].Object == object {
			end++
		}
		if object != "" || start > 0 {
			fmt.Fprintf(&b, "\n%s:\n", cmp.Or(object, r.Kind+" "+name))
		}
		b.WriteString(finding.Text(r.Findings[start:end]))
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
		text := finding.Printable(fmt.Sprintf("%s %s: %s", e.Type, e.Reason, e.Message))
		fmt.Fprintf(&b, "  %s ago  x%d  %s\n", duration.HumanDuration(e.Age), e.Count, text)
	}
	switch {
	case r.EventsUnknown != "":
		fmt.Fprintf(&b, "  %s\n", finding.Printable(r.EventsUnknown))
	case len(r.Events) == 0:
		b.WriteString("  none\n")
	}
	fmt.Fprintf(&b, "\nNext: %s\n", finding.Printable(r.Next))
	return b.String()
}

// sentence returns text on one line and with a full stop.
func sentence(text string) string {
	text = finding.Printable(text)
	if text == "" || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}
