// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// situations are what the histories must reach, so that the promises are tested.
var situations = []string{
	"claim deleted", "volume deleted", "finalizers deleted", "resource deleted", "resource without a volume deleted",
	"deleted while the Node is being deleted", "deleted after an approval", "deleted after the grace", "deleted with an approval of all",
	"planned", "held", "hold ended by an approval", "hold ended by a return", "opted out", "interrupted", "conflict", "term ended",
	"changed before the deletion", "pass of a former leader", "records deleted", "refused by live reads", "released", "released by timeout",
	"deletion refused", "deletion not sent", "deletion unanswered", "problem", "gap", "record ended", "unparsable",
}

// tolerance is for times that the API rounds to seconds.
const tolerance = time.Second

// checkDeletion asserts the promises before a deletion, and records it.
func (r *run) checkDeletion(p *actor, w world, f facts) {
	resource := ""
	if f.Item.Resource != nil {
		resource = f.Item.Resource.Name
	}
	volume := ""
	if f.Item.Volume != nil {
		volume = f.Item.Volume.Name
	}
	own := []string{}
	if f.Kind == KindResource {
		own = f.Item.Values
	}
	for _, violation := range r.violations(p, w, f.Kind, volume, resource, own, f.Changed) {
		r.fail("%s of %s%s was deleted: promise %s", f.Kind, volume, resource, violation)
	}
	if f.Kind == KindResource && volume == "" {
		r.seen["resource without a volume deleted"]++
	}
	records := parseRecords(r.cm)
	for _, value := range sorted(r.valuesOf(volume, resource), own) {
		n, truth := records.Lost[value], r.truth(value)
		if len(r.nodesOf(value)) > 0 {
			r.seen["deleted while the Node is being deleted"]++
		}
		switch {
		case n.ApprovedAll:
			r.seen["deleted with an approval of all"]++
		case !n.Approved.IsZero():
			r.seen["deleted after an approval"]++
		case n.Planned:
			r.seen["planned"]++
		default:
			r.seen["deleted after the grace"]++
			truth.acted = r.now
			r.checkBreaker(records)
		}
	}
}

// valuesOf returns the hosts of a volume and of a custom resource.
func (r *run) valuesOf(volume, resource string) (values []string) {
	if pv := r.volumes[volume]; pv != nil {
		values = pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values
	}
	if name := r.custom[resource].Node; r.nodes[name] != nil {
		values = sorted(values, []string{hostOf(name, r.nodes[name].Labels, testKey)})
	}
	return values
}

