package nodecontroller

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// action is the one next thing to do for a volume.
type action int

const (
	doNothing     action = iota
	doForget             // the node is back: remove the notes about its absence
	doChange             // write notes on the volume
	doNotice             // remember in memory, and tell, that the node is missing
	doSkip               // tell why nothing is done
	doBlocked            // tell what stands in the way
	doDeleteClaim        // from here on: what cannot be undone
	doDeleteVolume
	doRemoveFinalizers
)

// destroys tells whether a cannot be undone.
func (a action) destroys() bool { return a >= doDeleteClaim }

// state is where a volume is on its way out.
type state string

const (
	stateHealthy     state = "healthy"
	stateTerminating state = "terminating"
	stateSuspect     state = "suspect"
	stateHeld        state = "held"
	stateClaim       state = "claim"
	stateDraining    state = "draining"
	stateReleased    state = "released"
	stateForce       state = "force"
	stateVerify      state = "verify"
)

// step is what decide has chosen, and with what.
type step struct {
	action  action
	state   state
	reason  string
	gate    gate               // that keeps the volume from its clean-up; "" for none
	message string             // of doSkip and doBlocked
	change  kube.MetadataPatch // of doForget, doChange and doRemoveFinalizers
	next    time.Time          // when time alone may change the decision; zero: never
}

// String is why nothing is done, for events.
func (st step) String() string {
	if st.message == "" {
		return st.reason
	}
	return st.reason + ": " + st.message
}

// decide names the one next step for a volume. It has no side effects, and is total.
//
//	healthy ─► suspect ─► claim ─► draining ─► released ─► force ─► verify
//	   ▲          │  └──► held (until approved)
//	   └──────────┴── the node is back
//
// A claim goes before its volume: the other way round it would be lost for good.
func (p policy) decide(s snapshot) step {
	if s.volume == nil {
		return step{reason: "Gone"}
	}
	switch m := s.member; m.place {
	case placeFenced:
		if due := m.fencedSince.Add(p.fencedGrace); p.outOfService && (!s.now.Before(due) || p.command) {
			return p.decideLost(s)
		} else if p.outOfService {
			st := p.decideHealthy(s)
			st.next = due
			return st
		}
		return p.decideHealthy(s)
	case placeTerminating:
		return p.decideTerminating(s)
	case placeUnclear:
		return p.outdated(s, step{state: stateSuspect, reason: "MayStillExist", gate: gateAbsence})
	case placeOrphan:
		return p.decideLost(s)
	case placeElsewhere:
		// Nobody knows now where it is, which is not the return of its node: what is
		// written on it has to hold when the key of the driver is known again.
		return step{state: stateHealthy, reason: "NotLocal"}
	}
	return p.decideHealthy(s)
}

func (p policy) decideHealthy(s snapshot) step {
	change := kube.MetadataPatch{RemoveAnnotations: p.ann.bookkeeping()}
	if s.member.recorded { // without its name nobody would know that this is its node
		change.RemoveAnnotations = append(p.ann.clock(), p.ann.hold)
	}
	switch {
	case len(s.member.unwritten) > 0 && p.writes() && !p.command: // nor after a restart
		names := mergeNames(p.ann.lostNodes(s.volume), s.member.unwritten)
		change.SetAnnotations = map[string]string{p.ann.lostNode: strings.Join(names, nodeListMark)}
		return step{action: doChange, state: stateHealthy, reason: "NodeHasOtherNames", change: change}
	case !change.AppliedTo(s.volume) && p.writes() && !p.command:
		return step{action: doForget, state: stateHealthy, reason: "NodeIsBack", change: change}
	case !s.noticed.IsZero():
		return step{action: doForget, state: stateHealthy, reason: "NodeIsBack"}
	}
	return step{state: stateHealthy, reason: "NodeExists"}
}

// decideTerminating only puts the notes right; what is done is the node's to decide.
func (p policy) decideTerminating(s snapshot) step {
	return p.outdated(s, step{state: stateTerminating, reason: "NodeIsTerminating"})
}

