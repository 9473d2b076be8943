// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Plan is what a pass writes, deletes and releases.
type Plan struct {
	Records  Records
	Breaker  Verdict
	Hosts    []HostPlan // by value
	Problems []Reason   // that concern more than one host
	Next     time.Time  // when time alone may change the plan
	Protect  []string   // Nodes that get the finalizer

	world                    world  // that it was made of
	wantsNodes, wantsVolumes bool   // see needsLists
	version                  string // resourceVersion of the ConfigMap with its records
	changes                  int64  // see Controller.changes, before the caches were read
}

// HostPlan is the part of a [Plan] about one host.
type HostPlan struct {
	LostNode // without fields but Value if it has no record
	Presence presence
	Steps    []Step
	Releases []Release
}

// Step is the next deletion of one item. It is due without Reasons.
type Step struct {
	Kind    Kind
	Item    *item
	State   State
	Reasons []Reason
	Again   bool // a request of this term has failed
}

// Release is the removal of our finalizer from a Node that is being deleted. With a Reason, it has an event.
type Release struct {
	Node            *corev1.Node
	Reason, Message string
	// Unrecorded reports whether it does not wait for the records of the plan: the Node has waited for --node-finalizer-timeout, and
	// has not opted out.
	Unrecorded bool
}

// Verdict is the decision of the breaker, which limits how many nodes may be lost at the same time without an approval. Many
// nodes that disappear together are an accident of the control plane more often than of the machines.
type Verdict struct {
	Open               bool // no host may be cleaned up unless it is approved or its removal was planned
	Lost, Total, Limit int
	Names              []string // of the lost hosts, sorted
}

// State is how far the cleanup of an item is, for the metric.
type State string

// The states of items.
const (
	StateSuspect     State = "suspect"     // in the grace
	StateHeld        State = "held"        // by the breaker
	StateTerminating State = "terminating" // its Node is being deleted
	StateClaim       State = "claim"       // its claim exists
	StateDraining    State = "draining"    // its claim is being deleted
	StateReleased    State = "released"    // it has no claim
	StateForce       State = "force"       // it is being removed without the driver
	StateVerify      State = "verify"      // it is being deleted
)

// attempts are the failed deletions of this term, by the UIDs of their objects.
type attempts map[types.UID]attempt

// attempt is a deletion that failed. Until its time, Reason keeps the object, and others continue.
type attempt struct {
	Reason   Reason // with [CheckForbidden] if the API server refused it, else [CheckFailed]
	Failures int
	Sent     bool          // the API server got a request of it
	Until    time.Time     // zero: no plan has had the reason yet
	delay    time.Duration // from that plan to Until
}

// plan decides what a pass does. It has no side effects. tried are the failures of this term.
func plan(s Settings, w world, r Records, tried attempts) Plan {
	p := Plan{Records: r, Next: w.Now.Add(s.CheckInterval), world: w}
	if s.mode() != ModeOff {
		p.planRecords(s)
	}
	pending, known, steps := map[string]bool{}, map[string]bool{}, map[string][]Step{}
	for value, h := range w.Hosts {
		for _, it := range h.Items {
			if isPending(w, it, mayClean(s, factsOf(s, p, it))) {
				pending[value], known[value] = true, known[value] || !it.unknown()
			}
		}
	}
	p.Breaker = verdict(s, w, p.Records, pending)
	if p.Breaker.Open {
		for value, n := range p.Records.Lost {
			// An item that could not be read counts for the breaker, and does not hold its host: the hold would remain after the next read.
			if known[value] && !n.exempt() {
				n.Held = HeldByBreaker
				p.Records.Lost[value] = n
			}
		}
	}
	for value, h := range w.Hosts {
		for _, it := range h.Items {
			st := p.step(s, h, it, tried)
			steps[value] = append(steps[value], st)
			if st.due() {
				p.act(s, it)
			}
		}
	}
	for _, value := range slices.Sorted(maps.Keys(w.Hosts)) {
		h, n := w.Hosts[value], p.Records.Lost[value]
		n.Value = value
		of := HostPlan{LostNode: n, Presence: h.Presence, Steps: steps[value], Releases: releases(s, w, h, n, steps[value])}
		if _, known := p.Records.Lost[value]; known || len(h.Items)+len(h.Leaving) > 0 {
			p.Hosts = append(p.Hosts, of)
		}
		for _, node := range h.Leaving {
			p.before(s.graceEnd(n, node))
			p.before(node.DeletionTimestamp.Add(s.NodeFinalizerTimeout))
		}
		p.before(n.Acted.Add(s.NodeCleanupWindow))
	}
	p.planNodes(s)
	return p
}

