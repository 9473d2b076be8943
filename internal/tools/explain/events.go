package explain

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// eventsOf is what the report shows of the events, newest first.
func (f *facts) eventsOf() ([]Event, string) {
	result := []Event{}
	for _, e := range newestFirst(f.events.value) {
		count := e.Count
		if e.Series != nil {
			count = e.Series.Count
		}
		from := e.Source.Component
		if from == "" {
			from = e.ReportingController
		}
		seen := eventTime(e).Time
		result = append(result, Event{Type: e.Type, Reason: e.Reason, Message: e.Message, From: from, Count: max(count, 1), LastSeen: seen, Age: f.now.Sub(seen)})
	}
	return result, f.events.why
}

// last is the newest event with one of reasons, unless one of the others, which say that
// it is over, is newer.
func (f *facts) last(reasons []string, over ...string) *corev1.Event {
	for _, e := range newestFirst(f.events.value) {
		switch {
		case slices.Contains(reasons, e.Reason):
			return &e
		case slices.Contains(over, e.Reason):
			return nil
		}
	}
	return nil
}

// aboutLastError is what the driver, or whoever works for it, has said of its last attempt.
func (f *facts) aboutLastError(reasons []string, next string, over ...string) findings {
	var l findings
	if e := f.last(reasons, over...); e != nil {
		l.add(Failing, "error", next, "The last error was %s, %s: %s", f.ago(eventTime(*e).Time), count(int(max(e.Count, 1)), "time"), sentence(e.Message))
	}
	return l
}
