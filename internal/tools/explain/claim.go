// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/provisioner"
)

// finalizersRemoved is the next step of an object that only its finalizers hold.
const finalizersRemoved = "The API server deletes the object after the finalizers above are removed."

func explainClaim(f *facts) Report {
	e := &explanation{facts: f}
	explainPendingPods(e)
	return explainClaimOfPod(e)
}

// explainClaimOfPod explains a claim without its pods.
func explainClaimOfPod(e *explanation) Report {
	claim := e.claim.Value
	explainClaimDeletion(e)
	if claim.Spec.VolumeName != "" {
		explainBinding(e)
		explainVolumeOfClaim(e)
		explainLogicalVolume(e)
		explainDriver(e)
		explainAttachments(e)
		explainExpansion(e)
		explainModification(e)
		explainClaimAttempts(e)
	} else {
		explainClass(e)
		explainDataSource(e)
		explainSecrets(e)
		explainScheduling(e)
		explainLogicalVolume(e)
		explainDriver(e)
		explainCreated(e)
		explainClaimAttempts(e) // before the last event, because it knows the next attempt
		explainLastError(e, roleProvisioner, "ProvisioningFailed", "ProvisioningSucceeded")
	}
	explainIndeterminate(e)
	state := fmt.Sprintf("The claim is %s", cmp.Or(string(claim.Status.Phase), "new"))
	return e.report(KindClaim, claim, state, e.nextOfClaim(), e.driver)
}

// explainVolumeOfClaim runs the checks of the volume that a claim names.
func explainVolumeOfClaim(e *explanation) {
	if !e.volume.Found {
		return
	}
	explainCleanUp(e, e.volume.Value)
	explainAffinity(e)
	explainSecrets(e)
	if e.driver == "" {
		e.ok("driver", notCSI)
	}
}

// explainClaimAttempts reports what a running process works on for the claim.
func explainClaimAttempts(e *explanation) {
	claim := e.claim.Value
	key := claim.Namespace + "/" + claim.Name
	source := volumerules.Source{Kind: kube.KindClaim, Namespace: claim.Namespace, Name: claim.Name}
	of := inQueues(key, "claims", "nodecontroller-pvc-finalizer", "nodecontroller-resize-nudge")
	of["clone-protection"] = func(k string) bool { return k == source.String() }
	of[e.driver+"-pvc"] = func(k string) bool { return strings.HasPrefix(k, key+" ") } // an operation follows
	explainProcess(e, []string{"provisioner", "resizer", "nodecontroller"}, of, provisioner.DefaultVolumeName(claim.UID), e.volumeHandle())
}

// nextOfClaim returns the next step of a claim without failures.
func (f *facts) nextOfClaim() string {
	switch claim := f.claim.Value; {
	case claim.DeletionTimestamp != nil:
		return finalizersRemoved
	case claim.Status.Phase == corev1.ClaimBound && !resizing(claim):
		return "Nothing to do: pods can use the claim."
	case claim.Status.Phase == corev1.ClaimBound:
		return "The resizer of the driver completes the change."
	case claim.Spec.VolumeName != "":
		return "kube-controller-manager binds the claim."
	case !isAssigned(claim):
		return "kube-controller-manager assigns the claim to the provisioner of its StorageClass."
	}
	return "The provisioner of driver " + f.driver + " calls CreateVolume and creates the PersistentVolume."
}

// isAssigned reports whether kube-controller-manager has assigned claim to a provisioner, which waits for that.
func isAssigned(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Annotations[storagehelpers.AnnStorageProvisioner]+claim.Annotations[storagehelpers.AnnBetaStorageProvisioner] != ""
}

// explainClaimDeletion reports the pods that hold a deleted claim.
func explainClaimDeletion(e *explanation) {
	claim := e.claim.Value
	if claim.DeletionTimestamp == nil || !slices.Contains(claim.Finalizers, "kubernetes.io/pvc-protection") || !e.pods.Found {
		return
	}
	const then = "kube-controller-manager removes finalizer kubernetes.io/pvc-protection"
	using := slices.DeleteFunc(e.podsUsing(), func(p *corev1.Pod) bool { return p.Spec.NodeName == "" })
	if len(using) > 0 {
		e.blocked("deletion", "The claim is being deleted, and is in use by %s.", podNames(using)).
			SetNext("Delete %s; %s after that.", podNames(using), then)
		return
	}
	e.waiting("deletion", "The claim is being deleted; no pod on a node uses it.").SetNext(then + ".")
}