// before makes the next pass happen at a time, unless that has passed or is later than the next pass.
func (p *Plan) before(at time.Time) {
	if at.After(p.world.Now) && at.Before(p.Next) {
		p.Next = at
	}
}

// problem adds a problem that concerns more than one host. node is the name of the Node that it is about, or empty.
func (p *Plan) problem(check Check, name, node, format string, args ...any) {
	p.Problems = append(p.Problems, Reason{Check: check, Name: name, Node: node, Message: fmt.Sprintf(format, args...)})
}

// planRecords moves approvals into the records, updates them, and updates the fields about all of them.
func (p *Plan) planRecords(s Settings) {
	w := p.world
	p.Records.Lost = maps.Clone(p.Records.Lost)
	approved, problems := p.Records.approve(s, w.Now)
	p.Problems, p.Records.Mode = problems, s.mode()
	confirmed := w
	confirmed.Fresh, confirmed.VolumesListed = true, true
	for _, value := range slices.Sorted(maps.Keys(w.Hosts)) {
		h := w.Hosts[value]
		before, known := p.Records.Lost[value]
		next, exists := nextRecord(s, w, h, before, known)
		listed, stays := nextRecord(s, confirmed, h, before, known)
		if differs := exists != stays || exists && next != listed; differs {
			p.wantsNodes = true
			p.wantsVolumes = p.wantsVolumes || !stays && (before.Held != "" || before.OptedOut)
		}
		if exists {
			p.Records.Lost[value] = next
		} else {
			delete(p.Records.Lost, value)
		}
		if slices.Contains(approved, value) && next.Approved.IsZero() {
			p.problem(CheckGrace, "ApprovalWithoutEffect", "", "the approval of %s has no effect: its loss has ended, or no process has "+
				"watched it. If it does not return, approve it again", before.Name())
		}
		if next.Unparsable {
			p.problem(CheckScope, "Unparsable", "", "the record of lost node %s cannot be parsed. It is not cleaned up, and further lost "+
				"nodes are held. Correct or remove the record in ConfigMap %s", value, ConfigMapName(s.Driver))
		}
	}
	if w.KeyProblem == "" && (s.Deletes() || len(p.Records.Lost) > 0) {
		p.Records.TopologyKey = w.Key
	}
	if len(p.Records.Lost) == 0 {
		return
	}
	if w.Fresh {
		p.Records.Checked = w.Listed.UTC().Truncate(time.Second)
	}
	due := p.Records.Checked.Add(s.CheckInterval)
	p.wantsNodes = p.wantsNodes || !w.Now.Before(due) || p.Records.Checked.After(w.Now)
	p.before(due)
}

