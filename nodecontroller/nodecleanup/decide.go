// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// recordOf returns the record that a host must have now, and false if it must have none. A record
// that differs from the stored one is written only after a live read confirmed the state.
func (p Policy) recordOf(h host, c cluster) (LostNode, bool) {
	h.record.Value = h.value
	switch {
	case h.state == present: // the breaker counts its deletions until the window ends
		returned := LostNode{Value: h.value, Acted: h.record.Acted}
		return returned, h.recorded && !h.record.Planned && c.now.Before(returned.Acted.Add(p.NodeCleanupWindow))
	case h.record.Unparsable && h.state != deleting: // a person corrects it, unless its Node is being deleted
		return h.record, true
	}
	switch h.state {
	case unclear: // the host may exist
		switch {
		case !h.record.Since.IsZero():
			h.record = h.record.interrupted()
		case !h.recorded && h.last.optedOut && len(h.nodes) == 0 && h.leaves(): // the opt-out must outlive the process
			return LostNode{Value: h.value, Node: h.last.name, UID: h.last.uid, OptedOut: true}, true
		}
		return h.record, h.recorded
	case deleting:
		h.record = h.recordOfDeleting()
		h.record.OptedOut = optOut(p.annotation, h.nodes...) != ""
	case missing:
		h.record = h.recordOfMissing()
		if h.record.Since.IsZero() || h.record.Since.After(c.now) {
			h.record.Since = c.now.UTC().Truncate(time.Millisecond)
		}
	}
	if c.open && !h.record.exempt() && p.pending(h, c.now) {
		h.record.Held = HeldByBreaker
	}
	// An opt-out must outlive the process also if the volumes of the host are not known without a usable topology key.
	return h.record, h.recorded || h.leaves() || h.record.OptedOut && (h.state == deleting || c.keyProblem != "")
}

// interrupted returns the record of a loss that may have ended. A later absence has its full grace, and neither
// an approval nor a planned removal applies to it.
func (r LostNode) interrupted() LostNode {
	r.Since, r.Approved, r.ApprovedAll, r.Planned = time.Time{}, time.Time{}, false, false
	return r
}

// opens reports whether a record keeps the breaker open, because its host waits for an approval. A host that opted out
// does not wait, unless its record cannot be parsed.
func (r LostNode) opens() bool { return r.Held != "" && (!r.OptedOut || r.Unparsable) }

// exempt reports whether the breaker does not hold a loss, however many nodes are lost. It ends no hold.
func (r LostNode) exempt() bool { return r.Planned || !r.Approved.IsZero() }

// recordOfDeleting returns the record with the Node that is being deleted. If the record is of another Node, only its
// last deletion remains; a hold also remains if the Node of the record is not known.
func (h host) recordOfDeleting() LostNode {
	r, node := h.record, h.nodes[0]
	if r.UID != node.UID {
		next := LostNode{Value: r.Value, Acted: r.Acted}
		if r.UID == "" {
			next.Held = r.Held
		}
		r = next
	}
	r.Node, r.UID, r.Since = node.Name, node.UID, time.Time{}
	r.Planned = r.Planned || node.Spec.Unschedulable && h.drained
	return r
}

// recordOfMissing returns the record with the deleted Node that this process last saw. If that Node was deleted after
// the recorded loss, this is another loss: only the last deletion remains of the record.
func (h host) recordOfMissing() LostNode {
	r, node := h.record, h.last
	another := !h.recorded || r.returned() || r.UID != "" && r.Since.IsZero() || !r.Since.IsZero() && node.at.After(r.Since)
	switch {
	case node.name == "":
		return r
	case h.recorded && r.UID == node.uid: // it may have opted out last
		r.OptedOut = r.OptedOut || node.optedOut && !node.recorded
		return r
	case another:
		r = LostNode{Value: r.Value, Acted: r.Acted, OptedOut: r.OptedOut && r.Since.IsZero()}
	case r.UID != "": // the record is newer than what this process saw
		return r
	}
	r.Node, r.UID, r.OptedOut = node.name, node.uid, r.OptedOut || node.optedOut
	return r
}

// leaves reports whether anything of a host is left to clean up or to wait for.
func (h host) leaves() bool { return len(h.volumes) > 0 || h.resources }

// pending reports whether the clean-up of a host has something to delete, now or later, while the other hosts of its
// volumes are as they are. Only such hosts count for the breaker.
func (p Policy) pending(h host, now time.Time) bool {
	if !p.Deletes() || h.record.OptedOut {
		return false
	}
	if h.resources {
		return true
	}
	return slices.ContainsFunc(h.volumes, func(v volume) bool { return len(v.kept()) == 0 && p.nextStep(v, now).pending })
}

