// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// tolerance is for times that the API rounds to seconds.
const tolerance = time.Second

// situations are what the histories must reach, so that the promises are tested.
var situations = []string{
	"claim deleted", "volume deleted", "deleted by the finalizer path", "deleted after an approval", "deleted after the grace",
	"held", "hold ended by an approval", "hold ended by a return", "opted out", "changed before the deletion", "deposed",
	"records deleted",
}

func (r *run) truth(host string) *truth {
	h := r.hosts[host]
	if h == nil {
		h = &truth{}
		r.hosts[host] = h
	}
	return h
}

// deletesClaim checks a deletion that the API server is about to accept.
func (r *run) deletesClaim(claim *corev1.PersistentVolumeClaim) {
	pv := r.w.volumes[claim.Spec.VolumeName]
	switch {
	case pv == nil || pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID:
		r.fail("claim %s (%s) was deleted, which is not bound to its volume", claim.Name, claim.UID)
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		r.fail("claim %s of a volume that is to be retained was deleted", claim.Name)
	default:
		r.seen["claim deleted"]++
		r.checkDeletion("claim "+claim.Name, pv, claim)
	}
}

// deletesVolume checks a deletion, or a removal of finalizers.
func (r *run) deletesVolume(pv *corev1.PersistentVolume) {
	claim := r.w.claims[pv.Spec.ClaimRef.Name]
	switch {
	case r.settings.NodeCleanup != ModeVolumes:
		r.fail("volume %s was deleted in mode %s", pv.Name, r.settings.NodeCleanup)
	case claim != nil && claim.UID == pv.Spec.ClaimRef.UID:
		r.fail("volume %s was deleted before its claim", pv.Name)
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		r.fail("volume %s was deleted, which is to be retained", pv.Name)
	case time.Since(pv.Status.LastPhaseTransitionTime.Time) < r.settings.PVReleaseGrace-tolerance:
		r.fail("volume %s was deleted %v after its release", pv.Name, time.Since(pv.Status.LastPhaseTransitionTime.Time))
	default:
		r.seen["volume deleted"]++
		r.checkDeletion("volume "+pv.Name, pv, nil)
	}
}

// checkDeletion checks what holds for all deletions. claim may be nil.
func (r *run) checkDeletion(what string, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
	if !r.settings.Deletes() {
		r.fail("%s was deleted in mode %s", what, r.settings.NodeCleanup)
	}
	if r.holder != r.actor.records.holder {
		r.fail("%s was deleted by a process that another one has replaced", what)
	}
	r.checkConsent(what, pv, claim)
	hosts, _ := localValues(pv, worldDriver, worldKey)
	for _, host := range hosts {
		r.checkHost(what, host)
	}
	if pod := r.w.pods[pv.Spec.ClaimRef.Name]; claim != nil && pod != nil && r.w.nodes[pod.Spec.NodeName] != nil {
		r.fail("%s was deleted, which a pod uses on node %s", what, pod.Spec.NodeName)
	}
	r.checkBreaker(what)
}

func (r *run) checkConsent(what string, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
	annotation := r.leader.c.policy.annotation
	optedIn := r.settings.NodeCleanupScope == ScopeAll
	if pv.Annotations[annotation] == disabled || claim != nil && claim.Annotations[annotation] == disabled {
		r.fail("%s was deleted, which has opted out", what)
	}
	if optedIn = optedIn || claim != nil && claim.Annotations[annotation] == enabled; !optedIn {
		r.fail("%s was deleted, which has not opted in", what)
	}
}