// nextRecord returns the record that a host must have, and false if it must have none. Without lists of this pass, the field
// since and the end of a record wait for them.
func nextRecord(s Settings, w world, h *host, r LostNode, known bool) (LostNode, bool) {
	before := r
	r.Value = h.Value
	if r.Since.After(w.Now) { // it is no time of this loss
		r.Since = time.Time{}
	}
	gap := known && s.unwatched(r, w.Checked, w.Now)
	switch {
	case !isRecordable(h.Value) || r.Unparsable || h.Stale && !gap:
		return r, known
	case h.Stale:
		return r.interrupted(), known
	case h.Presence == present:
		returned := LostNode{Value: r.Value, Acted: r.Acted, Next: r.Next}
		kept := known && !r.Planned && w.Now.Before(r.Acted.Add(s.NodeCleanupWindow)) // for the breaker
		for _, node := range h.Nodes {
			if node.DeletionTimestamp == nil && s.optOut("Node", node) != "" { // no process may see its deletion
				returned.Node, returned.UID, returned.OptedOut, kept = node.Name, node.UID, true, true
			}
		}
		if kept && r == returned || !w.Fresh {
			return r, known
		}
		return returned, kept
	case h.Presence == deleting:
		r = r.deleting(s, h)
	case h.Presence == missing:
		r = r.missing(h.Last)
	case slices.ContainsFunc(h.Leaving, func(node *corev1.Node) bool { return s.optOut("Node", node) != "" }): // it waits for its record
		r = r.deleting(s, h).interrupted()
	case !r.Since.IsZero() || len(h.Nodes) > 0:
		r = r.interrupted()
	case !known && h.Last != nil && h.Last.OptedOut && len(h.Nodes) == 0: // its CSINode is left
		r.Node, r.UID, r.OptedOut = h.Last.Name, h.Last.UID, true
	}
	if gap {
		r = r.interrupted()
	}
	unseen := h.Presence == deleting && r.UID != before.UID && w.Now.Sub(h.leaving(r.UID).DeletionTimestamp.Time) > s.ClockGap
	switch now := w.Now.UTC().Truncate(time.Millisecond); {
	case gap && h.Presence != missing, unseen:
		r.Restarted = now
	case h.Presence == missing && r.Since.IsZero():
		r.Since, r.Restarted = now, time.Time{}
	}
	if !w.Fresh && (!r.Since.Equal(before.Since) || before.UID != "" && before.UID != r.UID) {
		return before, known
	}
	// An opt-out must outlive the process also if the volumes of the host are not known without a topology key.
	optedOut := r.OptedOut && (len(h.Leaving) > 0 || h.Mentioned || w.KeyProblem != "")
	ended := len(h.Items) == 0 && !h.Mentioned && !optedOut && !w.Now.Before(r.Acted.Add(s.NodeCleanupWindow))
	confirmed := w.Fresh && w.Incomplete == "" && (w.VolumesListed || r.Held == "" && !r.OptedOut)
	switch {
	case known:
		return r, !ended || !confirmed
	case h.Presence == unclear && !r.OptedOut:
		return r, false
	}
	return r, len(h.Items) > 0 || optedOut
}

// deleting returns the record with a Node of h that is being deleted. An opt-out in the record may be that of an administrator.
func (n LostNode) deleting(s Settings, h *host) LostNode {
	node := h.leaving(n.UID)
	switch {
	case n.UID != node.UID:
		n = n.another(node.CreationTimestamp.Time)
	case !n.Since.IsZero():
		n = n.interrupted()
	}
	n.Node, n.UID, n.Since = node.Name, node.UID, time.Time{}
	n.OptedOut = n.OptedOut || slices.ContainsFunc(h.Nodes, func(node *corev1.Node) bool { return s.optOut("Node", node) != "" })
	acted := n.Acted.After(node.DeletionTimestamp.Time) // the breaker counts it already
	// Other modes do not read pods.
	n.Planned = n.Planned || s.Deletes() && s.holds(node) && node.Spec.Unschedulable && !h.Used && !acted
	return n
}

// leaving returns the Node with a UID that is being deleted, or another one.
func (h *host) leaving(uid types.UID) *corev1.Node {
	i := slices.IndexFunc(h.Leaving, func(node *corev1.Node) bool { return node.UID == uid })
	return h.Leaving[max(0, i)]
}

// missing returns the record with the deleted Node that this process last saw, or nil. If that is another Node than the recorded
// one, and this process saw it after the recorded loss, this is another loss.
func (n LostNode) missing(last *departed) LostNode {
	switch {
	case last == nil || last.UID == n.UID && !n.Since.IsZero():
		return n
	case last.UID != n.UID && !n.Since.IsZero() && !last.At.After(n.Since):
		return n
	case last.UID != n.UID && (n.UID != "" || !n.Since.IsZero()):
		n = n.another(last.Created)
	}
	if n.Since.IsZero() {
		n.Node, n.UID, n.OptedOut = last.Name, last.UID, n.OptedOut || last.OptedOut
	}
	return n
}

