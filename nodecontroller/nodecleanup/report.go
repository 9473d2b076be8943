// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// The reasons of events. docs/reference.md has their comments.
const (
	// Warning, PV, PVC: the node of the volume does not exist; the message has the planned action and its time
	reasonMissing = "NodeMissing"
	// Normal, PV, PVC: the node exists again; nothing is cleaned up
	reasonReturned = "NodeReturned"
	// Warning, PV, PVC, Node, CSIDriver: nothing is cleaned up, and why: an opt-out, the scope, the mode, a pod that uses the
	// PVC, an approval without effect, an unknown topology key
	reasonSkipped = "NodeCleanupSkipped"
	// Warning, PV, or PVC without a PV: the PVC was deleted because its node was deleted
	reasonClaimDeleted = "NodeVolumeClaimDeleted"
	// Warning, PV, Namespace of its PVC: the PV is about to be removed without its driver, or, on the Namespace, was; scrub
	// the disks of that node before they are used again
	reasonForceRemoved = "NodeVolumeForceRemoved"
	// Warning, PV, PVC, Node, CSIDriver: a permission is missing, an admission webhook or a policy refuses a request, a
	// VolumeAttachment or another controller's finalizer keeps the volume, the PV is in phase Failed, a node with the driver lacks
	// the topology label, the opt-out of a Node that is being deleted cannot be recorded, the finalizer keeps a Node with
	// --node-finalizer-mode=off, the custom resources of the driver are not cached, or a record cannot be parsed
	reasonBlocked = "NodeCleanupBlocked"
	// Warning, CSIDriver: too many nodes are lost; nothing more is cleaned up until an administrator approves it
	reasonBreakerOpen = "NodeCleanupBreakerOpen"
	// Normal, CSIDriver: no cleanup waits for an approval any more
	reasonBreakerClosed = "NodeCleanupBreakerClosed"
	// Warning, Node: its deletion was held for --node-finalizer-timeout; the cleanup continues without the finalizer
	reasonTimeout = "NodeFinalizerTimeout"
)

// news is an event about an object, or the Node with a name, or else the CSIDriver.
type news struct {
	object                runtime.Object
	node                  string
	kind, reason, message string // kind: Normal or Warning
}

func warn(obj runtime.Object, reason, message string) news {
	return news{obj, "", corev1.EventTypeWarning, reason, message}
}

// send sends an event about an object, or about a Node, which need not exist.
func (c *Controller) send(e news) {
	if e.object == nil {
		node, ok := c.nodes.Get(e.node)
		if !ok {
			node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: e.node}}
		}
		e.object = node
	}
	c.deps.Events.Event(e.object, e.kind, e.reason, e.message)
}

// csiDriver returns the CSIDriver, or one with its name if it cannot be read.
func (t *term) csiDriver(ctx context.Context) *storagev1.CSIDriver {
	driver, err := get(ctx, t.deleter.apiServer, "CSIDriver", t.cfg.Driver, t.deps.Client.StorageV1().CSIDrivers().Get)
	if err != nil || driver == nil {
		driver = &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: t.cfg.Driver}}
	}
	return driver
}

// of returns e about a volume, and about its claim.
func (it *item) of(kind, reason, message string) []news {
	all := []news{{it.Volume, "", kind, reason, message}}
	if it.Claim != nil {
		all = append(all, news{it.Claim, "", kind, reason, message})
	}
	return all
}

// events returns the events about a plan: those that the plan before it did not cause.
func events(s Settings, before, after Plan) (all []news) {
	if s.mode() != ModeOff && before.Breaker.Open != after.Breaker.Open {
		all = append(all, after.Breaker.event(s))
	}
	for _, r := range after.Problems {
		if slices.ContainsFunc(before.Problems, r.same) {
			continue
		}
		e := news{node: r.Node, kind: corev1.EventTypeWarning, reason: reasonBlocked, message: r.Message}
		if r.Name == "TopologyKeyUnknown" || r.Name == "ApprovalWithoutEffect" {
			e.reason, e.message = reasonSkipped, r.String()
		}
		all = append(all, e)
		if r.Name == "NodeWithoutLabel" {
			e.node = ""
			all = append(all, e)
		}
	}
	known := map[string]HostPlan{}
	for _, h := range before.Hosts {
		known[h.Value] = h
	}
	for _, h := range after.Hosts {
		was := known[h.Value]
		delete(known, h.Value)
		if !was.Since.IsZero() && h.Since.IsZero() && after.exists(h) {
			all = append(all, was.returnedEvents()...)
			continue
		}
		all = append(all, h.events(was)...)
	}
	for _, value := range slices.Sorted(maps.Keys(known)) { // their records have ended
		h := known[value]
		if !h.Since.IsZero() && after.exists(h) {
			all = append(all, h.returnedEvents()...)
		}
	}
	return all
}

// exists reports whether the Node of a host exists, and is not being deleted.
func (p Plan) exists(h HostPlan) bool { return p.world.stays[h.Value] || p.world.stays[h.Node] }

