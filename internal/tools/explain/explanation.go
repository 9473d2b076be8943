// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The next step after a failure that a controller retries.
const (
	retries  = "Retries automatically. " + fixError
	fixError = "Fix the error shown above; the log of the driver container (`kubectl logs`) has the details."
)

// topicEvents marks a failed read of the events, which the report shows in their place.
const topicEvents = "events"

// explanation derives the findings of one report from facts.
type explanation struct {
	*facts
	findings []Finding
}

// add appends a finding and returns it, to set the next step.
func (e *explanation) add(s Severity, topic, format string, args ...any) *Finding {
	e.findings = append(e.findings, Finding{Severity: s, Topic: topic, Sentence: fmt.Sprintf(format, args...)})
	return &e.findings[len(e.findings)-1]
}

// report returns the report about object. rest is the next step if no finding has one.
func (e *explanation) report(kind string, object metav1.Object, state, rest string, drivers ...string) Report {
	if created := object.GetCreationTimestamp(); !created.IsZero() {
		state += ", created " + e.age(created.Time) + " ago"
	}
	if deleted := object.GetDeletionTimestamp(); deleted != nil {
		state += "; Terminating for " + e.age(deleted.Time) + ", held by its finalizers"
	}
	r := Report{
		Kind: kind, Namespace: object.GetNamespace(), Name: object.GetName(), Driver: e.driver, State: state + ".",
		Findings: e.findings, Finalizers: finalizersOf(kind, object.GetFinalizers(), drivers...), Events: e.reportEvents(),
	}
	for _, f := range e.unread {
		if f.Topic == topicEvents {
			r.EventsUnknown = f.Sentence
		} else {
			r.Findings = append(r.Findings, f)
		}
	}
	r.Next = nextOf(r.Findings, rest)
	return r
}

// nextOf returns the next step of the worst finding that has one; otherwise rest, with a reservation if a finding is
// unknown.
func nextOf(findings []Finding, rest string) string {
	best := Finding{Severity: Fine}
	for _, f := range findings {
		if f.Next != "" && (best.Next == "" || ranks[f.Severity] > ranks[best.Severity]) {
			best = f
		}
	}
	if best.Next != "" {
		return best.Next
	}
	if slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Unknown }) {
		return "As far as known: " + rest
	}
	return rest
}

// newestFirst returns the events sorted by the time they were last seen.
func (f *facts) newestFirst() []*corev1.Event {
	sorted := slices.Clone(f.events.value)
	slices.SortStableFunc(sorted, func(a, b *corev1.Event) int {
		return cmp.Or(lastSeen(b).Compare(lastSeen(a).Time), cmp.Compare(a.Name, b.Name))
	})
	return sorted
}

// lastSeen returns when e was last seen, whichever events API wrote it.
func lastSeen(e *corev1.Event) metav1.Time {
	switch {
	case e.Series != nil:
		return metav1.Time(e.Series.LastObservedTime)
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp
	case !e.EventTime.IsZero():
		return metav1.Time(e.EventTime)
	}
	return e.CreationTimestamp
}

func (f *facts) reportEvents() []Event {
	events := []Event{}
	for _, e := range f.newestFirst() {
		count := e.Count
		if e.Series != nil {
			count = e.Series.Count
		}
		seen := lastSeen(e).Time
		events = append(events, Event{
			Type: e.Type, Reason: e.Reason, Message: e.Message, From: cmp.Or(e.Source.Component, e.ReportingController),
			Count: max(count, 1), LastSeen: seen, Age: max(f.now.Sub(seen), 0),
		})
	}
	return events
}

// explainLastError reports the newest event with the reason failed, unless one with the reason succeeded is newer.
func explainLastError(e *explanation, failed, succeeded string) {
	for _, event := range e.newestFirst() {
		switch event.Reason {
		case failed:
			e.add(Failing, "error", "Last error %s ago (%s): %s", e.age(lastSeen(event).Time), count(int(max(event.Count, 1)), "time"),
				sentence(event.Message)).next(retries)
			return
		case succeeded:
			return
		}
	}
}
