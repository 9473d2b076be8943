// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// action names the next thing to do for a claim.
type action string

const (
	doNothing          action = "nothing"
	doForget           action = "forget"     // end the sync and drop the operation
	doIgnore           action = "ignore"     // report that an external populator provides the data
	doReport           action = "report"     // end the sync with an event, without a retry
	doBackOff          action = "back off"   // end the sync with its failure
	doRetry            action = "retry"      // back off without an event
	doFail             action = "fail"       // back off with an event
	doWait             action = "wait"       // end the sync until a time
	doReschedule       action = "reschedule" // have the scheduler select another node
	doScheduleClaiming action = "schedule claiming"
	doSelectThisNode   action = "select this node"
	doReadClaim        action = "read claim"
	doReadReferences   action = "read references" // read the objects that the claim references
	doBegin            action = "begin"           // take up a request, once its source has the finalizer
	doAbandon          action = "abandon"         // a request of which the driver does not know
	doRefetchClaim     action = "refetch claim"   // whose PersistentVolume was deleted
	doReadSecrets      action = "read secrets"
	doProtect          action = "protect" // record the request on the claim
	doUnprotect        action = "unprotect"
	doCreateVolume     action = "create volume"
	doCreatePV         action = "create PersistentVolume"
	doDeleteRejected   action = "delete rejected volume" // unless the volume belongs to another object
)

// step holds the action that decide has chosen and its arguments.
type step struct {
	action  action
	reason  string
	err     error        // of doIgnore, doReport, doBackOff, doRetry, doFail and, unless an event was sent, doReschedule
	until   time.Time    // of doWait
	trigger intent.Event // of doBegin: Plan, or Resume if an earlier process has recorded the request
	next    operation    // of doBegin
}

// decide returns the one next step for a claim. It has no side effects, and an answer for
// every state.
func (d driver) decide(s claimState) step {
	inProgress := s.call.State.InProgress()
	switch {
	case s.claim == nil && !inProgress:
		return step{action: doForget, reason: "ClaimDeleted"}
	case !inProgress && d.isOfOtherDriver(s):
		return d.decideOtherDriver(s)
	}
	facts, reason := d.facts(s), s.call.State.String()
	switch intent.Next(d.policy(s), s.call.State, facts) {
	case intent.DoUnrecord:
		return step{action: doUnprotect, reason: reason}
	case intent.DoBackOff:
		return d.backOff(s)
	case intent.DoConfirm:
		return step{action: doReadClaim, reason: "RecordFound"}
	case intent.DoResume:
		return d.decideResume(s)
	case intent.DoAbandon:
		if facts.Wanted && s.call.State == intent.Planned {
			reason = "RecordFound" // of an earlier process, whose request is repeated instead
		}
		return step{action: doAbandon, reason: reason}
	case intent.DoRecord:
		return step{action: doProtect, reason: reason}
	case intent.DoWrite:
		return d.decideCreated(s)
	case intent.DoPrepare:
		return d.preparation(s)
	case intent.DoUndo:
		return step{action: doDeleteRejected, reason: "Rejected"}
	case intent.DoCall:
		return step{action: doCreateVolume, reason: reason}
	}
	return d.decidePending(s)
}

// facts returns the facts about the CreateVolume of the claim. A record is confirmed before it is resumed, and a claim without one
// before its request is taken up.
func (d driver) facts(s claimState) intent.Facts {
	f := intent.Facts{
		Record: d.recordOn(s.claim, d.hasVolume(s), s.call), Refused: s.call.Refused, Inherited: s.call.Inherited,
		Failed: s.failure != nil, Ready: true,
		Wanted: s.claim != nil && needsVolume(s.claim), Writable: recordable(s.claim),
	}
	if s.call.State.InProgress() {
		f.Ready = d.preparation(s).action == doNothing
	} else {
		f.Stale = s.stale && d.isForThisNode(s.claim)
	}
	return f
}

// hasVolume reports whether the volume of the claim has a PersistentVolume. A claim that was bound to another volume may still have
// one of its own.
func (d driver) hasVolume(s claimState) bool {
	return s.claim != nil && (s.claim.Spec.VolumeName == d.volumeName(s.claim.UID) || isVolumeOf(s.claim, s.volume))
}

