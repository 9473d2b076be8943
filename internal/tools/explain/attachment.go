package explain

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/migration"
)

// reportAttachment says why a VolumeAttachment is in its state.
func reportAttachment(f *facts) Report {
	va := f.attachment.value
	var l findings
	l = append(l, f.aboutProcess([]string{"attacher"}, []string{"csi-attacher-va"}, va.Name, f.handle())...)
	l = append(l, f.aboutAttaching()...)
	l = append(l, f.aboutAttachedVolume()...)
	l = append(l, f.aboutAttachedNode()...)
	l = append(l, f.aboutSecrets()...)
	l = append(l, f.aboutDriver(roleAttacher)...)
	r := Report{
		Kind: KindAttachment, Name: va.Name, Driver: f.driver, Findings: l, State: f.stateOfAttachment(),
		Finalizers: finalizersOf(KindAttachment, va.Finalizers, f.driver), Next: l.next(f.afterAttachment()),
	}
	r.Events, r.EventsUnknown = f.eventsOf()
	return r
}

func (f *facts) stateOfAttachment() string {
	va := f.attachment.value
	volume := "a volume that is written in it"
	if name := volumeOf(va); name != "" {
		volume = fmt.Sprintf("PersistentVolume %q", name)
	}
	state := "not attached"
	if va.Status.Attached {
		state = "attached"
	}
	text := fmt.Sprintf("The attachment of %s to node %q is %s, and was created %s", volume, va.Spec.NodeName, state, f.ago(va.CreationTimestamp.Time))
	if va.DeletionTimestamp != nil {
		text += fmt.Sprintf("; it was deleted %s", f.ago(va.DeletionTimestamp.Time))
	}
	return text + "."
}

func (f *facts) afterAttachment() string {
	if f.attachment.value.Status.Attached {
		return "Nothing is left to do: the kubelet of the node can use the volume; kube-controller-manager deletes the attachment when no pod does any more."
	}
	return "The attacher goes on with the attachment."
}

// aboutAttaching is the last attempt, and what the attacher does next.
func (f *facts) aboutAttaching() findings {
	var l findings
	va := f.attachment.value
	status := va.Status
	mend := "; " + lower(admin) + " mends what the error says."
	if va.DeletionTimestamp != nil {
		switch {
		case !slices.ContainsFunc(finalizersOf(KindAttachment, va.Finalizers, f.driver), func(z Finalizer) bool { return z.Name == attacherFinalizer(f.driver) }):
			l.add(Waiting, "attachment", "Whoever removes the other finalizers does so; the attacher is done.", "The attachment was deleted, and the attacher has removed its finalizer: the volume is detached.")
		case status.DetachError != nil:
			l.add(Failing, "attachment", "The attacher tries again to detach the volume (ControllerUnpublishVolume)"+mend,
				"Detaching failed %s: %s", f.ago(status.DetachError.Time.Time), sentence(status.DetachError.Message))
		default:
			l.add(Waiting, "attachment", "The attacher detaches the volume (ControllerUnpublishVolume), and removes its finalizer.", "The attachment was deleted, and the volume is not detached yet.")
		}
		return l
	}
	switch {
	case status.Attached:
		l.add(Fine, "attachment", "", "The volume is attached.")
	case status.AttachError != nil:
		l.add(Failing, "attachment", "The attacher tries again to attach the volume (ControllerPublishVolume)"+mend,
			"Attaching failed %s: %s", f.ago(status.AttachError.Time.Time), sentence(status.AttachError.Message))
	case !f.attaches():
		l.add(Waiting, "attachment", "kube-controller-manager deletes the attachment, which driver "+f.driver+" does not need.", "Driver %s does not attach volumes (attachRequired of its CSIDriver is false).", f.driver)
	default:
		l.add(Waiting, "attachment", "The attacher attaches the volume (ControllerPublishVolume).", "The volume is not attached yet, and no attempt has failed.")
	}
	return l
}