// hostAction is the next thing to do for a host.
type hostAction string

const (
	hostNothing   hostAction = "nothing"
	hostRecord    hostAction = "write the record"
	hostEnd       hostAction = "end the record"       // the Node exists, or nothing of the host is left
	hostCheckLost hostAction = "check all lost nodes" // which starts the grace again
	hostClean     hostAction = "delete"
	hostRelease   hostAction = "remove the finalizer"
)

// hostStep is the result of [Policy.decideHost].
type hostStep struct {
	action hostAction
	state  state
	next   time.Time // when time alone may change the decision; zero: never
	// reason and message are for an event on the Node whose finalizer is removed.
	reason, message string
}

// decideHost returns the next step for a host. cleaned means that this sync has deleted what it
// could. It has no side effects.
func (p Policy) decideHost(h host, c cluster, cleaned bool) hostStep {
	if p.NodeCleanup != ModeOff && (c.keyProblem == "" || h.state != missing || h.last.optedOut) {
		record, wanted := p.recordOf(h, c)
		switch {
		case h.recorded && !wanted:
			return hostStep{action: hostEnd}
		case wanted && (!h.recorded || record != h.record):
			return hostStep{action: hostRecord}
		}
	}
	switch {
	case h.state == missing:
		return p.decideMissing(h, c, cleaned)
	case h.state == present && h.recorded:
		return hostStep{action: hostNothing, next: h.record.Acted.Add(p.NodeCleanupWindow)}
	case h.recorded && h.hasOtherValue() && !h.leaves() && c.keyProblem == "" && c.now.After(h.record.Acted.Add(p.NodeCleanupWindow)):
		return hostStep{action: hostEnd}
	}
	return p.decideDeleting(h, c, cleaned)
}

// decideMissing is for a host without any Node.
func (p Policy) decideMissing(h host, c cluster, cleaned bool) hostStep {
	end := h.record.Acted.Add(p.NodeCleanupWindow)
	switch due := p.due(h); {
	case !h.recorded || p.NodeCleanup == ModeOff || !h.leaves() && c.keyProblem != "":
		return hostStep{action: hostNothing}
	case !h.leaves() && c.now.Before(end):
		return hostStep{action: hostNothing, next: end}
	case !h.leaves():
		return hostStep{action: hostEnd}
	case h.record.opens():
		return hostStep{action: hostNothing, state: stateHeld}
	case c.now.Before(due):
		return hostStep{action: hostNothing, state: stateSuspect, next: due}
	case cleaned || !p.Deletes():
		return hostStep{action: hostNothing}
	case p.unwatched(h.record, c.checked, c.now):
		return hostStep{action: hostCheckLost, state: stateSuspect}
	}
	return hostStep{action: hostClean}
}

// due returns the end of the grace of a missing host.
func (p Policy) due(h host) time.Time {
	if !h.record.Approved.IsZero() {
		return h.record.Approved
	}
	return h.record.Since.Add(p.NodeMissingGrace)
}

// step is the next step for a volume.
type step struct {
	action  action
	state   state
	check   check  // that prevents a deletion, or empty
	reason  string // constant
	message string
	pending bool      // something of the volume is to be deleted, now or later
	next    time.Time // when time alone may change the step; zero: never
}

// action is what a step does.
type action string

const (
	doNothing          action = "nothing"
	doSkip             action = "skip"    // the policy keeps the volume
	doReport           action = "blocked" // something else keeps the volume
	doDeleteClaim      action = "delete claim"
	doDeleteVolume     action = "delete volume"
	doRemoveFinalizers action = "remove finalizers"
)

// deletes reports whether a cannot be undone.
func (a action) deletes() bool {
	return a == doDeleteClaim || a == doDeleteVolume || a == doRemoveFinalizers
}

// keep returns the step for a volume that the policy keeps.
func keep(at state, ck check, reason, format string, args ...any) step {
	return step{action: doSkip, state: at, check: ck, reason: reason, message: fmt.Sprintf(format, args...)}
}