// decidePending returns the step for a claim that has no record, and no call in progress.
func (d driver) decidePending(s claimState) step {
	switch saved := s.call.Payload.saved; {
	case s.failure != nil:
		return d.decideFailed(s)
	case s.claim.Spec.VolumeName != "":
		return step{action: doForget, reason: "Bound"}
	case d.hasVolume(s) && !saved:
		return step{action: doNothing, reason: "PVExists"}
	case s.call.Payload.pvDeleted:
		return step{action: doRefetchClaim, reason: "PVDeleted"}
	case saved:
		return step{action: doNothing, reason: "PVCreated"}
	}
	return d.decideNew(s)
}

// decideFailed returns the step after a final result in this sync, whose event was sent.
func (d driver) decideFailed(s claimState) step {
	full := status.Code(s.failure.err) == codes.ResourceExhausted && d.topology && s.failure.node != ""
	switch chosen := s.claim.Annotations[storagehelpers.AnnSelectedNode]; {
	case full && chosen == s.failure.node:
		return step{action: doReschedule, reason: "ResourceExhausted"}
	case full && selectedNode(s.claim) == "": // rescheduled; no scheduler replaces the alpha annotation
		return d.decideNew(s)
	}
	return d.backOff(s)
}

func (d driver) backOff(s claimState) step {
	return step{action: doBackOff, reason: "CallFailed", err: s.failure.err}
}

// preparation returns what must happen before the driver is called for the request; doNothing if nothing must.
func (d driver) preparation(s claimState) step {
	o := s.call.Payload
	switch {
	case isReclaimed(s.volume, o.claim):
		// The driver would answer with the volume that is about to be deleted.
		return step{action: doWait, reason: "EarlierPVIsDeleted", until: s.now.Add(d.RetryIntervalStart)}
	case s.needsSecret():
		return step{action: doReadSecrets, reason: "SecretsNeeded"}
	}
	return step{action: doNothing}
}

// decideCreated returns the step for a volume whose PersistentVolume is not saved.
func (d driver) decideCreated(s claimState) step {
	o := s.call.Payload
	switch {
	case o.lostPV():
		return step{action: doRefetchClaim, reason: "PVDeleted"}
	case !o.pvRefused || s.claim == nil || !needsVolume(s.claim):
		// Users may delete the volume of a deleted claim at the storage system: another call would create it again.
		return step{action: doCreatePV, reason: "VolumeCreated"}
	}
	if st := d.preparation(s); st.action != doNothing {
		return st
	}
	return step{action: doCreateVolume, reason: "PVRefused"}
}

// waitsForPod is the reason for a claim that the scheduler has to select a node for.
const waitsForPod = "WaitsForPod"

// maxTopologyFailures bounds the failures in a row for lack of topology before the scheduler
// must select another node.
const maxTopologyFailures = 5

// decideNew returns the step for a claim for which a volume is requested now.
func (d driver) decideNew(s claimState) step {
	switch class := s.class; {
	case s.claim.DeletionTimestamp != nil:
		return step{action: doForget, reason: "ClaimDeleted"}
	case !d.owns(s.claim):
		return step{action: doForget, reason: "OfAnotherDriver"}
	case d.NodeDeployment && selectedNode(s.claim) != "" && selectedNode(s.claim) != d.NodeName:
		return step{action: doForget, reason: "OfAnotherNode"}
	case class == nil:
		return step{action: doRetry, reason: "NoClass", err: fmt.Errorf(
			"StorageClass %q not found", storagehelpers.GetPersistentVolumeClaimClass(s.claim))}
	case !d.is(class.Provisioner):
		return step{action: doForget, reason: "ClassOfAnotherDriver"}
	case kube.WaitsForFirstConsumer(class) && s.claim.Annotations[storagehelpers.AnnSelectedNode] == "":
		return step{action: doForget, reason: waitsForPod}
	}
	if d.NodeDeployment && selectedNode(s.claim) != d.NodeName {
		return d.decideOwner(s)
	}
	switch {
	case s.volume != nil:
		return step{action: doFail, reason: "NameTaken", err: fmt.Errorf(
			"PersistentVolume %q already exists: spec.claimRef names another PVC. %s", s.volume.Name, namesCollide)}
	case s.call.Payload.infeasible.holds(s):
		return step{action: doWait, reason: "Infeasible", until: s.call.Payload.infeasible.until}
	}
	return d.decideRequest(s)
}

