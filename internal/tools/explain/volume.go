// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

const notCSI = "Not a CSI volume: storage-controller does not handle it."

func explainVolume(f *facts) Report {
	pv := f.volume.Value
	e := &explanation{facts: f}
	explainPhase(e)
	explainCleanUp(e, pv)
	explainAffinity(e)
	explainLogicalVolume(e)
	if f.driver == "" {
		e.ok("driver", notCSI)
		explainVolumeAttempts(e)
	} else {
		explainAttachments(e)
		explainSecrets(e)
		explainDriver(e)
		explainVolumeAttempts(e) // before the last event, because it knows the next attempt
		if pv.Status.Phase == corev1.VolumeReleased || pv.DeletionTimestamp != nil {
			explainLastError(e, roleProvisioner, "VolumeFailedDelete", "")
		}
	}
	rest := "kube-controller-manager processes the volume."
	switch {
	case pv.DeletionTimestamp != nil:
		rest = finalizersRemoved
	case pv.Status.Phase == corev1.VolumeBound:
		rest = "Nothing to do: pods of the claim can use the volume."
	}
	state := fmt.Sprintf("The volume is %s with reclaim policy %s", pv.Status.Phase, pv.Spec.PersistentVolumeReclaimPolicy)
	return e.report(KindVolume, pv, state, rest, f.driver)
}

// explainVolumeAttempts reports what a running process works on for the volume.
func explainVolumeAttempts(e *explanation) {
	pv := e.volume.Value
	of := inQueues(pv.Name, "volumes", "csi-attacher-pv")
	if e.driver != "" && requiredAffinity(pv) != nil {
		of[nodecleanup.QueueName] = func(key string) bool { return key == e.driver }
	}
	explainProcess(e, []string{"provisioner", "attacher", "nodecontroller"}, of, pv.Name, e.volumeHandle())
}

// explainPhase reports the claim of a volume, and who deletes the volume after the claim.
func explainPhase(e *explanation) {
	pv := e.volume.Value
	ref := pv.Spec.ClaimRef
	switch {
	case pv.Status.Phase == corev1.VolumeReleased:
		explainReleased(e)
	case pv.Status.Phase == corev1.VolumeFailed:
		e.blocked("phase", "Reclaiming the volume failed: %s", sentence(pv.Status.Message)).
			SetNext("Fix the error shown above, or delete the PersistentVolume manually.")
	case pv.Status.Phase == corev1.VolumeBound && ref == nil:
		e.unknown("phase", "The volume is Bound, but spec.claimRef is empty.")
	case pv.Status.Phase == corev1.VolumeBound:
		explainBoundVolume(e, ref.Namespace+"/"+ref.Name)
	case pv.DeletionTimestamp != nil:
		e.waiting("phase", "The volume is not bound and is being deleted.").SetNext(finalizersRemoved)
	case ref == nil:
		e.waiting("phase", "spec.claimRef is empty.").SetNext("Create a claim that matches; kube-controller-manager binds it.")
	case e.claim.Missing:
		e.waiting("phase", "The volume is reserved for claim %s/%s, which does not exist.", ref.Namespace, ref.Name).
			SetNext("Create claim %s/%s; kube-controller-manager binds it.", ref.Namespace, ref.Name)
	default:
		e.waiting("phase", "The volume is reserved for claim %s/%s.", ref.Namespace, ref.Name).
			SetNext("kube-controller-manager binds the volume to claim %s/%s.", ref.Namespace, ref.Name)
	}
}

// explainBoundVolume reports on the claim of a bound volume.
func explainBoundVolume(e *explanation, name string) {
	pv, claim := e.volume.Value, e.claim.Value
	after := fmt.Sprintf("reclaim policy %s keeps the volume after the claim is deleted", pv.Spec.PersistentVolumeReclaimPolicy)
	if pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
		after = "the provisioner deletes the volume after the claim is deleted"
	}
	switch {
	case e.claim.Missing, e.claim.Found && claim.UID != pv.Spec.ClaimRef.UID:
		e.waiting("phase", "Claim %s was deleted; %s.", name, after).SetNext("kube-controller-manager sets the volume to Released.")
	case !e.claim.Found:
	case pv.DeletionTimestamp != nil:
		e.failing("phase", "The volume is being deleted while claim %s is bound to it.", name).
			SetNext("Back up the data, then delete claim %s; the PersistentVolume is deleted after the claim.", name)
	case claim.DeletionTimestamp != nil:
		e.waiting("phase", "Claim %s has been Terminating for %s; %s.", name, e.age(claim.DeletionTimestamp.Time), after).
			SetNext("Run `storage-controller explain pvc -n %s %s` to see what holds the claim.", claim.Namespace, claim.Name)
	default:
		e.ok("phase", "Bound to claim %s; %s.", name, after)
	}
}

// explainReleased reports who deletes a volume whose claim was deleted, and what holds up the deletion.
func explainReleased(e *explanation) {
	pv := e.volume.Value
	by, policy := pv.Annotations[storagehelpers.AnnDynamicallyProvisioned], pv.Spec.PersistentVolumeReclaimPolicy
	migrated := by != "" && pv.Annotations[storagehelpers.AnnMigratedTo] == e.driver
	switch {
	case policy != corev1.PersistentVolumeReclaimDelete:
		e.waiting("phase", "The claim was deleted; reclaim policy %s keeps the volume.", policy).SetNext(
			"Save the data, then delete the PersistentVolume and the volume on the storage backend; or remove spec.claimRef to reuse " +
				"the volume.")
	case e.driver == "":
		e.waiting("phase", "The claim was deleted; reclaim policy Delete applies.").SetNext("kube-controller-manager deletes the volume.")
	case by != e.driver && !migrated:
		e.blocked("phase", "The claim was deleted, but no provisioner deletes the volume: annotation %s is %q, not %q.",
			storagehelpers.AnnDynamicallyProvisioned, by, e.driver).SetNext(
			"Delete the volume on the storage backend, then delete the PersistentVolume.")
	case len(e.attachments.Value) > 0:
		attached := finding.Plural(len(e.attachments.Value), "VolumeAttachment")
		e.waiting("phase", "The claim was deleted; reclaim policy Delete applies after detaching (%s).", attached).SetNext(
			"kube-controller-manager deletes the VolumeAttachments; the attacher detaches the volume; the provisioner deletes it.")
	default:
		e.waiting("phase", "The claim was deleted; reclaim policy Delete applies.").
			SetNext("The provisioner of driver %s calls DeleteVolume and deletes the PersistentVolume.", e.driver)
	}
}

// explainAffinity reports the nodes from which a volume is accessible.
func explainAffinity(e *explanation) {
	affinity := requiredAffinity(e.volume.Value)
	if affinity == nil || !e.nodes.Found {
		return
	}
	nodes := e.nodesMatching(affinity)
	names := namesOf(nodes)
	switch {
	case len(names) == 0:
		e.blocked("node", "No node matches the node affinity of the volume: %s. Its node was deleted, or lacks the label.",
			selectorText(affinity)).
			SetNext("Bring the node back, or label it; or delete the claim if its data is lost. See docs/nodecontroller.md for the " +
				"automatic cleanup.")
	case !slices.ContainsFunc(nodes, isReady):
		e.failing("node", "No node from which the volume is accessible is Ready: %s.", kube.ShortList(names, 5)).
			SetNext("Bring node %q back. Run `storage-controller explain node %[1]s`.", names[0])
	default:
		e.ok("node", "The volume is accessible from %s: %s.", finding.Plural(len(names), "node"), kube.ShortList(names, 5))
	}
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