// explainBinding reports on the PersistentVolume that a claim names.
func explainBinding(e *explanation) {
	claim, name, pv := e.claim.Value, e.claim.Value.Spec.VolumeName, e.volume.Value
	switch {
	case e.volume.Missing && claim.Status.Phase != corev1.ClaimPending && claim.Status.Phase != "":
		e.blocked("volume", "PersistentVolume %q of the claim was deleted; the claim is %s.", name, claim.Status.Phase).
			SetNext("Recreate the claim and restore its data from a backup.")
	case e.volume.Missing:
		e.blocked("volume", "PersistentVolume %q (spec.volumeName) not found.", name).
			SetNext("Create PersistentVolume %q, or recreate the claim without spec.volumeName.", name)
	case !e.volume.Found:
	case pv.Spec.ClaimRef != nil && !storagehelpers.IsVolumeBoundToClaim(pv, claim):
		e.blocked("volume", "PersistentVolume %q (spec.volumeName) is reserved for claim %s.", name, claimText(pv.Spec.ClaimRef)).
			SetNext("Recreate the claim with another volume, or change spec.claimRef of PersistentVolume %q.", name)
	case claim.Status.Phase != corev1.ClaimBound:
		e.waiting("volume", "PersistentVolume %q (spec.volumeName) is not bound yet.", name).
			SetNext("kube-controller-manager binds the claim to PersistentVolume %q.", name)
	default:
		e.ok("volume", "The claim is bound to PersistentVolume %q.", name)
		if pv.DeletionTimestamp != nil {
			e.waiting("volume",
				"PersistentVolume %q with reclaim policy %s has been Terminating for %s; it is deleted after the claim.", name,
				pv.Spec.PersistentVolumeReclaimPolicy, e.age(pv.DeletionTimestamp.Time)).
				SetNext("Back up the data: with reclaim policy Delete, the volume is deleted after the claim, else only its " +
					"PersistentVolume.")
		}
	}
}

func claimText(ref *corev1.ObjectReference) string {
	if ref.UID == "" {
		return ref.Namespace + "/" + ref.Name
	}
	return fmt.Sprintf("%s/%s (UID %s)", ref.Namespace, ref.Name, ref.UID)
}

// explainCreated reports a PersistentVolume that has the name of the claim's volume, while the claim is not bound.
func explainCreated(e *explanation) {
	if !e.volume.Found {
		return
	}
	name, ref := e.volume.Value.Name, e.volume.Value.Spec.ClaimRef
	if ref != nil && ref.UID == e.claim.Value.UID {
		e.waiting("volume", "PersistentVolume %q was created for the claim and is not bound yet.", name).
			SetNext("kube-controller-manager binds the claim to PersistentVolume %q.", name)
		return
	}
	e.blocked("volume", "PersistentVolume %q has the volume name of this claim, but was not created for it.", name).
		SetNext("Check which claim PersistentVolume %q belongs to, and --volume-name-uuid-length of the provisioner.", name)
}

// explainIndeterminate reports the finalizer of a CreateVolume without a final response, or whose volume has no PersistentVolume yet.
func explainIndeterminate(e *explanation) {
	claim := e.claim.Value
	if !slices.Contains(claim.Finalizers, kube.ProvisioningFinalizer) {
		return
	}
	const finalizer = "Finalizer " + kube.ProvisioningFinalizer + " holds the claim"
	driver := kube.RecordedDriver(claim)
	switch {
	case driver == "":
		e.waiting("volume", "%s, but the request of CreateVolume is not recorded on it.", finalizer).
			SetNext("If the provisioner does not remove the finalizer, an event of the claim or the log of the provisioner has the cause.")
	case e.volume.Found && e.volume.Value.Spec.ClaimRef != nil && e.volume.Value.Spec.ClaimRef.UID == claim.UID:
		e.waiting("volume", "%s; its PersistentVolume %q exists.", finalizer, e.volume.Value.Name).
			SetNext("The provisioner of driver %s removes the finalizer.", driver)
	default:
		e.waiting("volume", "CreateVolume is indeterminate: no final response of driver %s is recorded, so a volume may exist. "+
			"Or the volume exists, and its PersistentVolume cannot be created. %s.", driver, finalizer).
			SetNext("The provisioner repeats CreateVolume with the same arguments, or sends an event with the reason why it cannot. "+
				"Verify that driver %s and its provisioner are running.", driver)
	}
}

// explainAttachments reports the VolumeAttachments of a volume.
func explainAttachments(e *explanation) {
	if e.driver == "" {
		return
	}
	if !e.attaches() {
		e.ok("attachment", "Driver %s does not attach volumes (attachRequired=false in its CSIDriver).", e.driver)
		return
	}
	if len(e.attachments.Value) == 0 && e.attachments.Found {
		e.ok("attachment", "Not attached: no VolumeAttachment references the volume.")
	}
	for _, va := range e.attachments.Value {
		node := va.Spec.NodeName
		switch failure := lastFailure(va); {
		case failure != nil:
			e.failed("attachment", failureOfStatus(failure), "%s node %q (VolumeAttachment %s) failed",
				operation(va, "Detaching from", "Attaching to"), node, va.Name).
				SetNext("Retries automatically. Run `storage-controller explain va %s`.", va.Name)
		case va.DeletionTimestamp != nil:
			e.waiting("attachment", "VolumeAttachment %s to node %q has been Terminating for %s.", va.Name, node,
				e.age(va.DeletionTimestamp.Time)).SetNext("Run `storage-controller explain va %s`.", va.Name)
		case va.Status.Attached:
			e.ok("attachment", "Attached to node %q (VolumeAttachment %s).", node, va.Name)
		default:
			e.waiting("attachment", "Attaching to node %q (VolumeAttachment %s): no error is recorded.", node, va.Name).
				SetNext("The attacher calls ControllerPublishVolume. Run `storage-controller explain va %s`.", va.Name)
		}
	}
}