// violations returns the promises that a deletion by p would break now, by what the API has. w is what p has planned with.
// own are the hosts of a custom resource whose Node does not exist, by what p knows.
func (r *run) violations(p *actor, w world, kind Kind, volume, resource string, own []string, changed bool) (all []string) {
	add := func(broken bool, number int, format string, args ...any) {
		if broken {
			all = append(all, fmt.Sprintf("%d: %s", number, fmt.Sprintf(format, args...)))
		}
	}
	s, pv := r.settings, r.volumes[volume]
	add(!slices.Contains([]Mode{ModeClaims, ModeVolumes}, s.NodeCleanup) || s.SkipNodeFinalize, 1, "mode %s", s.NodeCleanup)
	about := kind == KindVolume || kind == KindFinalizers
	add(about && s.NodeCleanup != ModeVolumes, 1, "a volume in mode %s", s.NodeCleanup)
	add(changed, 19, "something has changed since the plan")
	add(parseRecords(r.cm).Holder != p.holder || r.leader != p, 22, "by another process")
	out := func(obj metav1.Object) bool {
		value, ok := obj.GetAnnotations()[testAnnotation]
		return ok && value != enabled
	}
	records, agreed := parseRecords(r.cm), s.NodeCleanupScope == ScopeAll
	if pv != nil {
		ref := pv.Spec.ClaimRef
		claim := r.claims[ref.Name]
		if claim != nil && claim.UID != ref.UID {
			claim = nil
		}
		add(out(pv), 3, "the volume opts out")
		add(out(r.classObj), 3, "the class opts out")
		add(out(r.ns), 3, "the Namespace opts out")
		add(pv.Status.Phase == corev1.VolumeFailed, 5, "the volume is Failed")
		retained := pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain
		add(retained && (kind != KindClaim || s.NodeCleanupRetain != RetainClaim), 6, "the volume is retained")
		add(about && pv.Annotations[storagehelpers.AnnDynamicallyProvisioned] != testDriver, 7, "it was not provisioned by the driver")
		agreed = agreed || r.classObj.Annotations[testAnnotation] == enabled
		if claim != nil {
			add(out(claim), 3, "the claim opts out")
			add(claim.Spec.VolumeName != pv.Name || claim.Status.Phase == corev1.ClaimLost, 5, "the claim is not bound")
			add(about, 18, "the claim exists")
			add(kind == KindResource && claim.DeletionTimestamp == nil, 18, "the claim of its volume is not being deleted")
			agreed = agreed || claim.Annotations[testAnnotation] == enabled
			if pod := r.users[claim.Name]; pod != nil && r.nodes[pod.Spec.NodeName] != nil {
				own := slices.ContainsFunc(r.namesOf(r.nodes[pod.Spec.NodeName]), func(n string) bool {
					return slices.Contains(r.valuesOf(volume, ""), n)
				})
				add(!own, 16, "a pod uses the claim on Node %s", pod.Spec.NodeName)
			}
		}
		add(claim == nil && kind == KindClaim, 5, "no claim is bound to the volume")
		if about {
			add(r.attached[volume], 17, "the volume is attached")
			add(pv.Status.Phase != corev1.VolumeReleased, 18, "the volume is %s", pv.Status.Phase)
			released := r.now.Sub(pv.Status.LastPhaseTransitionTime.Time)
			add(released < s.PVReleaseGrace-tolerance, 18, "it was released %v ago", released)
		}
	}
	if res, ok := r.custom[resource]; ok {
		add(res.Snapshot, 6, "it is a snapshot")
		for _, other := range r.volumes {
			add(pv == nil && other.Spec.CSI.VolumeHandle == res.Handle, 18, "volume %s has this custom resource", other.Name)
		}
		n := r.nodes[res.Node]
		add(n != nil && n.DeletionTimestamp == nil, 10, "Node %s exists", res.Node)
		add(n == nil && r.csiNodes[res.Node] != nil, 10, "CSINode %s exists", res.Node)
	}
	values, approved := sorted(r.valuesOf(volume, resource), own), true
	for _, value := range values {
		approved = approved && records.Lost[value].ApprovedAll && r.truth(value).approvedAll && !r.truth(value).approved.IsZero()
		all = append(all, r.hostViolations(p, w, records, value, about)...)
	}
	add(!agreed && (!approved || len(values) == 0), 2, "without consent")
	keys := map[string]bool{}
	for _, c := range w.CSINodes {
		for _, k := range c.Spec.Drivers[0].TopologyKeys {
			keys[k] = true
		}
	}
	add(len(keys) > 1 && s.TopologyNodeKey == "", 8, "there are several topology keys")
	for _, n := range w.Nodes {
		if c := w.CSINodes[n.Name]; c != nil {
			names := []string{"", n.Name, n.Labels[corev1.LabelHostname], c.Spec.Drivers[0].NodeID}
			add(s.TopologyNodeKey == "" && !slices.Contains(names, n.Labels[testKey]), 8, "the label of Node %s is not one of its names",
				n.Name)
		}
	}
	return all
}

