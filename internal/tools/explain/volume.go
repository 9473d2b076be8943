package explain

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// reportVolume says why a PersistentVolume is in its state.
func reportVolume(f *facts) Report {
	pv := f.volume.value
	var l findings
	process := f.aboutProcess([]string{"provisioner", "attacher", "nodecontroller"}, []string{"volumes", "csi-attacher-pv", "nodecontroller-pv"}, pv.Name, pv.Name, f.handle())
	l = append(l, f.aboutPhase()...)
	l = append(l, f.aboutCleanUpOf(pv)...)
	l = append(l, f.aboutNodes()...)
	if f.driver == "" {
		l.add(Fine, "driver", "", "It is no volume of a CSI driver; storage-controller does nothing with it.")
		l = append(l, process...)
	} else {
		l = append(l, f.aboutAttachments()...)
		l = append(l, f.aboutSecrets()...)
		l = append(l, f.aboutDriver(roleProvisioner, roleAttacher, roleNodecontroller)...)
		l = append(l, process...) // before the last event, since it knows when the next try is
		next := "The provisioner tries again by itself; " + lower(admin) + " mends what the error says."
		l = append(l, f.aboutLastError([]string{"VolumeFailedDelete"}, next)...)
	}
	r := Report{
		Kind: KindVolume, Name: pv.Name, Driver: f.driver, Findings: l, State: f.stateOfVolume(),
		Finalizers: finalizersOf(KindVolume, pv.Finalizers, f.driver), Next: l.next(f.afterVolume()),
	}
	r.Events, r.EventsUnknown = f.eventsOf()
	return r
}

func (f *facts) stateOfVolume() string {
	pv := f.volume.value
	text := fmt.Sprintf("The volume is %s, with reclaim policy %s, and was created %s", pv.Status.Phase, pv.Spec.PersistentVolumeReclaimPolicy, f.ago(pv.CreationTimestamp.Time))
	if pv.DeletionTimestamp != nil {
		text += fmt.Sprintf("; it was deleted %s and is kept by its finalizers", f.ago(pv.DeletionTimestamp.Time))
	}
	return text + "."
}

func (f *facts) afterVolume() string {
	switch pv := f.volume.value; {
	case pv.DeletionTimestamp != nil:
		return "Whoever removes the finalizers above does so, and the API server removes the PersistentVolume."
	case pv.Status.Phase == corev1.VolumeBound:
		return "Nothing is left to do: pods of the claim can use the volume."
	}
	return "kube-controller-manager goes on with the volume."
}

// isOurs tells whether the driver has made pv, so that its provisioner deletes it.
func (f *facts) isOurs() bool {
	by := f.volume.value.Annotations[storagehelpers.AnnDynamicallyProvisioned]
	return by != "" && (by == f.driver || f.volume.value.Annotations[storagehelpers.AnnMigratedTo] == f.driver)
}

// aboutPhase is the claim of a volume, and who deletes the volume after it.
func (f *facts) aboutPhase() findings {
	var l findings
	pv := f.volume.value
	ref := pv.Spec.ClaimRef
	switch pv.Status.Phase {
	case corev1.VolumeReleased:
		f.aboutReleased(&l)
	case corev1.VolumeFailed:
		l.add(Blocked, "phase", admin+" mends what the message says, or deletes the PersistentVolume by hand.", "Its reclaiming has failed: %s", sentence(pv.Status.Message))
	case corev1.VolumeBound:
		f.aboutBoundTo(&l)
	default:
		switch {
		case pv.DeletionTimestamp != nil:
			l.add(Waiting, "phase", "Whoever removes the finalizers below does so.", "The volume is bound to no claim, and was deleted.")
		case ref == nil:
			l.add(Waiting, "phase", "kube-controller-manager binds it to a claim that fits, once somebody makes one.", "The volume is reserved for no claim.")
		case f.claim.absent():
			l.add(Waiting, "phase", fmt.Sprintf("The user creates claim %s/%s, and kube-controller-manager binds it.", ref.Namespace, ref.Name), "The volume is reserved for claim %s/%s, which does not exist.", ref.Namespace, ref.Name)
		default:
			l.add(Waiting, "phase", fmt.Sprintf("kube-controller-manager binds it to claim %s/%s.", ref.Namespace, ref.Name), "The volume is reserved for claim %s/%s.", ref.Namespace, ref.Name)
		}
	}
	return l
}