// checkHost checks that one host of a deleted object may be cleaned up.
func (r *run) checkHost(what, host string) {
	h, stored, now := r.truth(host), r.stored[host], time.Now()
	if stored.Acted.IsZero() {
		r.fail("%s was deleted before its host %s had a record of that: %+v", what, host, stored)
	}
	if stored.OptedOut || r.acting.optedOut[host] {
		r.fail("%s was deleted although Node %s had opted out", what, host)
	}
	if h.held {
		r.fail("%s was deleted although %s was held", what, host)
	}
	if n := r.w.nodes[stored.Node]; n != nil && n.DeletionTimestamp == nil {
		r.fail("%s was deleted although Node %s of the record exists", what, n.Name)
	}
	approved := !stored.Approved.IsZero() && !h.approved.IsZero() && !r.acting.alive[host].After(h.approved)
	nodes := r.w.nodesOf(host)
	switch {
	case len(nodes) > 0:
		r.seen["deleted by the finalizer path"]++
		for _, n := range nodes {
			if n.DeletionTimestamp == nil || !slices.Contains(n.Finalizers, r.settings.NodeFinalizer) {
				r.fail("%s was deleted although Node %s exists", what, n.Name)
			} else if now.Sub(n.DeletionTimestamp.Time) < r.settings.NodeDeleteGrace-tolerance {
				r.fail("%s was deleted %v after the deletion of Node %s", what, now.Sub(n.DeletionTimestamp.Time), n.Name)
			} else if n.Annotations[r.leader.c.policy.annotation] == disabled {
				r.fail("%s was deleted although Node %s has opted out", what, n.Name)
			}
		}
	case now.Sub(r.checked) > r.settings.ClockGap && now.Sub(stored.Since) > r.settings.ClockGap:
		r.fail("%s was deleted %v after the last check of %s", what, now.Sub(r.checked), host)
	case r.w.csiNodes[host] != nil:
		r.fail("%s was deleted although CSINode %s exists", what, host)
	case !approved:
		r.seen["deleted after the grace"]++
		blind := r.blind
		if blind.Sub(stored.Since) <= r.settings.ClockGap { // the record was written meanwhile
			blind = time.Time{}
		}
		for reason, since := range map[string]time.Time{
			"its Node was known to exist": r.acting.known[host], "the record": stored.Since, "a time without a check": blind,
		} {
			if now.Sub(since) < r.settings.NodeMissingGrace-tolerance {
				r.fail("%s was deleted %v after %s (host %s)", what, now.Sub(since), reason, host)
			}
		}
		fallthrough
	default:
		if keep := r.w.nodes["keep"]; !isReady(keep) && !r.anyReady() {
			r.fail("%s was deleted while no node is ready", what)
		}
	}
	switch {
	case approved:
		r.seen["deleted after an approval"]++
	case stored.Planned:
		r.seen["planned"]++
	default:
		h.acted = now
	}
}

// anyReady reports whether a driver node is ready.
func (r *run) anyReady() bool {
	for name, n := range r.w.nodes {
		if isReady(n) && n.DeletionTimestamp == nil && r.w.csiNodes[name] != nil {
			return true
		}
	}
	return false
}

// alive reports whether the API has a Node of a host that is not being deleted.
func (r *run) alive(host string) bool {
	return slices.ContainsFunc(r.w.nodesOf(host), func(n *corev1.Node) bool { return n.DeletionTimestamp == nil })
}

// checkBreaker checks the number of hosts that were cleaned up within the window, whichever leader did.
func (r *run) checkBreaker(what string) {
	var acted []string
	for host, h := range r.hosts {
		if !h.acted.IsZero() && time.Since(h.acted) < r.settings.NodeCleanupWindow {
			acted = append(acted, host)
		}
	}
	total := worldHosts + 1
	if r.setup&128 != 0 {
		total += 3
	}
	limit := max(r.settings.NodeCleanupMinNodes, int(math.Floor(float64(total)*r.settings.NodeCleanupMaxFraction+1e-9)))
	if len(acted) > limit {
		slices.Sort(acted)
		r.fail("%s was deleted: that makes %d lost nodes (%v) within the window, and %d are the limit", what, len(acted), acted, limit)
	}
}