// decideRequest prepares the request of a claim that is provisioned now.
func (d driver) decideRequest(s claimState) step {
	class, err := d.translated(s.class)
	if err == nil {
		err = d.check(s.claim, class)
	}
	switch {
	case errors.Is(err, volumerules.ErrPopulator):
		return step{action: doIgnore, reason: "Populator", err: err}
	case err != nil:
		return step{action: doFail, reason: "CannotRequest", err: err}
	case d.needsRefs(s.claim) && s.refs == nil:
		return step{action: doReadReferences, reason: "Wanted"}
	case s.refs != nil && s.refs.err != nil:
		return step{action: doFail, reason: "CannotRequest", err: s.refs.err}
	}
	node := selectedNode(s.claim)
	chosen := s.claim.Annotations[storagehelpers.AnnSelectedNode] != "" // no scheduler replaces the alpha annotation
	next, err := d.prepare(s.claim, class, node, s.refs, d.requirementFor(s.claim, class, node, s.known))
	switch {
	case errors.Is(err, errNodeNotFound) && chosen:
		return step{action: doReschedule, reason: "NodeDeleted", err: err}
	case errors.Is(err, errTopology) && chosen && s.call.Payload.topologyFailures+1 >= maxTopologyFailures:
		return step{action: doReschedule, reason: "NoTopologyForLong", err: err}
	case err != nil:
		return step{action: doFail, reason: "CannotRequest", err: err}
	}
	if s.stale {
		return step{action: doReadClaim, reason: "Wanted"}
	}
	return s.begin(intent.Plan, "Wanted", next)
}

// begin returns the step that takes up a request: a new one, or that of an earlier process.
func (s claimState) begin(trigger intent.Event, reason string, next operation) step {
	next.began = s.race.began
	return step{action: doBegin, reason: reason, trigger: trigger, next: next}
}

// waits reports whether a claim waits for its volume, or for the result of a call.
func waits(claim *corev1.PersistentVolumeClaim) bool { return needsVolume(claim) || isProtected(claim) }

// needsVolume reports whether a claim is neither bound nor being deleted.
func needsVolume(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil
}

// owns reports whether the claim names the driver, or the in-tree plugin that it replaces,
// as its provisioner.
func (d driver) owns(claim *corev1.PersistentVolumeClaim) bool {
	owner := kube.ProvisionerOf(claim)
	return owner == d.name || d.is(owner) && claim.Annotations[storagehelpers.AnnMigratedTo] == d.name
}

func isVolumeOf(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	return pv != nil && pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == claim.UID
}

// isReclaimed reports whether pv was provisioned for claim and is deleted, or will be, while claim exists. A
// PersistentVolume that a user deletes stays until claim is deleted if it is bound or has the finalizer of the
// provisioner: waiting for its deletion would not end.
func isReclaimed(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) bool {
	deleted := pv != nil && pv.DeletionTimestamp != nil && pv.Status.Phase != corev1.VolumeBound &&
		!slices.Contains(pv.Finalizers, storagehelpers.PVDeletionProtectionFinalizer)
	return isVolumeOf(claim, pv) && (deleted || pv.Status.Phase == corev1.VolumeReleased && reclaims(pv))
}

// holds reports whether the request is still infeasible: nothing it was prepared from has
// changed, and the delay has not ended.
func (i *infeasible) holds(s claimState) bool {
	if i == nil || !s.now.Before(i.until) {
		return false
	}
	was, is := i.claim, s.claim
	return i.class.UID == s.class.UID && i.class.ResourceVersion == s.class.ResourceVersion && selectedNode(was) == selectedNode(is) &&
		capacityRange(was).RequiredBytes == capacityRange(is).RequiredBytes &&
		ptr.Equal(was.Spec.VolumeAttributesClassName, is.Spec.VolumeAttributesClassName)
}