// nextStep returns the next step for a volume of a host that may be cleaned up: the claim is deleted
// first, then the volume, then its finalizers are removed. Whether the step may be done now is decided
// by [Policy.mayClean]. nextStep has no side effects.
func (p Policy) nextStep(v volume, now time.Time) step {
	pv, ref := v.pv, v.pv.Spec.ClaimRef
	switch {
	case v.unread != nil:
		return step{action: doNothing, state: stateSuspect, reason: "NotRead", pending: true}
	case v.refusal != "":
		return keep(stateSuspect, checkScope, "Scope", "%s", v.refusal)
	case ref != nil && !namesClaim(ref):
		return keep(stateClaim, checkPolicy, "NotBound", "claimRef %s/%s is no valid name. Correct it, or delete the volume", ref.Namespace,
			ref.Name)
	case ref != nil && v.claim != nil && (ref.UID == v.claim.UID || ref.UID == ""):
		return p.nextStepOfClaim(v)
	case p.NodeCleanup != ModeVolumes:
		return step{action: doNothing, state: stateReleased, reason: "VolumeIsKept"}
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return keep(stateReleased, checkPolicy, "Retain", "its reclaim policy is %s", pv.Spec.PersistentVolumeReclaimPolicy)
	case !p.provisioned(pv):
		return keep(stateReleased, checkPolicy, "Static", "the driver has not provisioned it. Delete it if its data is not needed")
	case pv.Status.Phase == corev1.VolumeFailed:
		return step{action: doReport, state: stateReleased, check: checkPolicy, reason: "Failed",
			message: "the volume is in phase Failed. Delete it if its data is not needed"}
	case pv.Status.Phase != corev1.VolumeReleased && pv.Status.Phase != corev1.VolumeAvailable:
		return step{action: doNothing, state: stateDraining, reason: "NotReleased", pending: true} // kube-controller-manager releases it
	}
	return p.nextStepWithoutClaim(v, now)
}

// nextStepOfClaim is for a volume whose claim exists.
func (p Policy) nextStepOfClaim(v volume) step {
	pv, claim, key, reclaim := v.pv, v.claim, kube.Key(v.claim), v.pv.Spec.PersistentVolumeReclaimPolicy
	deletable := reclaim == corev1.PersistentVolumeReclaimDelete ||
		reclaim == corev1.PersistentVolumeReclaimRetain && p.NodeCleanupRetain == RetainClaim
	switch {
	case pv.Spec.ClaimRef.UID == "" || claim.Spec.VolumeName != pv.Name:
		return keep(stateClaim, checkPolicy, "NotBound", "claim %s and the volume are not bound to each other", key)
	case claim.Status.Phase == corev1.ClaimLost:
		return keep(stateClaim, checkPolicy, "ClaimLost", "claim %s is in phase Lost. Delete it if its data is not needed", key)
	case claim.DeletionTimestamp != nil:
		return step{action: doNothing, state: stateDraining, reason: "ClaimIsBeingDeleted",
			pending: p.NodeCleanup == ModeVolumes && p.removes(pv)}
	case !deletable:
		return keep(stateClaim, checkPolicy, "Retain", "its reclaim policy is %s", reclaim)
	}
	return step{action: doDeleteClaim, state: stateClaim, reason: "NodeDeleted", pending: true}
}

// provisioned reports whether the driver has provisioned pv.
func (p Policy) provisioned(pv *corev1.PersistentVolume) bool {
	return pv.Annotations[storagehelpers.AnnDynamicallyProvisioned] == p.driver
}

// removes reports whether pv itself is deleted after its claim.
func (p Policy) removes(pv *corev1.PersistentVolume) bool {
	return pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete && p.provisioned(pv)
}

// nextStepWithoutClaim is for a volume without a claim. The driver has --pv-release-grace to delete it; then it is
// deleted without the driver.
func (p Policy) nextStepWithoutClaim(v volume, now time.Time) step {
	pv, due := v.pv, v.releasedAt().Add(p.PVReleaseGrace)
	var removable, foreign []string
	for _, f := range pv.Finalizers {
		if slices.Contains(p.removable, f) {
			removable = append(removable, f)
		} else if f != "kubernetes.io/pv-protection" {
			foreign = append(foreign, f)
		}
	}
	switch {
	case len(v.attachments) > 0:
		return step{action: doReport, state: stateReleased, check: checkAttached, reason: "Attached", pending: true,
			message: "VolumeAttachment " + strings.Join(v.attachments, ", ") + " names the volume. It must be detached first"}
	case now.Before(due) && !v.sent: // DeleteVolume may succeed
		return step{action: doNothing, state: stateReleased, reason: "ReleaseGrace", pending: true, next: due}
	case pv.DeletionTimestamp == nil:
		return step{action: doDeleteVolume, state: stateForce, reason: "NotReclaimed", pending: true}
	case len(removable) > 0:
		return step{action: doRemoveFinalizers, state: stateForce, reason: "NotReclaimed", pending: true}
	case len(foreign) > 0:
		return step{action: doReport, state: stateVerify, check: checkFinalizer, reason: "ForeignFinalizer",
			message: "finalizer " + strings.Join(foreign, ", ") + " keeps the volume. The component that added it must remove it"}
	}
	return step{action: doNothing, state: stateVerify, reason: "Deleted"}
}