// same reports whether other is the same problem.
func (r Reason) same(other Reason) bool {
	return r.Name == other.Name && r.Node == other.Node && (r.Message == other.Message || r.Check == CheckForbidden)
}

// maxProblems bounds the problems of a plan, most of which have an event.
const maxProblems = 100

// bounded returns the first problems, and one with the number of the others.
func bounded(problems []Reason) []Reason {
	more := len(problems) - maxProblems
	if more <= 0 {
		return problems
	}
	rest := Reason{Check: CheckAbsence, Name: "MoreProblems", Message: fmt.Sprintf("there are %d more problems", more)}
	return append(problems[:maxProblems:maxProblems], rest)
}

// event returns the event about the breaker that has opened or closed.
func (v Verdict) event(s Settings) news {
	if !v.Open {
		return news{kind: corev1.EventTypeNormal, reason: reasonBreakerClosed, message: "No cleanup waits for an approval any more"}
	}
	return warn(nil, reasonBreakerOpen, fmt.Sprintf("%d of %d nodes are lost, and at most %d may be. Nothing more is cleaned up until "+
		"they return or you approve: storage-controller nodecontroller approve --driver-name=%s NODE... --yes. Lost: %s", v.Lost, v.Total,
		v.Limit, s.Driver, kube.ShortList(v.Names, 10)))
}

// returnedEvents returns the events about a Node that was missing and exists.
func (h HostPlan) returnedEvents() (all []news) {
	for _, st := range h.volumes() {
		all = append(all, st.Item.of(corev1.EventTypeNormal, reasonReturned,
			fmt.Sprintf("Node %s of this volume exists again. Nothing is cleaned up", h.Name()))...)
	}
	return all
}

// volumes returns the steps for volumes, without those for custom resources.
func (h HostPlan) volumes() []Step {
	return slices.DeleteFunc(slices.Clone(h.Steps), func(st Step) bool { return st.Item.Volume == nil || st.Kind == KindResource })
}

// events returns the events about a host that its last plan did not cause.
func (h HostPlan) events(before HostPlan) (all []news) {
	lost := !h.Since.IsZero() && !h.Since.Equal(before.Since)
	for _, st := range h.Steps {
		kind := KindVolume // of the object that the step is about
		if st.Kind == KindResource {
			kind = KindResource
		} else if lost {
			all = append(all, st.Item.of(corev1.EventTypeWarning, reasonMissing,
				fmt.Sprintf("Node %s of this volume is missing. %s", h.Name(), h.Next))...)
		}
		reason, event := st.reported()
		known := slices.ContainsFunc(before.Steps, func(was Step) bool {
			r, _ := was.reported()
			return (was.Kind == KindResource) == (kind == KindResource) && was.Item.target(kind) == st.Item.target(kind) &&
				r.Name == reason.Name && r.Check == reason.Check
		})
		switch {
		case known:
		case kind == KindResource:
			if event == reasonBlocked && reason.Check == CheckForbidden {
				all = append(all, warn(nil, event, reason.Message))
			}
		case event == reasonBlocked:
			all = append(all, warn(st.Item.Volume, event, reason.Message))
		case event == reasonSkipped:
			all = append(all, st.Item.of(corev1.EventTypeWarning, event, "Nothing is cleaned up: "+reason.String())...)
		}
	}
	return all
}

// reported returns the reason of a step that has an event, and the reason of that event. Nothing is reported while the mode
// deletes nothing, or in the grace.
func (st Step) reported() (r Reason, event string) {
	for _, r := range st.Reasons {
		if r.Name == "ReportOnly" || r.Check == CheckGrace {
			return Reason{}, ""
		}
	}
	for _, r := range st.Reasons {
		switch {
		case slices.Contains([]Check{CheckAttached, CheckFinalizer, CheckForbidden}, r.Check), r.Check == CheckPolicy && r.Name == "Failed",
			r.Name == "NotRead" && isRefusal(st.Item.Unread):
			return r, reasonBlocked
		case slices.Contains([]Check{CheckScope, CheckPolicy, CheckAbsence, CheckSanity, CheckUse}, r.Check):
			return r, reasonSkipped
		}
	}
	return Reason{}, ""
}

// kept returns why a step is not done, unless only time or an approval is needed.
func (st Step) kept() (why Reason, kept bool) {
	for _, r := range st.Reasons {
		if r.Name != "ReportOnly" && !slices.Contains([]Check{CheckGrace, CheckBreaker, CheckOrder, CheckFailed}, r.Check) {
			return r, true
		}
	}
	return Reason{}, false
}