// aboutAttachedVolume is the volume of an attachment, and where else it is attached.
func (f *facts) aboutAttachedVolume() findings {
	var l findings
	name := volumeOf(f.attachment.value)
	deleting := f.attachment.value.DeletionTimestamp != nil
	switch {
	case name == "":
		return l
	case f.volume.why != "":
		l.add(Unknown, "volume", "", "PersistentVolume %q: %s.", name, f.volume.why)
		return l
	case f.volume.absent() && deleting:
		l.add(Unknown, "volume", "", "PersistentVolume %q does not exist any more; the attacher detaches by what is noted on the attachment.", name)
		return l
	case f.volume.absent():
		l.add(Blocked, "volume", "Whoever made the attachment deletes it; kube-controller-manager does so for a pod that is gone.", "PersistentVolume %q does not exist.", name)
		return l
	case f.volume.value.DeletionTimestamp != nil && !deleting && !f.attachment.value.Status.Attached:
		l.add(Blocked, "volume", "The owner of the pod deletes it: a volume that is being deleted is not attached any more.", "PersistentVolume %q was deleted %s, and is not gone yet.", name, f.ago(f.volume.value.DeletionTimestamp.Time))
	case migration.DriverOfVolume(f.volume.value) != f.driver && deleting:
		f.aboutForeignDetach(&l)
	case migration.DriverOfVolume(f.volume.value) != f.driver:
		l.add(Blocked, "volume", "Whoever made the attachment deletes it.", "PersistentVolume %q is of driver %q, and the attachment is for %q.", name, migration.DriverOfVolume(f.volume.value), f.driver)
	}
	f.aboutOthers(&l)
	return l
}

// aboutForeignDetach is an attachment that was deleted, to a volume of another driver.
func (f *facts) aboutForeignDetach(l *findings) {
	finalizer := attacherFinalizer(f.driver)
	if !slices.Contains(f.attachment.value.Finalizers, finalizer) {
		return // the attacher has nothing to do with it
	}
	l.add(Failing, "volume", fmt.Sprintf("The attacher of driver %s detaches the volume by what is noted on the attachment, and removes finalizer %s; where nothing is noted it cannot, and %s removes that finalizer once the volume is not attached to node %q.", f.driver, finalizer, lower(admin), f.attachment.value.Spec.NodeName),
		"PersistentVolume %q is of driver %q, and the attachment, which was deleted, is for %q.", f.volume.value.Name, migration.DriverOfVolume(f.volume.value), f.driver)
}

// aboutOthers is the other attachments of a volume that one node may use at a time.
func (f *facts) aboutOthers(l *findings) {
	va := f.attachment.value
	if va.DeletionTimestamp != nil || va.Status.Attached || !oneNode(f.volume.value) {
		return
	}
	for _, other := range f.attachments.value {
		if other.Spec.NodeName != va.Spec.NodeName {
			l.add(Failing, "attachment", fmt.Sprintf("The volume is detached from node %q first, once the pod there is gone: ask `storage-controller explain va %s`.", other.Spec.NodeName, other.Name),
				"The volume may be used on one node at a time, and VolumeAttachment %s has it on node %q.", other.Name, other.Spec.NodeName)
		}
	}
}

// oneNode tells whether pv may be used on one node at a time only.
func oneNode(pv *corev1.PersistentVolume) bool {
	return !slices.ContainsFunc(pv.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
	})
}

// aboutAttachedNode is the node of an attachment, and the driver on it.
func (f *facts) aboutAttachedNode() findings {
	var l findings
	name := f.attachment.value.Spec.NodeName
	deleting := f.attachment.value.DeletionTimestamp != nil
	switch {
	case f.node.why != "":
		l.add(Unknown, "node", "", "Node %q: %s.", name, f.node.why)
	case f.node.absent() && deleting:
		l.add(Fine, "node", "", "Node %q does not exist any more; the attacher detaches by the node ID that is noted on the attachment.", name)
	case f.node.absent():
		l.add(Failing, "node", "kube-controller-manager deletes the attachment once the pods of the node are gone, after six minutes at most; the attacher detaches the volume then.", "Node %q does not exist any more.", name)
	case f.driver != "" && !deleting && !f.attachment.value.Status.Attached:
		f.aboutEntry(&l, Failing, "The attacher tries again by itself; "+lower(admin)+" looks why the node part of driver "+f.driver+" does not run on "+name+".")
	}
	return l
}