// outdated is st, or the removal of the notes that do not hold while something is there
// that may be the node.
func (p policy) outdated(s snapshot, st step) step {
	if !p.writes() || p.command {
		return st
	}
	remove := p.ann.clock() // of an earlier absence: the next one has its full grace
	if s.approved {
		remove = append(remove, p.ann.hold)
	}
	if change := (kube.MetadataPatch{RemoveAnnotations: remove}); !change.AppliedTo(s.volume) {
		st.action, st.change, st.reason, st.gate = doChange, change, "OutdatedNotes", ""
	}
	return st
}

// decideLost is for a volume whose node is gone, or as good as that.
func (p policy) decideLost(s snapshot) step {
	g := p.goal(s)
	if !p.orphanPath && !p.command && g.due() {
		g = step{state: g.state, reason: "PathOff", gate: gateMode}
	}
	if !p.writes() || !g.due() {
		return p.decideReport(s, g)
	}
	if p.command {
		return g
	}
	since, clocked := p.clock(s)
	if change := p.notes(s); !change.AppliedTo(s.volume) {
		return step{action: doChange, state: stateSuspect, reason: "NodeIsMissing", change: change}
	}
	if (s.open || s.volume.Annotations[p.ann.hold] != "") && !s.approved {
		return step{state: stateHeld, reason: "TooManyNodesLost", gate: gateBreaker}
	}
	if s.member.place == placeOrphan && !clocked && !s.approved { // this clock runs behind that of the API server
		return step{state: stateSuspect, reason: "Clock", gate: gateGrace, next: s.now.Add(later)}
	}
	keep := p.lastSeen(s, since).Add(p.clockGap / 2)
	if clocked && !s.approved && !s.tried && !s.now.Before(keep) { // so that it counts for whoever leads next
		change := kube.MetadataPatch{SetAnnotations: map[string]string{p.ann.seenMissing: s.now.UTC().Format(time.RFC3339)}}
		return step{action: doChange, state: stateSuspect, reason: "ClockRuns", gate: gateGrace, change: change}
	}
	if due := since.Add(p.missingGrace); clocked && !s.approved && s.now.Before(due) {
		return step{state: stateSuspect, reason: "Grace", gate: gateGrace, next: earliest(due, keep)}
	}
	if s.tried && g.action.destroys() {
		return step{state: g.state, reason: "Tried"}
	}
	return g
}

// notes is what has to stand on the volume of a missing node before anything else is done.
func (p policy) notes(s snapshot) kube.MetadataPatch {
	var change kube.MetadataPatch
	set := map[string]string{}
	if s.member.place == placeOrphan {
		// What is held has no use for a clock before its approval, which needs none.
		waits := s.volume.Annotations[p.ann.missing] != "" && s.volume.Annotations[p.ann.hold] != "" && !s.approved
		if _, ok := p.clock(s); !ok && !waits {
			set[p.ann.missing] = s.now.UTC().Format(time.RFC3339)
			change.RemoveAnnotations = []string{p.ann.seenMissing}
		}
		if s.volume.Annotations[p.ann.lostNode] == "" {
			set[p.ann.lostNode] = strings.Join(s.nodes, nodeListMark)
		}
		if t := s.tombstone; t != nil {
			if s.volume.Annotations[p.ann.lostNodeUID] == "" {
				set[p.ann.lostNodeUID] = t.uid
			}
			if s.volume.Annotations[p.ann.lostMachine] == "" && t.machine != "" {
				set[p.ann.lostMachine] = t.machine
			}
		}
	}
	switch {
	case s.approved:
		change.RemoveAnnotations = append(change.RemoveAnnotations, p.ann.hold)
	case s.open:
		set[p.ann.hold] = heldByBreak
	}
	change.SetAnnotations = set
	return change
}

// clock is since when the node of a volume is missing, as it is written down. What is
// unreadable or in the future counts as nothing, and so does what is older than the volume
// or than the last sight of its node, and what nobody has kept up for long: the node may
// have been back meanwhile, while nobody cleaned up or might write. A fenced node has waited
// already.
func (p policy) clock(s snapshot) (time.Time, bool) {
	if s.member.place != placeOrphan {
		return time.Time{}, false
	}
	since, err := time.Parse(time.RFC3339, s.volume.Annotations[p.ann.missing])
	old := since.Before(s.volume.CreationTimestamp.Time) || since.Before(s.present.Truncate(time.Second))
	kept := s.kept != "" && s.kept == s.volume.Annotations[p.ann.missing] || !s.now.After(p.lastSeen(s, since).Add(p.clockGap))
	return since, err == nil && !since.After(s.now) && !old && kept
}