// hostViolations returns the promises about one host.
func (r *run) hostViolations(p *actor, w world, records Records, value string, about bool) (all []string) {
	add := func(broken bool, number int, format string, args ...any) {
		if broken {
			all = append(all, fmt.Sprintf("%d: %s: %s", number, value, fmt.Sprintf(format, args...)))
		}
	}
	s, n, truth := r.settings, records.Lost[value], r.truth(value)
	add(n.Unparsable, 4, "the record cannot be parsed")
	add(n.OptedOut, 4, "the record opts out")
	add(p.optedOut[value], 26, "its deleted Node had opted out")
	add(n.Acted.IsZero() || r.now.Sub(n.Acted) > 5*time.Minute, 21, "the record does not have the deletion: %+v", n)
	approved := !n.Approved.IsZero() && !truth.approved.IsZero() && !p.known[value].After(truth.approved)
	add(!truth.held.IsZero() || n.Held != "", 14, "it is held")
	if m := r.nodes[n.Node]; m != nil && !slices.Contains(r.namesOf(m), value) {
		add(true, 10, "Node %s of the record exists", n.Node)
	}
	nodes := r.nodesOf(value)
	byName := slices.DeleteFunc(slices.Clone(nodes), func(m *corev1.Node) bool { return m.Name != value && m.Labels[testKey] != value })
	if slices.ContainsFunc(nodes, func(m *corev1.Node) bool { return m.UID == n.UID && m.DeletionTimestamp != nil }) {
		add(about, 18, "its Node is being deleted")
		for _, m := range nodes {
			if m.DeletionTimestamp == nil || m.UID != n.UID || hostOf(m.Name, m.Labels, testKey) != value {
				add(true, 10, "Node %s exists, or is being deleted for another host", m.Name)
				continue
			}
			add(!slices.Contains(m.Finalizers, testFinalizer) || s.NodeFinalizerMode == FinalizerOff, 11, "Node %s does not wait", m.Name)
			add(r.now.Sub(m.DeletionTimestamp.Time) < s.NodeDeleteGrace-tolerance, 11, "Node %s is in its grace", m.Name)
			add(r.now.Sub(truth.unwatched) < s.NodeDeleteGrace-tolerance, 25, "the grace of Node %s starts after the gap", m.Name)
			ready := m.Status.Conditions[0].Status == corev1.ConditionTrue
			add(s.NodeFinalizerWaitForOthers && len(m.Finalizers) > 1 && ready, 11, "Node %s may drain", m.Name)
			add(m.Annotations[testAnnotation] != "" && m.Annotations[testAnnotation] != enabled, 3, "Node %s opts out", m.Name)
		}
		return all
	}
	for _, m := range byName {
		add(true, 10, "Node %s exists", m.Name)
	}
	for _, name := range []string{value, n.Node} {
		add(r.csiNodes[name] != nil, 10, "CSINode %s exists", name)
	}
	add(p.lists.at.IsZero() || r.now.Sub(p.lists.at) > time.Minute+10*time.Second, 10, "Nodes were not listed")
	if snapshot := p.lists.snapshot; snapshot != nil {
		for _, m := range snapshot.nodesOf(value) {
			live := r.nodes[m.Name]
			add(live != nil && live.UID == m.UID, 10, "Node %s of the lists exists", m.Name)
		}
	}
	for _, m := range w.Nodes {
		c := w.CSINodes[m.Name]
		lacks := c != nil && m.Labels[testKey] == "" && slices.Contains(c.Spec.Drivers[0].TopologyKeys, testKey)
		add(lacks && m.DeletionTimestamp == nil, 9, "Node %s has no label", m.Name)
	}
	add(!slices.ContainsFunc(nodesWithDriver(w), func(m *corev1.Node) bool {
		return m.Status.Conditions[0].Status == corev1.ConditionTrue && m.DeletionTimestamp == nil
	}), 15, "no node is ready")
	add(n.Since.IsZero(), 12, "the record has no since")
	since := n.Since
	if p.known[value].After(since) {
		since = p.known[value]
	}
	add(!approved && r.now.Sub(since) < s.NodeMissingGrace-tolerance, 12, "it is missing for %v", r.now.Sub(since))
	last := records.Checked
	if n.Since.After(last) {
		last = n.Since
	}
	add(r.now.Sub(last) > s.ClockGap+tolerance, 13, "it was checked %v ago", r.now.Sub(last))
	return all
}