// another returns the record without the fields about its Node, because the host had another Node, created at a time. The hold and
// the opt-out remain unless that is certainly a later Node: another process may have recorded what this one does not know.
func (n LostNode) another(created time.Time) LostNode {
	next := LostNode{Value: n.Value, Acted: n.Acted, Held: n.Held, OptedOut: n.OptedOut}
	if n.UID != "" && !n.Since.IsZero() && created.After(n.Since) {
		next.Held, next.OptedOut = "", false
	}
	return next
}

// isPending reports whether a deletion happens now or later, while the other hosts of the item are as they are.
func isPending(w world, it *item, reasons []Reason) bool {
	kept := func(r Reason) bool { return r.Check == CheckMode || r.Check == CheckScope || r.Check == CheckPolicy }
	stays := func(value string) bool { return w.Hosts[value] == nil || w.Hosts[value].Presence == present }
	return !slices.ContainsFunc(reasons, kept) && !slices.ContainsFunc(it.Values, stays)
}

// verdict evaluates the breaker. pending are the hosts with something to delete, now or later. In the window, other hosts count as well:
// nodes that disappear together are one accident, whatever their owners agreed to.
func verdict(s Settings, w world, r Records, pending map[string]bool) Verdict {
	var v Verdict
	for value := range pending {
		if pending[value] && !r.Lost[value].Planned {
			v.Names = append(v.Names, value)
		}
	}
	waits := false
	for value, n := range r.Lost {
		waits = waits || n.opens()
		events := []time.Time{n.Acted, n.Since}
		if h := w.Hosts[value]; h.Presence == deleting {
			events = append(events, h.leaving(n.UID).DeletionTimestamp.Time)
		}
		recent := slices.ContainsFunc(events, func(at time.Time) bool { return w.Now.Before(at.Add(s.NodeCleanupWindow)) })
		if recent && !n.Planned {
			v.Names = append(v.Names, value)
		}
	}
	v.Names = sorted(v.Names)
	v.Lost, v.Total = len(v.Names), len(sorted(w.Drivers, v.Names))
	// The small addend is for fractions such as 0.29 of 100, which is 28.999 in binary.
	v.Limit = max(s.NodeCleanupMinNodes, int(math.Floor(float64(v.Total)*s.NodeCleanupMaxFraction+1e-9)))
	v.Open = s.Deletes() && (waits || v.Lost > v.Limit)
	return v
}

// nextKind returns the kind of the next deletion of an item. It decides the order, and permits nothing.
func nextKind(s Settings, it *item) Kind {
	switch {
	case it.Resource != nil:
		return KindResource
	case it.Volume == nil || it.Unread != nil:
		return KindNone
	case it.Claim != nil && it.Claim.DeletionTimestamp == nil:
		return KindClaim
	case it.Volume.DeletionTimestamp == nil:
		return KindVolume
	case slices.ContainsFunc(it.Volume.Finalizers, s.isRemovable):
		return KindFinalizers
	}
	return KindNone
}

// target returns the UID of the object that a step of a kind deletes or changes.
func (it *item) target(kind Kind) types.UID {
	switch {
	case kind == KindClaim:
		return it.Claim.UID
	case kind == KindResource:
		return it.Resource.UID
	case it.Volume != nil:
		return it.Volume.UID
	}
	return ""
}

// step returns the step for an item of h.
func (p *Plan) step(s Settings, h *host, it *item, tried attempts) Step {
	f := factsOf(s, *p, it)
	st := Step{Kind: f.Kind, Item: it, Reasons: mayClean(s, f)}
	st.State = stateOf(s, h, p.Records.Lost[h.Value], st)
	if st.Kind == KindNone && it.Unread == nil {
		st.Reasons = foreignFinalizers(s, it)
		return st
	}
	// Without these reasons, it is due.
	if !slices.ContainsFunc(st.Reasons, func(r Reason) bool { return r.Name != nodesNotListed && r.Name != volumesNotListed }) {
		for _, r := range st.Reasons {
			p.wantsNodes, p.wantsVolumes = p.wantsNodes || r.Name == nodesNotListed, p.wantsVolumes || r.Name == volumesNotListed
		}
	}
	failed, again := tried[it.target(st.Kind)]
	st.Again = failed.Sent
	if again && p.world.Now.Before(failed.Until) {
		failed.Reason.Until = failed.Until
		st.Reasons = append(st.Reasons, failed.Reason)
	}
	for _, r := range st.Reasons {
		p.before(r.Until)
	}
	return st
}

