package provisioner

import (
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// action is the one next thing to do for a claim.
type action int

const (
	doNothing    action = iota
	doForget            // nothing, and nothing need be remembered
	doIgnore            // say that somebody else provides the data
	doRetry             // come back after the back-off, without a word to the user
	doFail              // the same, with an event
	doWait              // come back at a time
	doReschedule        // ask the scheduler for another node
	doRace              // draw a time at which to try to own the claim
	doOwn               // have this node selected
	doLookUp            // read what the claim names
	doStart             // take up an attempt
	doGuard             // the same, and keep the source of the data from being deleted
	doDrop              // give an attempt up of which the driver does not know
	doAskAgain          // the API server, whether the claim still waits for a volume
	doReadSecrets
	doProtect
	doUnprotect
	doCreate // CreateVolume
	doSave   // create the PersistentVolume
	doCleanUp
)

// String is the name of a in the log.
func (a action) String() string {
	return [...]string{
		"nothing", "forget", "ignore", "retry", "fail", "wait", "reschedule", "race", "own", "look up", "start", "guard", "drop", "ask again", "read secrets", "protect", "unprotect",
		"create", "save", "clean up",
	}[a]
}

// step is what decide has chosen, and with what.
type step struct {
	action  action
	reason  string
	err     error     // of doIgnore, doRetry, doFail and doReschedule
	until   time.Time // of doWait
	attempt *attempt  // of doStart and doGuard
}

// decide names the one next step for a claim. It has no side effects, and is
// total: every snapshot, however odd, has an answer.
func (d driver) decide(s snapshot) step {
	if s.progress.attempt != nil {
		return d.decideAttempt(s)
	}
	if s.claim == nil {
		return step{action: doForget, reason: "Gone"}
	}
	// A claim that was bound to another volume may have one of its own all the same.
	done := s.progress.saved || s.claim.Spec.VolumeName == d.volumeName(s.claim.UID) || isVolumeOf(s.claim, s.volume)
	switch {
	case isProtected(s.claim) && (done || s.progress.settled):
		return step{action: doUnprotect, reason: "Settled"}
	case isProtected(s.claim):
		return d.decideResume(s)
	case s.claim.Spec.VolumeName != "":
		return step{action: doForget, reason: "Bound"}
	case s.progress.saved && s.progress.lost:
		return step{action: doAskAgain, reason: "VolumeGone"}
	case done:
		return step{reason: "Saved"}
	}
	return d.decideNew(s)
}

// decideAttempt is for a claim for which a volume is coming into being. Neither
// what the claim looks like now nor whether it is still there changes what is
// asked of the driver.
func (d driver) decideAttempt(s snapshot) step {
	a := s.progress.attempt
	canProtect := s.claim != nil && s.claim.DeletionTimestamp == nil && !isProtected(s.claim)
	wanted := s.claim != nil && s.claim.DeletionTimestamp == nil && s.claim.Spec.VolumeName == ""
	needsSecrets := a.plan.Secrets.Provisioner != nil && a.request.Secrets == nil
	switch {
	case a.volume != nil:
		return step{action: doSave, reason: "Created"}
	case !wanted && !a.asked && !a.doubt:
		return step{action: doDrop, reason: "NotWantedAnyMore"}
	case canProtect && a.doubt && !a.unnoted && d.ProvisioningProtection != ProtectionOff:
		return step{action: doProtect, reason: "InDoubt"}
	case isReclaimed(s.volume, a.claim):
		// The driver would answer with the volume that is about to be deleted.
		return step{action: doWait, reason: "EarlierVolumeIsDeleted", until: s.now.Add(d.RetryIntervalStart)}
	case needsSecrets: // before the claim is protected: without them nothing is asked
		return step{action: doReadSecrets, reason: "SecretsNeeded"}
	case canProtect && !a.doubt && d.ProvisioningProtection == ProtectionAlways,
		// The instances on other nodes must not release the source of a claim that is gone.
		canProtect && !a.doubt && a.source != nil && d.NodeDeployment && d.ProvisioningProtection != ProtectionOff:
		return step{action: doProtect, reason: "BeforeFirstCall"}
	case a.waste != "":
		return step{action: doCleanUp, reason: "Unusable"}
	}
	return step{action: doCreate, reason: "Requested"}
}

// decideResume is for a claim for which an earlier process asked for a volume and
// did not live to know the outcome. It goes on also when the claim is being deleted.
func (d driver) decideResume(s snapshot) step {
	switch {
	case d.NodeDeployment && nodeOf(s.claim) != d.NodeName:
		return step{action: doForget, reason: "OfAnotherNode"}
	case s.class == nil || !d.is(s.class.Provisioner): // one made anew for another driver would make the volume that one's
		return step{action: doFail, reason: "ClassGone", err: fmt.Errorf(
			"a volume may be coming into being for this claim, and its StorageClass %q is gone, or of another driver. Create it again, or, if the driver has no volume %q, remove the finalizer %s",
			storagehelpers.GetPersistentVolumeClaimClass(s.claim), d.volumeName(s.claim.UID), claimFinalizer)}
	case d.needsLookUp(s.claim) && s.named == nil:
		return step{action: doLookUp, reason: "LeftInDoubt"}
	case s.named != nil && s.named.err != nil:
		return step{action: doFail, reason: "SourceGone", err: fmt.Errorf(
			"a volume may be coming into being for this claim, and what was asked of the driver for it cannot be repeated: %w. Mend that, or, if the driver has no volume %q, remove the finalizer %s",
			s.named.err, d.volumeName(s.claim.UID), claimFinalizer)}
	}
	a, err := d.resume(s.claim, s.class, s.named, s.known)
	if err != nil {
		return step{action: doFail, reason: "CannotResume", err: err}
	}
	return begin("LeftInDoubt", a)
}

// maxStuck is how many failures in a row for lack of topology a selected node is
// given before the scheduler is asked for another.
const maxStuck = 5

func (d driver) decideNew(s snapshot) step {
	switch class := s.class; {
	case s.claim.DeletionTimestamp != nil:
		return step{action: doForget, reason: "Deleting"}
	case !d.owns(s.claim):
		return step{action: doForget, reason: "OfAnotherDriver"}
	case class == nil:
		return step{action: doRetry, reason: "NoClass", err: fmt.Errorf("StorageClass %q not found", storagehelpers.GetPersistentVolumeClaimClass(s.claim))}
	case !d.is(class.Provisioner):
		return step{action: doForget, reason: "ClassOfAnotherDriver"}
	case isLate(class) && s.claim.Annotations[storagehelpers.AnnSelectedNode] == "":
		return step{action: doForget, reason: "WaitsForPod"}
	}
	if d.NodeDeployment {
		if st, settled := d.decideOwner(s); settled {
			return st
		}
	}
	switch {
	case s.volume != nil:
		return step{action: doFail, reason: "NameTaken", err: fmt.Errorf(
			"PersistentVolume %q exists and is not for this claim; see --volume-name-uuid-length if the names of volumes are too short", s.volume.Name)}
	case s.progress.infeasible.holds(s):
		return step{action: doWait, reason: "Infeasible", until: s.progress.infeasible.until}
	}
	return d.decideRequest(s)
}

// decideRequest is for a claim that is to be provisioned now.
func (d driver) decideRequest(s snapshot) step {
	class, err := d.translated(s.class)
	if err == nil {
		err = d.check(s.claim, class)
	}
	switch {
	case errors.Is(err, volumerules.ErrPopulator):
		return step{action: doIgnore, reason: "Populator", err: err}
	case err != nil:
		return step{action: doFail, reason: "CannotAsk", err: err}
	case d.needsLookUp(s.claim) && s.named == nil:
		return step{action: doLookUp, reason: "NamesOthers"}
	case s.named != nil && s.named.err != nil:
		return step{action: doFail, reason: "CannotAsk", err: s.named.err}
	}
	node := selectedNode(s.claim)
	chosen := s.claim.Annotations[storagehelpers.AnnSelectedNode] != "" // not by the alpha annotation, which no scheduler sets anew
	request, p, err := d.prepare(s.claim, class, node, s.named, d.requirementFor(s.claim, class, node, s.known))
	switch {
	case errors.Is(err, errNodeGone) && chosen:
		return step{action: doReschedule, reason: "NodeGone", err: err}
	case errors.Is(err, errTopology) && chosen && s.progress.stuck+1 >= maxStuck:
		return step{action: doReschedule, reason: "NoTopologyForLong", err: err}
	case err != nil:
		return step{action: doFail, reason: "CannotAsk", err: err}
	}
	a := &attempt{claim: s.claim, request: request, plan: p}
	if s.named != nil {
		a.source = s.named.source
	}
	return begin("Wanted", a)
}

func begin(reason string, a *attempt) step {
	if a.source != nil {
		return step{action: doGuard, reason: reason, attempt: a}
	}
	return step{action: doStart, reason: reason, attempt: a}
}

// waits tells whether a claim waits for its volume, or a call that was made for it for
// its outcome.
func waits(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil || isProtected(claim)
}

// owns tells whether the claim names the driver, or the plugin that it has replaced, as
// its provisioner.
func (d driver) owns(claim *corev1.PersistentVolumeClaim) bool {
	owner, ok := claim.Annotations[storagehelpers.AnnStorageProvisioner]
	if !ok {
		owner = claim.Annotations[storagehelpers.AnnBetaStorageProvisioner]
	}
	return owner == d.name || d.is(owner) && claim.Annotations[storagehelpers.AnnMigratedTo] == d.name
}

func isLate(class *storagev1.StorageClass) bool {
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

func isVolumeOf(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	return pv != nil && pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == claim.UID
}

// isReclaimed tells whether pv is one of claim that is on its way out.
func isReclaimed(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) bool {
	return isVolumeOf(claim, pv) && (pv.DeletionTimestamp != nil || pv.Status.Phase == corev1.VolumeReleased && reclaims(pv))
}

// holds tells whether the driver is still not to be asked: nothing that the
// request was made of has changed, and its time is not over.
func (i *infeasible) holds(s snapshot) bool {
	return i != nil && s.now.Before(i.until) && i.classUID == s.class.UID && i.classVersion == s.class.ResourceVersion &&
		i.requestedBytes == capacityRange(s.claim).RequiredBytes && i.attributes == ptr.Deref(s.claim.Spec.VolumeAttributesClassName, "")
}
