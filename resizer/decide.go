// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/migration"
)

// expansionMode is how the driver expands volumes.
type expansionMode int

const (
	expandsNone       expansionMode = iota
	expandsController               // with ControllerExpandVolume, and on the node if the driver requires it
	expandsNode                     // on the node only
)

// driver holds the name of the driver, its capabilities and the settings that decisions depend on.
type driver struct {
	Config
	name                  string
	inTree                string // plugin that the driver replaced, or ""
	expansion             expansionMode
	modifies              bool // MODIFY_VOLUME and the feature gate
	publishes             bool // PUBLISH_UNPUBLISH_VOLUME
	singleNodeMultiWriter bool // SINGLE_NODE_MULTI_WRITER
	inUse                 inUsePolicy
}

// inUsePolicy is when the expansion of a volume in use waits.
type inUsePolicy int

const (
	inUseNeverWaits inUsePolicy = iota
	inUseAfterError             // after FailedPrecondition
	inUseAlways                 // the driver expands offline only
)

// action names the next step of an operation.
type action int

const (
	doNothing       action = iota
	doWait                 // for an event, or until a time
	doWaitUnused           // for the end of the use of the volume
	doFail                 // send the event of an error and back off
	doReadClaim            // read the claim from the API server
	doReadVolume           // read the PersistentVolume from the API server
	doReadSecret           // read the secret of the call
	doReadClass            // read a VolumeAttributesClass
	doWatchUsers           // watch what may use the volume
	doScheduleRetry        // choose when to retry an infeasible operation of an earlier process
	doIntend               // write to the claim what the driver will be called for
	doExpand               // ControllerExpandVolume
	doModify               // ControllerModifyVolume
	doSaveVolume           // write a result to the PersistentVolume
	doSaveClaim            // write a result to the claim
	doSaveError            // write an error to the claim
	doDiscard              // forget a response that does not have to be written
	doRemoveRecord         // remove the size before the expansion from the PersistentVolume
	doPend                 // record that a modification waits for its class
	doAbandon              // give up an indeterminate call: its class does not exist any more, or the API shows its result
	doCancel               // remove the condition of a modification that is not requested any more
)

// String returns the value of "action" in logs and the name of the step in traces.
func (a action) String() string {
	return [...]string{
		"nothing", "wait", "wait until unused", "fail", "read claim", "read volume", "read secret", "read class", "watch users",
		"schedule retry",
		"write intent", "expand", "modify", "save volume", "save claim", "save error", "discard response", "remove record",
		"write pending", "abandon", "cancel",
	}[a]
}

// Reasons of steps that others than the log read: see [term.inStage].
const (
	stageInfeasible   = "Infeasible"
	stageInUse        = "VolumeInUse"
	stageClassNeeded  = "ClassNeeded" // its class is being read
	stageClassMissing = "ClassMissing"
	stageUnknown      = "UnknownStatus"
)

// step is an action and its arguments.
type step struct {
	action  action
	reason  string
	err     error     // of doFail
	until   time.Time // of doWait; zero: an event ends the wait
	target  target
	secret  *corev1.SecretReference
	claim   func(*corev1.PersistentVolumeClaim) // changes a copy of the claim
	volume  func(*corev1.PersistentVolume)      // changes a copy of the PersistentVolume
	events  []event                             // sent after the write
	trigger intent.Event                        // of the call that begins, also with doAbandon, which ends it; zero: none
	resets  bool                                // doIntend: starts an expansion again that is infeasible on the node
}

// decide returns the next step of an operation. It has no side effects and handles every state, also
// states that no correct component produces.
func (d driver) decide(o operation, s claimState) step {
	switch {
	case s.call.Payload.answer != nil:
		return d.decideAnswer(o, s, *s.call.Payload.answer)
	case s.claim == nil:
		return step{reason: "Deleted"}
	case !isBound(s.claim):
		return step{reason: "NotBound"}
	case s.volume == nil:
		return step{reason: "VolumeNotFound"} // its Add event enqueues the claim
	case !d.owns(s.claim, s.volume):
		return step{reason: "OtherVolume"}
	case s.call.State.MayHaveEffect() && !s.stub && s.showsResult(o):
		return step{action: doAbandon, reason: "WrittenByEarlierLeader", target: s.call.Payload.target, trigger: s.trigger}
	case o == expand:
		return d.decideExpand(s)
	}
	return d.decideModify(s)
}

// inOrder returns call, or the step that comes before it: secret is read, and record writes the target of the call to the claim, because
// a crash after the call must not lose it. The record of an earlier process is written again, so that a late write of that process
// fails. The cache may be stale.
func (s claimState) inOrder(o operation, secret *corev1.SecretReference, record, call step) step {
	record.trigger, call.trigger = s.trigger, s.trigger
	facts := intent.Facts{
		Record: s.recordOf(o, call.target), Writable: true, Wanted: true, Ready: secret == nil || s.secretRead, Stale: !s.confirmed,
	}
	switch intent.NextOfCall(intent.Policy{Record: intent.BeforeCall, Renew: true}, s.call.State, facts) {
	case intent.DoPrepare:
		return step{action: doReadSecret, reason: "SecretNeeded", secret: secret, target: call.target}
	case intent.DoRecord:
		if facts.Record == intent.Other {
			start := record.claim
			record.events, record.claim = nil, func(c *corev1.PersistentVolumeClaim) { start(c); renew(c, o.condition(), s.now) }
		}
		return record
	case intent.DoCall:
		return call
	}
	return step{action: doReadClaim, reason: "Unconfirmed"}
}

// owns reports whether pv is the volume of claim and belongs to the driver. The UID in the claimRef
// keeps a claim from expanding the volume of another one (CVE-2019-11255).
func (d driver) owns(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	ref := pv.Spec.ClaimRef
	return ref != nil && ref.Namespace == claim.Namespace && ref.Name == claim.Name && ref.UID == claim.UID &&
		claim.Spec.VolumeName == pv.Name && d.handles(claim, pv)
}

// handles reports whether the driver expands pv. An annotation of the claim decides for in-tree volumes only: users can
// write it. An expansion that has begun is finished also without it, while CSI migration of the volume is on.
func (d driver) handles(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	if pv.Spec.CSI != nil {
		return pv.Spec.CSI.Driver == d.name
	}
	return d.inTree != "" && migration.PluginOfVolume(pv) == d.inTree && (claim.Annotations[annStorageResizer] == d.name ||
		resizeStatus(claim) != "" && pv.Annotations[storagehelpers.AnnMigratedTo] == d.name)
}

func isBound(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Status.Phase == corev1.ClaimBound && claim.Spec.VolumeName != ""
}

// mayNeed reports whether claim may need a step of o. It is called for every event.
func (d driver) mayNeed(o operation, claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	switch {
	case !isBound(claim) || pv == nil || !d.owns(claim, pv):
		return false
	case o == modify:
		return d.modifies && pv.Spec.CSI != nil && (claim.Status.ModifyVolumeStatus != nil || requestedClass(claim) != currentClass(claim))
	}
	return d.expansion != expandsNone && (wantsMore(claim) || isRecordObsolete(claim, pv))
}