// lastSeen is when a node that is missing since some time was last seen to be so, as it is
// written down.
func (p policy) lastSeen(s snapshot, since time.Time) time.Time {
	seen, err := time.Parse(time.RFC3339, s.volume.Annotations[p.ann.seenMissing])
	if err != nil || seen.Before(since) || seen.After(s.now) {
		return since
	}
	return seen
}

// decideReport is for what may not be written to: because of the mode, because its owner
// has not agreed, or because there is nothing to do for it.
func (p policy) decideReport(s snapshot, g step) step {
	if p.mode == CleanupOff {
		return step{state: g.state, reason: "Off"}
	}
	if p.command {
		return g
	}
	// Opted out during its grace, which does not count any more. A hold ends with the
	// return of the node or an approval alone: the opt-out may not last.
	stale := kube.MetadataPatch{RemoveAnnotations: p.ann.clock()}
	if t := s.tombstone; t != nil && t.optedOut && p.writes() {
		stale.SetAnnotations = map[string]string{p.ann.cleanup: disabled}
	}
	if p.writes() && g.gate == gateScope && !stale.AppliedTo(s.volume) {
		return step{action: doChange, state: stateSuspect, reason: "OptedOut", change: stale}
	}
	// Nothing is to be done for it any more, and the approval of that ends its hold too.
	if free := (kube.MetadataPatch{RemoveAnnotations: []string{p.ann.hold}}); p.writes() && s.approved && !free.AppliedTo(s.volume) {
		return step{action: doChange, state: g.state, reason: "Approved", change: free}
	}
	noticed, written := p.clock(s)
	if !written {
		noticed = s.noticed
	}
	if noticed.IsZero() {
		return step{action: doNotice, state: g.state, reason: "NodeIsMissing", next: s.now.Add(p.missingGrace)}
	}
	if due := noticed.Add(p.missingGrace); s.now.Before(due) {
		return step{state: g.state, reason: "Grace", gate: g.gate, next: due}
	}
	if !p.writes() {
		return step{state: g.state, reason: "ReportOnly"}
	}
	return g
}

// due tells whether st is a step towards the end of a claim or volume, or the wait for
// one, rather than a reason why there will be none.
func (st step) due() bool {
	return st.action.destroys() || st.action == doBlocked && st.gate != gatePolicy || st.reason == reasonWaiting
}

// pending tells whether st counts as something still to be done for its node.
func (st step) pending() bool { return st.due() && st.state != stateVerify }

const reasonWaiting = "Waiting"

// goal is the next step for a volume as if its node were known to be gone for good, and
// had been long enough.
func (p policy) goal(s snapshot) step {
	pv := s.volume
	if why := p.outOfScope(s.wishes); why != "" {
		return step{action: doSkip, state: stateSuspect, reason: "Scope", gate: gateScope, message: why}
	}
	if ref := pv.Spec.ClaimRef; ref != nil && !namesClaim(ref) {
		return step{action: doSkip, state: stateClaim, reason: "NotBound", gate: gatePolicy,
			message: fmt.Sprintf("no claim can be called %s/%s, as its claimRef says; put that right, or delete the volume", ref.Namespace, ref.Name)}
	}
	if ref, claim := pv.Spec.ClaimRef, s.claim; ref != nil && claim != nil && (ref.UID == claim.UID || ref.UID == "") {
		return p.goalOfClaim(s)
	}
	switch {
	case p.mode != CleanupVolumes:
		return step{state: stateReleased, reason: "VolumeIsLeft"}
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return step{action: doSkip, state: stateReleased, reason: "Retain", gate: gatePolicy, message: "its reclaim policy is " + string(pv.Spec.PersistentVolumeReclaimPolicy)}
	case pv.Annotations[storagehelpers.AnnDynamicallyProvisioned] != p.driver && (!p.static || pv.Status.Phase == corev1.VolumeAvailable):
		return step{action: doSkip, state: stateReleased, reason: "Static", gate: gatePolicy, message: "the driver has not provisioned it; --node-cleanup-static includes such volumes"}
	case pv.Status.Phase == corev1.VolumeFailed: // which nobody but a person changes
		return step{action: doBlocked, state: stateReleased, reason: "Failed", gate: gatePolicy,
			message: "the volume is in phase Failed, and only Released and Available ones are removed: delete it when its data is not needed"}
	case pv.Status.Phase != corev1.VolumeReleased && pv.Status.Phase != corev1.VolumeAvailable:
		return step{state: stateDraining, reason: reasonWaiting} // the volume controller of Kubernetes will release it
	}
	return p.goalOfReleased(s)
}