// releases checks that a Node may lose our finalizer.
func (r *run) releases(node *corev1.Node) {
	host := hostOf(node, worldKey)
	if node.DeletionTimestamp == nil || len(r.acting.c.index.volumes.with(host)) == 0 {
		return
	}
	if r.alive(host) {
		return // another Node has the volumes
	}
	stored, recorded := r.stored[host]
	if node.Annotations[r.leader.c.policy.annotation] == disabled && !stored.OptedOut {
		r.fail("Node %s was released, whose opt-out is not in its record: %+v", node.Name, stored)
	}
	timeout := time.Since(node.DeletionTimestamp.Time) >= r.settings.NodeFinalizerTimeout
	if (!recorded || stored.UID != "" && stored.UID != node.UID) && !timeout {
		r.fail("Node %s (%s) was released without a record: %+v", node.Name, node.UID, stored)
	}
}

// stores checks a change of the records by a process.
func (r *run) stores(cm *corev1.ConfigMap) {
	if before := r.w.stored; before != nil && r.actor == r.deposed && before.Annotations[AnnotationHolder] == r.term.records.holder {
		r.fail("a process wrote the records that its successor has taken over")
	}
	r.holder = cm.Annotations[AnnotationHolder]
	if r.holder != r.actor.records.holder {
		r.fail("a process stored the records of another holder")
	}
	after := map[string]LostNode{}
	if r.edited != "" && r.w.stored != nil {
		for _, n := range ParseLostNodes(r.w.stored) {
			if r.edited == n.Value {
				r.truth(n.Value).since = n.Since // by an administrator
			}
		}
	}
	for _, n := range ParseLostNodes(cm) {
		after[n.Value] = n
		r.checkRecord(n.Value, r.stored[n.Value], n)
	}
	for host := range r.stored {
		if _, kept := after[host]; !kept {
			r.checkEnd(host)
		}
	}
	r.stored = after
}

// checkRecord checks the change of one record.
func (r *run) checkRecord(host string, before, after LostNode) {
	h, now := r.truth(host), time.Now()
	if before.UID != "" && after.UID != before.UID && r.removedAfter(after.UID, before.Since) { // another loss
		*h = truth{approvals: h.approvals, acted: h.acted}
	}
	if !after.Approved.IsZero() && !after.Approved.Equal(before.Approved) && !after.Approved.Equal(h.stored) {
		if h.approvals == 0 {
			r.fail("the clean-up of %s was approved without an administrator", host)
		}
		if h.held {
			r.seen["hold ended by an approval"]++
		}
		h.approvals, h.approved, h.stored, h.held = 0, now, after.Approved, false
	}
	if after.OptedOut {
		r.seen["opted out"]++
	}
	if after.Held != "" {
		r.seen["held"]++
		h.held = true
	} else if h.held && r.alive(host) { // it has returned
		h.held = false
	} else if h.held {
		r.fail("the hold of %s was released: %+v, before %+v", host, after, before)
	}
	if set := !after.Since.IsZero() && !after.Since.Equal(before.Since) && !after.Since.Equal(h.since); set &&
		(now.Sub(after.Since) > tolerance || after.Since.After(now)) {
		r.fail("the clock of %s was set to %v, at %v", host, after.Since, now)
	}
	h.since = after.Since
}

// removedAfter reports whether a Node was removed from the API after a time.
func (r *run) removedAfter(uid types.UID, at time.Time) bool {
	for i := len(r.w.log) - 1; i >= 0; i-- {
		if e := r.w.log[i]; e.deleted != nil && e.deleted.UID == uid {
			return e.at.After(at)
		}
	}
	return uid != "" // it exists
}

// checkEnd checks the end of a record.
func (r *run) checkEnd(host string) {
	exists := r.alive(host)
	if n := r.w.nodes[r.stored[host].Node]; n != nil && n.DeletionTimestamp == nil {
		exists = true
	}
	if h := r.truth(host); h.held && !exists && len(r.acting.c.index.volumes.with(host)) > 0 {
		r.fail("the record of %s ended, which was held and does not exist: %+v", host, r.stored[host])
	} else {
		if h.held {
			r.seen["hold ended by a return"]++
		}
		*h = truth{approvals: h.approvals, acted: h.acted}
	}
}