// sentence returns what happens next to a host, for people.
func (p Plan) sentence(s Settings, h HostPlan) string {
	doomed, kept := map[Kind]int{}, map[string]int{}
	for _, st := range h.Steps {
		if why, stays := st.kept(); stays {
			kept[why.Name]++
		} else {
			doomed[st.Kind]++
		}
	}
	delete(doomed, KindNone)
	would := func(verb string) string { return counted(doomed, kept, verb) }
	graceEnd := h.Since.Add(s.NodeMissingGrace)
	switch {
	case h.Unparsable:
		return h.Next
	case h.OptedOut:
		return "Nothing is deleted: the Node opted out"
	case p.world.Incomplete != "":
		return "Nothing is deleted: " + p.world.Incomplete
	case h.returned():
		return "The breaker counts its cleanup until " + h.Acted.Add(s.NodeCleanupWindow).UTC().Format(time.RFC3339)
	case !s.Deletes():
		return would("would be deleted") + ". Mode " + string(s.mode()) + " deletes nothing"
	case h.Held != "":
		return fmt.Sprintf("Held: %d of %d nodes are lost, at most %d may be. %s. Approve, or bring it back", p.Breaker.Lost,
			p.Breaker.Total, p.Breaker.Limit, would("would be deleted"))
	case h.Presence == deleting:
		return would("are being deleted before the finalizer of its Node is removed")
	case h.Presence == missing && h.Approved.IsZero() && p.world.Now.Before(graceEnd):
		return would("will be deleted after "+graceEnd.UTC().Format(time.RFC3339)) + ", unless it returns"
	case h.Presence == missing:
		return would("are being deleted")
	}
	return "Nothing is deleted: a Node or CSINode that may be it exists"
}

// counted returns how many objects of each kind are deleted, and how many are kept by each reason.
func counted(doomed map[Kind]int, kept map[string]int, verb string) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(doomed)) {
		parts = append(parts, fmt.Sprintf("%d %s", doomed[kind], map[Kind]string{
			KindClaim: "claims", KindVolume: "volumes", KindFinalizers: "finalizers of volumes", KindResource: "custom resources",
		}[kind]))
	}
	text := "Nothing is deleted"
	if len(doomed) > 0 {
		text = strings.Join(parts, ", ") + " " + verb
	}
	if len(kept) == 0 {
		return text
	}
	n, reasons := 0, []string(nil)
	for _, name := range slices.Sorted(maps.Keys(kept)) {
		n, reasons = n+kept[name], append(reasons, fmt.Sprintf("%d %s", kept[name], name))
	}
	return fmt.Sprintf("%s, %d kept (%s)", text, n, strings.Join(reasons, ", "))
}

type metrics struct {
	actions *prometheus.CounterVec
	hold    prometheus.Histogram
	plan    func() *Plan

	missing, orphaned, blocked, open *prometheus.Desc
}

// newMetrics registers the metrics, which count the plan that current returns; nil counts as empty.
func newMetrics(reg prometheus.Registerer, current func() *Plan) *metrics {
	const prefix = "storage_controller_"
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+name, help, labels, nil)
	}
	m := &metrics{
		plan: current,
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "cleanup_actions_total",
			Help: "Deletions and removals of finalizers because a node was deleted, by action, mode of the cleanup, and result: " +
				"ok, gone, conflict, forbidden or error.",
		}, []string{"action", "mode", "result"}),
		hold: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "node_finalizer_hold_seconds",
			Help:    "Time from the deletion of a Node until the finalizer of this controller was removed.",
			Buckets: []float64{1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600},
		}),
		missing: desc("nodes_missing", "Nodes that do not exist and have volumes."),
		orphaned: desc("volumes_orphaned", "Volumes of lost nodes, by the state of their cleanup: "+
			"suspect, held, terminating, claim, draining, released, force or verify.", "state"),
		blocked: desc("cleanup_blocked", "Volumes that are not cleaned up, and missing permissions, by the failed check: "+
			"scope, absence, grace, breaker, sanity, use, policy, attached, finalizer or forbidden.", "gate"),
		open: desc("breaker_open", "1 while the cleanup of any node waits for an approval because too many nodes are lost."),
	}
	reg.MustRegister(m.actions, m.hold, m)
	return m
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.missing, m.orphaned, m.blocked, m.open} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	p := cmp.Or(m.plan(), &Plan{})
	states, gates, lost, open := map[State]int{}, map[Check]int{}, 0, 0
	for _, h := range p.Hosts {
		volumes := 0
		for _, st := range h.volumes() {
			if st.Item.Values[0] != h.Value { // a volume of several hosts counts once
				continue
			}
			volumes++
			states[st.State]++
			if gate := st.gate(); gate != "" {
				gates[gate]++
			}
		}
		if h.Presence == missing && volumes > 0 {
			lost++
		}
		if h.opens() {
			open = 1
		}
	}
	for _, r := range p.Problems {
		if r.Check == CheckForbidden {
			gates[CheckForbidden]++
		}
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(m.missing, lost)
	gauge(m.open, open)
	for state, n := range states {
		gauge(m.orphaned, n, string(state))
	}
	for gate, n := range gates {
		gauge(m.blocked, n, string(gate))
	}
}

// gate returns the check that keeps a step, as the metric counts it. A volume that is held waits for an approval, whatever else time ends.
func (st Step) gate() Check {
	for _, r := range st.Reasons {
		switch {
		case r.Check == CheckMode:
			return "" // no deletion is expected
		case st.State == StateHeld:
			return CheckBreaker
		case r.Check == CheckOrder, r.Check == CheckFailed:
		case r.Name == "NotRead" && isRefusal(st.Item.Unread):
			return CheckForbidden
		default:
			return r.Check
		}
	}
	return ""
}
