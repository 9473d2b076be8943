package explain

import (
	"fmt"
	"time"
)

// Severity is how much a finding keeps an object from going on.
type Severity string

// The severities, least first.
const (
	Fine    Severity = "fine"    // as it should be
	Unknown Severity = "unknown" // what might matter could not be found out
	Waiting Severity = "waiting" // it goes on by itself, or when somebody uses it
	Failing Severity = "failing" // it is tried again by itself, and has failed so far
	Blocked Severity = "blocked" // nothing goes on until somebody does something
)

var ranks = map[Severity]int{Fine: 0, Unknown: 1, Waiting: 2, Failing: 3, Blocked: 4}

// Finding is one thing that was found out.
type Finding struct {
	Severity Severity `json:"severity"`
	Topic    string   `json:"topic"`    // a word, such as class or node
	Sentence string   `json:"sentence"` // what is so
	Next     string   `json:"next,omitempty"`
}

// Finalizer is one finalizer of the object.
type Finalizer struct {
	Name string `json:"name"`
	By   string `json:"removedBy"`
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

// Report is everything about one object.
type Report struct {
	Kind       string      `json:"kind"`
	Namespace  string      `json:"namespace,omitempty"`
	Name       string      `json:"name"`
	Driver     string      `json:"driver,omitempty"` // "" when it is of none, or of several
	State      string      `json:"state"`            // a sentence
	Findings   []Finding   `json:"findings"`
	Finalizers []Finalizer `json:"finalizers"`
	Events     []Event     `json:"events"` // newest first
	// EventsUnknown says why there are no events here; "" when they could be read.
	EventsUnknown string `json:"eventsUnknown,omitempty"`
	Next          string `json:"next"` // a sentence
}

// findings collects them.
type findings []Finding

func (l *findings) add(s Severity, topic, next, format string, args ...any) {
	*l = append(*l, Finding{Severity: s, Topic: topic, Sentence: fmt.Sprintf(format, args...), Next: next})
}

// next is the next step of the worst finding that has one; otherwise is for when none has,
// with a reservation if something could not be found out.
func (l findings) next(otherwise string) string {
	best, sure := -1, true
	for i, f := range l {
		sure = sure && f.Severity != Unknown
		if f.Next != "" && (best < 0 || ranks[f.Severity] > ranks[l[best].Severity]) {
			best = i
		}
	}
	switch {
	case best < 0 && !sure:
		return "As far as could be found out: " + otherwise
	case best < 0:
		return otherwise
	}
	return l[best].Next
}
