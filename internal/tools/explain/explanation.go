// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/finalizers"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// topicEvents marks a failed read of the events, which the report shows in their place.
const topicEvents = "events"

// explanation derives the findings of one report from facts.
type explanation struct {
	*facts
	findings []finding.Finding
}

// add appends a finding and returns it, to set the next step.
func (e *explanation) add(s finding.Severity, topic, format string, args ...any) *finding.Finding {
	e.findings = append(e.findings, finding.Finding{Severity: s, Topic: topic, Message: fmt.Sprintf(format, args...)})
	return &e.findings[len(e.findings)-1]
}

func (e *explanation) ok(topic, format string, args ...any) *finding.Finding {
	return e.add(finding.OK, topic, format, args...)
}

func (e *explanation) unknown(topic, format string, args ...any) *finding.Finding {
	return e.add(finding.Unknown, topic, format, args...)
}

func (e *explanation) waiting(topic, format string, args ...any) *finding.Finding {
	return e.add(finding.Waiting, topic, format, args...)
}

func (e *explanation) failing(topic, format string, args ...any) *finding.Finding {
	return e.add(finding.Failing, topic, format, args...)
}

func (e *explanation) blocked(topic, format string, args ...any) *finding.Finding {
	return e.add(finding.Blocked, topic, format, args...)
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
		Findings: e.findings, Finalizers: finalizers.Of(kind, object.GetFinalizers(), drivers...), Events: e.reportEvents(),
	}
	for _, f := range e.unread {
		if f.Topic == topicEvents {
			r.EventsUnknown = f.Message
		} else {
			r.Findings = append(r.Findings, f)
		}
	}
	r.Next = nextOf(r.Findings, rest)
	return r
}

// nextOf returns the next step of the worst finding that has one; otherwise rest, with a reservation if a finding is
// unknown.
func nextOf(findings []finding.Finding, rest string) string {
	var best finding.Finding
	for _, f := range findings {
		if f.Next != "" && (best.Next == "" || f.Severity.Exceeds(best.Severity)) {
			best = f
		}
	}
	if best.Next != "" {
		return best.Next
	}
	if finding.Count(findings, finding.Unknown) > 0 {
		return "As far as known: " + rest
	}
	return rest
}

// newestFirst returns the events sorted by the time they were last seen.
func (f *facts) newestFirst() []*corev1.Event {
	sorted := slices.Clone(f.events.Value)
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

// explainLastError reports the newest event of a role with the reason failed, unless one with the reason succeeded is newer.
func explainLastError(e *explanation, role, failed, succeeded string) {
	for _, event := range e.newestFirst() {
		switch event.Reason {
		case failed:
			added := e.failed("error", failureOfEvent(event, role), "Last error (%s)", finding.Plural(int(max(event.Count, 1)), "time"))
			if e.isOutdated(event) {
				added.Severity, added.Next = finding.Waiting, ""
				added.Message += " The claim has changed since: its node was selected again, or is not selected any more."
			}
			return
		case succeeded:
			return
		}
	}
}

// isOutdated reports whether an event about a claim is older than the selection of its node, or the claim waits for the scheduler
// again: what the event reports may no longer hold.
func (f *facts) isOutdated(event *corev1.Event) bool {
	switch {
	case event.InvolvedObject.Kind != KindClaim || slices.Contains(f.claim.Value.Finalizers, kube.ProvisioningFinalizer):
		return false // a recorded request does not change with the node
	case f.waitsForPod():
		return true
	}
	const selectedNode = `"f:` + storagehelpers.AnnSelectedNode + `"`
	return slices.ContainsFunc(f.claim.Value.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
		return m.Time != nil && m.Time.After(lastSeen(event).Time) && m.FieldsV1 != nil &&
			strings.Contains(m.FieldsV1.GetRawString(), selectedNode)
	})
}