// foreignFinalizers returns the reason why a volume that is being deleted stays, if the finalizer of another component keeps it.
func foreignFinalizers(s Settings, it *item) []Reason {
	if it.Volume == nil {
		return nil
	}
	foreign := slices.DeleteFunc(slices.Clone(it.Volume.Finalizers), func(f string) bool {
		return s.isRemovable(f) || f == "kubernetes.io/pv-protection"
	})
	if len(foreign) == 0 {
		return nil
	}
	return []Reason{{Check: CheckFinalizer, Name: "ForeignFinalizer", Message: "finalizer " + strings.Join(foreign, ", ") +
		" keeps the volume. The component that added it must remove it"}}
}

// stateOf returns the state of a step of h, whose record is r.
func stateOf(s Settings, h *host, r LostNode, st Step) State {
	refused := func(check Check) bool {
		return slices.ContainsFunc(st.Reasons, func(r Reason) bool { return r.Check == check })
	}
	switch {
	case h.Presence == deleting:
		return StateTerminating
	case r.Held != "":
		return StateHeld
	case refused(CheckGrace) || refused(CheckAbsence):
		return StateSuspect
	case st.Kind == KindClaim:
		return StateClaim
	case st.Item.Claim != nil:
		return StateDraining
	case st.Kind == KindNone:
		return StateVerify
	case refused(CheckMode) || refused(CheckPolicy) || refused(CheckOrder) || refused(CheckAttached):
		return StateReleased
	}
	return StateForce
}

// act records a deletion that is about to happen, for the window of the breaker, at most once a minute.
func (p *Plan) act(s Settings, it *item) {
	for _, value := range it.Values {
		n, known := p.Records.Lost[value]
		if known && p.world.Now.Sub(n.Acted) >= min(time.Minute, s.NodeCleanupWindow/2) {
			n.Acted = p.world.Now.UTC().Truncate(time.Millisecond)
			p.Records.Lost[value] = n
		}
	}
}

// due reports whether a step may be done now.
func (st Step) due() bool { return st.Kind != KindNone && len(st.Reasons) == 0 }

// releases returns the Nodes of a host whose finalizer is removed now. steps are those of the host, and r is its record.
func releases(s Settings, w world, h *host, r LostNode, steps []Step) (all []Release) {
	for _, node := range h.Leaving {
		if !s.holds(node) {
			continue
		}
		if kept, reason, message := keepsFinalizer(s, w, h, r, steps, node); !kept {
			all = append(all, Release{node, reason, message, s.overdue(node, w.Now) && s.optOut("Node", node) == ""})
		}
	}
	return all
}

// permits reports whether the finalizer may be removed from live, the Node as it was read after the plan: it is the same Node of
// the same host, and its opt-out is unchanged.
func (r Release) permits(s Settings, key string, live *corev1.Node) bool {
	annotation, seen := CleanupAnnotation(s.Driver), r.Node
	return live.UID == seen.UID && live.DeletionTimestamp != nil && live.Annotations[annotation] == seen.Annotations[annotation] &&
		hostOf(live.Name, live.Labels, key) == hostOf(seen.Name, seen.Labels, key)
}