// aboutBoundTo is the claim of a volume that is bound.
func (f *facts) aboutBoundTo(l *findings) {
	pv, ref := f.volume.value, f.volume.value.Spec.ClaimRef
	if ref == nil {
		l.add(Unknown, "phase", "", "The volume is Bound, and names no claim.")
		return
	}
	after := "afterwards nothing deletes it, by its reclaim policy " + string(pv.Spec.PersistentVolumeReclaimPolicy)
	if pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
		after = "the provisioner deletes it once the claim is gone"
	}
	name := ref.Namespace + "/" + ref.Name
	switch {
	case f.claim.why != "":
		l.add(Unknown, "phase", "", "Claim %s: %s.", name, f.claim.why)
	case f.claim.absent(), f.claim.found && f.claim.value.UID != ref.UID:
		l.add(Waiting, "phase", "kube-controller-manager marks the volume as Released.", "Its claim %s is gone; %s.", name, after)
	case pv.DeletionTimestamp != nil:
		l.add(Failing, "phase", fmt.Sprintf("The owner of claim %s deletes it once its data is not needed any more; the volume goes after that, whatever its reclaim policy is.", name), "The volume was deleted while claim %s is bound to it.", name)
	case f.claim.value.DeletionTimestamp != nil:
		l.add(Waiting, "phase", fmt.Sprintf("Ask `storage-controller explain pvc -n %s %s`, which says what keeps the claim.", ref.Namespace, ref.Name), "Its claim %s was deleted %s, and is not gone yet; %s.", name, f.ago(f.claim.value.DeletionTimestamp.Time), after)
	default:
		l.add(Fine, "phase", "", "It is bound to claim %s; %s.", name, after)
	}
}

// aboutReleased is a volume whose claim is gone: who deletes it, and what blocks that.
func (f *facts) aboutReleased(l *findings) {
	pv := f.volume.value
	switch {
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		l.add(Waiting, "phase", admin+" saves the data or gives it up, and deletes the PersistentVolume and the volume at the driver; or removes spec.claimRef to have it used again.",
			"Its claim is gone, and by its reclaim policy %s nobody deletes it.", pv.Spec.PersistentVolumeReclaimPolicy)
	case f.driver == "":
		l.add(Waiting, "phase", "kube-controller-manager deletes it.", "Its claim is gone, and by its reclaim policy Delete it is to be deleted.")
	case !f.isOurs():
		l.add(Blocked, "phase", admin+" deletes the volume at the driver, and then the PersistentVolume.",
			"Its claim is gone, and no provisioner deletes it: annotation %s is %q, not %q.", storagehelpers.AnnDynamicallyProvisioned, pv.Annotations[storagehelpers.AnnDynamicallyProvisioned], f.driver)
	default:
		next := "The provisioner of driver " + f.driver + " deletes the volume (DeleteVolume), and then the PersistentVolume."
		if n := len(f.attachments.value); n > 0 {
			next = "The attacher detaches the volume first: kube-controller-manager deletes its VolumeAttachments; the provisioner deletes it after that."
			l.add(Waiting, "phase", next, "Its claim is gone, and by its reclaim policy Delete it is to be deleted; %s still %s it.", count(n, "VolumeAttachment"), verb(n, "names", "name"))
			return
		}
		l.add(Waiting, "phase", next, "Its claim is gone, and by its reclaim policy Delete it is to be deleted.")
	}
}

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// aboutNodes is the nodes on which a volume can be used.
func (f *facts) aboutNodes() findings {
	var l findings
	names, ok := f.nodesOf(f.volume.value)
	if !ok {
		return l
	}
	text := affinityText(f.volume.value)
	if len(names) == 0 {
		l.add(Blocked, "node", admin+" brings the node back, or gives up the data of the volume: its owner deletes the claim; see docs/nodecontroller.md for what the nodecontroller does by itself.",
			"No node has what the node affinity of the volume asks for: %s.", text)
		return l
	}
	l.add(Fine, "node", "", "It can be used on %s: %s.", count(len(names), "node"), list(names))
	return l
}
