package explain

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/provisioner"
)

// Reasons of events that tell of attempts for a claim.
var (
	provisioningFailed    = []string{"ProvisioningFailed"}
	provisioningSucceeded = "ProvisioningSucceeded"
)

// reportClaim says why a claim is in its state.
func reportClaim(f *facts) Report {
	claim := f.claim.value
	var l findings
	process := f.aboutProcess([]string{"provisioner"}, []string{"claims", "clone-protection", "nodecontroller-pvc"}, claim.Namespace+"/"+claim.Name,
		provisioner.DefaultVolumeName(claim.UID), f.handle())
	l = append(l, f.aboutClaimDeletion()...)
	if claim.Spec.VolumeName != "" {
		l = append(l, f.aboutBinding()...)
		l = append(l, f.aboutDriver(roleProvisioner, roleAttacher)...)
		l = append(l, f.aboutAttachments()...)
		l = append(l, f.aboutResize()...)
		l = append(l, process...)
	} else {
		l = append(l, f.aboutClass()...)
		l = append(l, f.aboutSource()...)
		l = append(l, f.aboutSecrets()...)
		l = append(l, f.aboutPlace()...)
		l = append(l, f.aboutDriver(roleProvisioner)...)
		l = append(l, f.aboutSaved()...)
		l = append(l, process...) // before the last event, since it knows when the next try is
		next := "The provisioner tries again by itself; " + lower(admin) + " mends what the error says."
		l = append(l, f.aboutLastError(provisioningFailed, next, provisioningSucceeded)...)
	}
	l = append(l, f.aboutDoubt()...)
	r := Report{
		Kind: KindClaim, Namespace: claim.Namespace, Name: claim.Name, Driver: f.driver, Findings: l,
		State:      f.stateOfClaim(),
		Finalizers: finalizersOf(KindClaim, claim.Finalizers, f.driver),
		Next:       l.next(f.afterClaim()),
	}
	r.Events, r.EventsUnknown = f.eventsOf()
	return r
}

// handle is the ID of the volume at the driver; "" when that is not known.
func (f *facts) handle() string {
	if f.volume.found && f.volume.value.Spec.CSI != nil {
		return f.volume.value.Spec.CSI.VolumeHandle
	}
	return ""
}

func (f *facts) stateOfClaim() string {
	claim := f.claim.value
	phase := string(claim.Status.Phase)
	if phase == "" {
		phase = "new"
	}
	text := fmt.Sprintf("The claim is %s, and was created %s", phase, f.ago(claim.CreationTimestamp.Time))
	if claim.DeletionTimestamp != nil {
		text += fmt.Sprintf("; it was deleted %s and is kept by its finalizers", f.ago(claim.DeletionTimestamp.Time))
	}
	return text + "."
}

// afterClaim is what happens next to a claim to which nothing is wrong.
func (f *facts) afterClaim() string {
	switch claim := f.claim.value; {
	case claim.DeletionTimestamp != nil:
		return "Whoever removes the finalizers above does so, and the API server removes the claim."
	case claim.Status.Phase == corev1.ClaimBound:
		return "Nothing is left to do: a pod can use the claim."
	case claim.Spec.VolumeName != "":
		return "kube-controller-manager binds the claim."
	}
	return "The provisioner of driver " + f.driver + " has the volume made (CreateVolume), and saves it as a PersistentVolume."
}

// aboutClaimDeletion is what keeps a deleted claim.
func (f *facts) aboutClaimDeletion() findings {
	var l findings
	claim := f.claim.value
	if claim.DeletionTimestamp == nil || !slices.Contains(claim.Finalizers, "kubernetes.io/pvc-protection") {
		return l
	}
	if f.pods.why != "" {
		l.add(Unknown, "deletion", "", "Which pods keep the claim is %s.", f.pods.why)
		return l
	}
	using := slices.DeleteFunc(f.podsUsing(), func(p corev1.Pod) bool { return p.Spec.NodeName == "" })
	if len(using) > 0 {
		l.add(Blocked, "deletion", "The owner of "+podNames(using)+" deletes it; kube-controller-manager removes kubernetes.io/pvc-protection after that.",
			"The claim was deleted and is still used by %s.", podNames(using))
		return l
	}
	l.add(Waiting, "deletion", "kube-controller-manager removes kubernetes.io/pvc-protection.", "The claim was deleted, and no pod on a node uses it any more.")
	return l
}