func nodesWithDriver(w world) (nodes []*corev1.Node) {
	for _, n := range w.Nodes {
		if w.CSINodes[n.Name] != nil {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// checkBreaker asserts the number of hosts that were lost, or cleaned up, within the window, whichever leader did that.
func (r *run) checkBreaker(records Records) {
	var names []string
	for value, h := range r.hosts {
		if !h.acted.IsZero() && r.now.Sub(h.acted) < r.settings.NodeCleanupWindow {
			names = append(names, value)
		}
	}
	for value, n := range records.Lost {
		if !n.Planned && r.now.Sub(n.Since) < r.settings.NodeCleanupWindow {
			names = append(names, value)
		}
	}
	names = sorted(names)
	limit := max(r.settings.NodeCleanupMinNodes, int(math.Floor(float64(hosts+1)*r.settings.NodeCleanupMaxFraction+1e-9)))
	if len(names) > limit {
		r.fail("promise 14: %v were lost or cleaned up within the window, at most %d may be", names, limit)
	}
}

// checkWrite asserts the promises about a change of the records by p, and learns from it.
func (r *run) checkWrite(p *actor, before, after Records, fresh bool) {
	if p.taken && before.Holder != p.holder {
		r.fail("promise 22: a process wrote the records of another")
	}
	for value := range before.Lost {
		if _, kept := after.Lost[value]; !kept {
			r.checkEnd(p, value, before.Lost[value], fresh)
		}
	}
	for value, a := range after.Lost {
		b, known := before.Lost[value]
		r.checkChange(p, value, b, known, a, before, fresh)
	}
}

// named reports whether an annotation approves a record.
func named(names []string, value string, n LostNode) bool {
	return slices.Contains(names, value) || n.Node != "" && slices.Contains(names, n.Node)
}

// checkEnd asserts that a record may end.
func (r *run) checkEnd(p *actor, value string, b LostNode, fresh bool) {
	r.seen["record ended"]++
	truth := r.truth(value)
	returned := p.lists.snapshot != nil && p.lists.snapshot.alive(value)
	left := ""
	for _, pv := range r.volumes {
		if slices.Contains(r.valuesOf(pv.Name, ""), value) {
			left = pv.Name
		}
	}
	switch {
	case !fresh:
		r.fail("promise 23: the record of %s ended without lists", value)
	case b.Unparsable:
		r.fail("the record of %s ended, which cannot be parsed", value)
	case !returned && (b.Held != "" || b.OptedOut) && left != "":
		r.fail("promise 24, 26: the record of %s ended, and volume %s is left: %+v", value, left, b)
	case returned && !truth.held.IsZero():
		r.seen["hold ended by a return"]++
	}
	truth.held, truth.approved, truth.approvedAll = time.Time{}, time.Time{}, false
}

// checkChange asserts that the record of value may change from b to a.
func (r *run) checkChange(p *actor, value string, b LostNode, known bool, a LostNode, before Records, fresh bool) {
	truth := r.truth(value)
	if b.Unparsable || a.Unparsable {
		r.seen["unparsable"]++
		if a.text != b.text {
			r.fail("the record of %s, which cannot be parsed, was changed", value)
		}
		return
	}
	returned := r.aliveAt[value].After(truth.held) || r.alive(value)
	agreed := named(approvedForAll(before.Approve), value, b)
	approves := named(before.Approve, value, b) || agreed
	switch {
	case a.Held != "":
		r.seen["held"]++
		if truth.held.IsZero() {
			truth.held = r.now
		}
	case b.Held != "" && approves && known:
		r.seen["hold ended by an approval"]++
	case b.Held != "" && returned:
		r.seen["hold ended by a return"]++
	case b.Held != "":
		r.fail("promise 24: the hold of %s ended: %+v, before %+v", value, a, b)
	}
	if a.Held == "" {
		truth.held = time.Time{}
	}
	if !a.Approved.IsZero() && (b.Approved.IsZero() || !a.Approved.Equal(b.Approved)) {
		if !approves || !known {
			r.fail("promise 24: %s was approved without an administrator", value)
		}
		truth.approved = r.now
	}
	if a.Approved.IsZero() {
		truth.approved, truth.approvedAll = time.Time{}, false
	}
	truth.approvedAll = truth.approvedAll || a.ApprovedAll && agreed
	if a.ApprovedAll && !truth.approvedAll && !b.ApprovedAll {
		r.fail("promise 2: everything of %s was approved without an administrator", value)
	}
	if a.OptedOut {
		r.seen["opted out"]++
	} else if b.OptedOut && !r.aliveAt[value].After(b.Since) && !r.alive(value) {
		r.fail("promise 26: the opt-out of %s ended: %+v, before %+v", value, a, b)
	}
	if !a.Since.IsZero() && !a.Since.Equal(b.Since) {
		if !fresh || p.lists.snapshot.nodesOf(value) != nil {
			r.fail("promise 23: since of %s was set without a list, or although a Node exists", value)
		}
		if a.Since.After(r.now) || r.now.Sub(a.Since) > tolerance {
			r.fail("promise 23: since of %s was set to %v, at %v", value, a.Since, r.now)
		}
	}
	last := before.Checked
	for _, at := range []time.Time{b.Since, b.Restarted} {
		if at.After(last) {
			last = at
		}
	}
	if known && fresh && r.now.Sub(last) > r.settings.ClockGap {
		r.seen["gap"]++
		truth.unwatched = r.now
		if a.Since.Equal(b.Since) && !b.Since.IsZero() && !a.returned() || !a.Approved.IsZero() {
			r.fail("promise 25: the grace or the approval of %s continued after a gap: %+v, before %+v", value, a, b)
		}
	}
	if b.Since.After(r.now) && a.Since.Equal(b.Since) && fresh && p.lists.snapshot.nodesOf(value) == nil && !p.stale(value) {
		r.fail("promise 25: since of %s stays in the future", value)
	}
}

// stale reports whether the cache has a Node of value that the lists of p lack.
func (p *actor) stale(value string) bool {
	return len(p.nodesOf(value)) > 0
}

// checkRelease asserts that a Node that is being deleted may lose our finalizer.
func (r *run) checkRelease(p *actor, w world, pl Plan, h HostPlan, node *corev1.Node) {
	s, value := r.settings, hostOf(node.Name, node.Labels, testKey)
	n := parseRecords(p.cm).Lost[value] // as this pass has written it
	if node.DeletionTimestamp == nil {
		r.fail("promise 27: Node %s was released, which is not being deleted", node.Name)
		return
	}
	if s.NodeFinalizerMode == FinalizerOff {
		r.fail("promise 27: Node %s was released in mode off", node.Name)
	}
	if s.SkipNodeFinalize {
		return
	}
	out := node.Annotations[testAnnotation] != "" && node.Annotations[testAnnotation] != enabled
	if out && !r.alive(value) && !(n.OptedOut && n.UID == node.UID) {
		r.fail("promise 26: Node %s was released, whose opt-out is not in its record: %+v", node.Name, n)
	}
	switch waited := r.now.Sub(node.DeletionTimestamp.Time); {
	case !s.Deletes() || n.OptedOut || w.KeyProblem != "":
		return
	case waited >= s.NodeFinalizerTimeout:
		r.seen["released by timeout"]++
		return
	case waited < s.NodeDeleteGrace-tolerance:
		r.fail("promise 27: Node %s was released %v after its deletion", node.Name, waited)
	}
	for _, name := range []string{"c0", "c1", "c2", "c3", "shared"} {
		claim, pv := p.claims[name], r.volumes["pv-"+name]
		local := pv != nil && slices.Contains(r.valuesOf(pv.Name, ""), value)
		if local && n.UID != node.UID {
			r.fail("promise 21: Node %s was released without a record: %+v", node.Name, n)
		}
		if !local || claim == nil || claim.DeletionTimestamp != nil || r.claims[name] == nil || r.claims[name].DeletionTimestamp != nil {
			continue
		}
		if failed, ok := p.tried[claim.UID]; ok && failed.Reason.Check == CheckForbidden {
			continue
		}
		violations := slices.DeleteFunc(r.violations(p, w, KindClaim, pv.Name, "", nil, false),
			func(v string) bool { return v[:2] == "21" })
		if len(violations) == 0 && n.Held == "" && !pl.Breaker.Open && r.cached(p, name) {
			r.fail("promise 27: Node %s was released before claim %s was deleted", node.Name, name)
		}
	}
}

// cached reports whether the caches of p have the current state of a claim and its volume.
func (r *run) cached(p *actor, claim string) bool {
	return p.claims[claim] == r.claims[claim] && p.volumes["pv-"+claim] == r.volumes["pv-"+claim] && p.users[claim] == r.users[claim] &&
		p.classObj == r.classObj && p.ns == r.ns
}

// checkProgress asserts that no Node waits for longer than the timeout, after a pass with caches that are up to date.
func (r *run) checkProgress(p *actor) {
	s := r.settings
	if s.NodeFinalizerMode == FinalizerOff || !r.leads(p) {
		return
	}
	for _, node := range r.nodes {
		out := node.Annotations[testAnnotation] != "" && node.Annotations[testAnnotation] != enabled
		if node.DeletionTimestamp == nil || !slices.Contains(node.Finalizers, testFinalizer) || out && !s.SkipNodeFinalize {
			continue
		}
		if r.now.Sub(node.DeletionTimestamp.Time) >= s.NodeFinalizerTimeout {
			r.fail("promise 27: Node %s still waits, %v after its deletion", node.Name, r.now.Sub(node.DeletionTimestamp.Time))
		}
	}
}

// approvedForAll returns the names that are approved also for what did not opt in.
func approvedForAll(approvals []string) (names []string) {
	for _, a := range approvals {
		if name, all := strings.CutSuffix(a, approveAll); all {
			names = append(names, name)
		}
	}
	return names
}