// goalOfClaim is the goal for a volume whose claim exists.
func (p policy) goalOfClaim(s snapshot) step {
	pv, claim := s.volume, s.claim
	switch {
	case pv.Spec.ClaimRef.UID == "" || claim.Spec.VolumeName != pv.Name:
		return step{action: doSkip, state: stateClaim, reason: "NotBound", gate: gatePolicy, message: fmt.Sprintf("claim %s and the volume do not agree that they are bound", kube.Key(claim))}
	case claim.Status.Phase == corev1.ClaimLost:
		return step{action: doSkip, state: stateClaim, reason: "ClaimLost", gate: gatePolicy, message: fmt.Sprintf("claim %s is Lost: delete it when its data is not needed", kube.Key(claim))}
	case claim.DeletionTimestamp != nil && p.mode == CleanupVolumes && p.removes(pv):
		return step{state: stateDraining, reason: reasonWaiting}
	case claim.DeletionTimestamp != nil:
		return step{state: stateDraining, reason: "ClaimIsGoing"}
	case pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete,
		pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain && p.retain == RetainClaim:
		return step{action: doDeleteClaim, state: stateClaim, reason: "NodeIsGone"}
	}
	return step{action: doSkip, state: stateClaim, reason: "Retain", gate: gatePolicy, message: "its reclaim policy is " + string(pv.Spec.PersistentVolumeReclaimPolicy)}
}

// removes tells whether pv itself is one that may be removed once it is released.
func (p policy) removes(pv *corev1.PersistentVolume) bool {
	return pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete && (pv.Annotations[storagehelpers.AnnDynamicallyProvisioned] == p.driver || p.static)
}

// goalOfReleased is the goal for a volume that nobody claims any more and that the driver,
// whose node is gone, cannot delete.
func (p policy) goalOfReleased(s snapshot) step {
	pv := s.volume
	since := pv.CreationTimestamp.Time
	if t := pv.Status.LastPhaseTransitionTime; t != nil {
		since = t.Time
	} else if missing, ok := p.clock(s); ok && missing.After(since) {
		since = missing // the API server is one that does not note when a volume was released
	}
	if pv.DeletionTimestamp != nil {
		since = pv.DeletionTimestamp.Time
	}
	due := since.Add(p.releaseGrace)
	switch {
	case len(s.attachments) > 0:
		return step{action: doBlocked, state: stateReleased, reason: "Attached", gate: gateAttached,
			message: fmt.Sprintf("VolumeAttachment %s still names the volume: it has to be detached first", strings.Join(s.attachments, ", "))}
	case s.now.Before(due) && !s.forced && !p.command:
		return step{state: stateReleased, reason: reasonWaiting, next: due}
	case pv.DeletionTimestamp == nil:
		return step{action: doDeleteVolume, state: stateForce, reason: "NotReclaimed"}
	}
	change := kube.MetadataPatch{RemoveFinalizers: p.removable}
	if !change.AppliedTo(pv) {
		return step{action: doRemoveFinalizers, state: stateForce, reason: "NotReclaimed", change: change}
	}
	foreign := slices.DeleteFunc(slices.Clone(pv.Finalizers), func(f string) bool { return f == pvProtection })
	if len(foreign) > 0 {
		return step{action: doBlocked, state: stateVerify, reason: "ForeignFinalizer", gate: gateFinalizer,
			message: fmt.Sprintf("finalizer %s keeps the volume: whoever set it has to remove it", strings.Join(foreign, ", "))}
	}
	return step{state: stateVerify, reason: "Deleted"}
}

// pvProtection is left to Kubernetes, which removes it once the volume is not bound.
const pvProtection = "kubernetes.io/pv-protection"

// String is the name of a in the log.
func (a action) String() string {
	return [...]string{
		"nothing", "forget", "change", "notice", "skip", "blocked", "delete claim", "delete volume", "remove finalizers",
	}[a]
}