// keepsFinalizer reports whether a Node that is being deleted keeps our finalizer. Else reason and message are for an event.
func keepsFinalizer(
	s Settings, w world, h *host, r LostNode, steps []Step, node *corev1.Node,
) (kept bool, reason, message string) {
	const skipped = "The claims of the node are kept: "
	recorded := r.UID == node.UID && !r.Unparsable
	_, drains := s.drains(r, node, w.Now)
	switch out := s.optOut("Node", node); {
	case s.SkipNodeFinalize:
		return false, reasonSkipped, skipped + "--skip-node-finalize is set"
	case s.mode() == ModeOff:
		return false, reasonSkipped, skipped + "the mode of the cleanup is off"
	case out != "" && h.Presence != present && !(recorded && r.OptedOut): // the opt-out must outlive the Node
		return true, "", ""
	case !s.Deletes():
		return false, reasonSkipped, skipped + "the mode of the cleanup is " + string(s.mode())
	case w.KeyProblem != "":
		return false, reasonSkipped, skipped + "TopologyKeyUnknown: " + w.KeyProblem + ". " + keyAdvice
	case recorded && r.OptedOut:
		return false, reasonSkipped, skipped + cmp.Or(out, "the Node had opted out")
	case s.overdue(node, w.Now):
		return false, reasonTimeout, fmt.Sprintf("Finalizer removed after %v, before the cleanup was complete. The cleanup continues "+
			"after --node-missing-grace", s.NodeFinalizerTimeout)
	case h.Presence != deleting || h.Stale || drains || w.Incomplete != "", len(h.Items) > 0 && !recorded:
		return true, "", ""
	case r.Held != "":
		return false, reasonSkipped, "Finalizer removed: too many nodes are lost. The cleanup of the claims waits for an approval: " +
			s.approveCommand(r)
	}
	return slices.ContainsFunc(steps, Step.waits), "", ""
}

// overdue reports whether a Node that is being deleted has waited for --node-finalizer-timeout.
func (s Settings) overdue(node *corev1.Node, now time.Time) bool {
	return !now.Before(node.DeletionTimestamp.Add(s.NodeFinalizerTimeout))
}

// waits reports whether a Node that is being deleted waits for a step: it is due, was not judged, or has failed without an answer.
// What the API server refused does not keep the Node.
func (st Step) waits() bool {
	passing := func(r Reason) bool {
		return r.Check == CheckFailed || r.Name == volumesNotListed || r.Name == nodesNotListed
	}
	refused := slices.ContainsFunc(st.Reasons, func(r Reason) bool { return !passing(r) })
	return st.Item.unknown() || st.Kind != KindNone && !refused
}

// planNodes adds the problems of nodes, and the Nodes that get the finalizer.
func (p *Plan) planNodes(s Settings) {
	w := p.world
	if s.Deletes() {
		if w.KeyProblem != "" {
			p.problem(CheckAbsence, "TopologyKeyUnknown", "", "%s, so nothing is cleaned up. %s", w.KeyProblem, keyAdvice)
		}
		if w.Incomplete != "" {
			p.problem(CheckAbsence, "Incomplete", "", "Nothing is cleaned up: %s", w.Incomplete)
			p.before(w.Now.Add(waitInterval))
		}
		for _, name := range w.Unlabelled {
			p.problem(CheckAbsence, "NodeWithoutLabel", name, "Node %s has the driver, but lacks the label of topology key %s. It may be "+
				"any missing node, so nothing of missing nodes is cleaned up. Restore the label, or delete the Node", name, w.Key)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.Nodes)) {
		node := w.Nodes[name]
		if s.protects(node, w.CSINodes[name]) {
			p.Protect = append(p.Protect, name)
		}
		if s.NodeFinalizerMode == FinalizerOff && node.DeletionTimestamp != nil && slices.Contains(node.Finalizers, s.NodeFinalizer) {
			p.problem(CheckFinalizer, "FinalizerOff", name, "Finalizer %[1]s keeps the Node, and --node-finalizer-mode=off does not "+
				"remove it. Unless another component does, set --node-finalizer-mode=remove, or run storage-controller nodecontroller "+
				"remove-finalizers --driver-name=%[2]s --node-finalizer=%[1]s --yes", s.NodeFinalizer, s.Driver)
		}
	}
}

// needsLists reports what must be listed before the plan may be carried out: the Nodes and CSINodes, or the volumes.
func (p Plan) needsLists() (nodes, volumes bool) {
	return p.wantsNodes && !p.world.Fresh, p.wantsVolumes && !p.world.VolumesListed
}