// aboutBinding is the volume that a claim names.
func (f *facts) aboutBinding() findings {
	var l findings
	claim, name := f.claim.value, f.claim.value.Spec.VolumeName
	pv := f.volume.value
	switch {
	case f.volume.why != "":
		l.add(Unknown, "volume", "", "PersistentVolume %q: %s.", name, f.volume.why)
	case f.volume.absent() && claim.Status.Phase == corev1.ClaimLost:
		l.add(Blocked, "volume", ownerOf+" deletes it and makes it anew, and restores its data from a backup.",
			"The claim has lost its PersistentVolume %q, which was deleted; a claim never recovers from that.", name)
	case f.volume.absent():
		l.add(Blocked, "volume", admin+" makes PersistentVolume "+fmt.Sprintf("%q", name)+", or "+lower(ownerOf)+" makes the claim anew without that name.",
			"The claim names PersistentVolume %q, which does not exist.", name)
	case pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID != "" && pv.Spec.ClaimRef.UID != claim.UID:
		l.add(Blocked, "volume", ownerOf+" makes it anew with another volume.", "PersistentVolume %q, which the claim names, belongs to claim %s/%s (UID %s).",
			name, pv.Spec.ClaimRef.Namespace, pv.Spec.ClaimRef.Name, pv.Spec.ClaimRef.UID)
	case pv.Spec.ClaimRef != nil && (pv.Spec.ClaimRef.Namespace != claim.Namespace || pv.Spec.ClaimRef.Name != claim.Name):
		l.add(Blocked, "volume", ownerOf+" makes it anew with another volume, or "+lower(admin)+" changes spec.claimRef of the volume.", "PersistentVolume %q, which the claim names, is reserved for claim %s/%s.",
			name, pv.Spec.ClaimRef.Namespace, pv.Spec.ClaimRef.Name)
	case claim.Status.Phase == corev1.ClaimBound:
		l.add(Fine, "volume", "", "The claim is bound to PersistentVolume %q.", name)
		if pv.DeletionTimestamp != nil {
			l.add(Failing, "volume", "Whoever uses the volume saves its data: it goes when the claim is deleted.", "PersistentVolume %q was deleted %s, and is kept by its finalizers until the claim is gone.", name, f.ago(pv.DeletionTimestamp.Time))
		}
	default:
		l.add(Waiting, "volume", "kube-controller-manager binds the claim to PersistentVolume "+fmt.Sprintf("%q", name)+".", "The claim names PersistentVolume %q, and is not bound yet.", name)
	}
	return l
}

// aboutSaved is a volume that has been made for a claim that is not bound to it yet.
func (f *facts) aboutSaved() findings {
	var l findings
	if !f.volume.found {
		return l
	}
	pv := f.volume.value
	ref := pv.Spec.ClaimRef
	if ref != nil && ref.UID == f.claim.value.UID {
		l.add(Waiting, "volume", "kube-controller-manager binds the claim to PersistentVolume "+fmt.Sprintf("%q", pv.Name)+".", "PersistentVolume %q has been made for the claim, and is not bound to it yet.", pv.Name)
		return l
	}
	l.add(Blocked, "volume", admin+" looks whose PersistentVolume "+fmt.Sprintf("%q", pv.Name)+" is; see --volume-name-uuid-length if the names of volumes are too short.",
		"PersistentVolume %q has the name that the volume of the claim would have, and is not for it.", pv.Name)
	return l
}

// aboutDoubt is a claim that is kept since a volume may be coming into being for it.
func (f *facts) aboutDoubt() findings {
	var l findings
	claim := f.claim.value
	if !slices.Contains(claim.Finalizers, kube.ProvisioningFinalizer) {
		return l
	}
	driver := f.driver
	if asked := provisioner.AskedDriver(claim); asked != "" {
		driver = asked
	}
	l.add(Failing, "volume", "The provisioner repeats CreateVolume with equal arguments until driver "+driver+" gives a final answer; "+lower(admin)+" sees to it that the driver and its provisioner run.",
		"Driver %s was asked for the volume and has not given a final answer, so that a volume may exist: the claim is kept by %s until that is settled.", driver, kube.ProvisioningFinalizer)
	return l
}

// aboutAttachments is where the volume of a claim or a PersistentVolume is attached.
func (f *facts) aboutAttachments() findings {
	var l findings
	if !f.attaches() {
		l.add(Fine, "attachment", "", "Driver %s does not attach volumes (attachRequired of its CSIDriver is false).", f.driver)
		return l
	}
	if f.attachments.why != "" {
		l.add(Unknown, "attachment", "", "Where the volume is attached is %s.", f.attachments.why)
		return l
	}
	if len(f.attachments.value) == 0 && f.attachments.asked {
		l.add(Fine, "attachment", "", "No VolumeAttachment names the volume: it is attached nowhere.")
	}
	for _, va := range f.attachments.value {
		ask := "Ask `storage-controller explain va " + va.Name + "`: the attacher tries again by itself."
		switch {
		case va.DeletionTimestamp != nil && va.Status.DetachError != nil:
			l.add(Failing, "attachment", ask, "Detaching it from node %q (VolumeAttachment %s) failed %s: %s", va.Spec.NodeName, va.Name, f.ago(va.Status.DetachError.Time.Time), sentence(va.Status.DetachError.Message))
		case va.DeletionTimestamp != nil:
			l.add(Waiting, "attachment", "", "It is being detached from node %q (VolumeAttachment %s) %s.", va.Spec.NodeName, va.Name, f.since(va.DeletionTimestamp.Time))
		case va.Status.Attached:
			l.add(Fine, "attachment", "", "It is attached to node %q (VolumeAttachment %s).", va.Spec.NodeName, va.Name)
		case va.Status.AttachError != nil:
			l.add(Failing, "attachment", ask, "Attaching it to node %q (VolumeAttachment %s) failed %s: %s", va.Spec.NodeName, va.Name, f.ago(va.Status.AttachError.Time.Time), sentence(va.Status.AttachError.Message))
		default:
			l.add(Waiting, "attachment", "The attacher attaches the volume (ControllerPublishVolume).", "It is being attached to node %q (VolumeAttachment %s).", va.Spec.NodeName, va.Name)
		}
	}
	return l
}

// aboutResize is what Kubernetes says of a size that is being changed.
func (f *facts) aboutResize() findings {
	var l findings
	for _, c := range f.claim.value.Status.Conditions {
		if c.Status != corev1.ConditionTrue {
			continue
		}
		next := "The resizer of the driver goes on by itself."
		if c.Type == corev1.PersistentVolumeClaimFileSystemResizePending {
			next = "The kubelet resizes the file system once a pod with the claim runs."
		}
		l.add(Waiting, "size", next, "Condition %s has held %s: %s", c.Type, f.since(c.LastTransitionTime.Time), sentence(c.Message))
	}
	return l
}
