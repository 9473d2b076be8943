// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// pvState holds the state that decideVolume reads.
type pvState struct {
	pv          *corev1.PersistentVolume // nil: deleted
	attachments []*storagev1.VolumeAttachment
	user        string   // another object that needs the volume; "": none
	removable   []string // finalizers of others that may be removed with ours
	removal     removal
	now         time.Time
}

// volumeAction is the one next thing to do for a PersistentVolume.
type volumeAction string

const (
	volumeNothing volumeAction = "nothing"
	volumeChange  volumeAction = "change finalizers" // of finalizers
	volumeWait    volumeAction = "wait"              // for the end of an attachment
	volumeFail    volumeAction = "fail"
	volumeDelete  volumeAction = "delete volume"           // DeleteVolume
	volumeRemove  volumeAction = "delete PersistentVolume" // delete the PersistentVolume
)

type volumeStep struct {
	action volumeAction
	reason string
	err    error              // of volumeFail and volumeWait
	change kube.MetadataPatch // of volumeChange
}

// decideVolume returns the one next step for a PersistentVolume of the driver.
//
// After DeleteVolume the finalizers are removed first and the object is deleted second. In
// the other order every owner of a finalizer would see the object being deleted and write it
// once more. A crash between the two leaves a released PersistentVolume without finalizer,
// for which DeleteVolume is repeated, as the CSI spec allows.
func (d driver) decideVolume(s pvState) volumeStep {
	pv := s.pv
	if pv == nil {
		return volumeStep{action: volumeNothing, reason: "Deleted"}
	}
	protection := []string{storagehelpers.PVDeletionProtectionFinalizer}
	has, deleting := slices.Contains(pv.Finalizers, protection[0]), pv.DeletionTimestamp != nil
	switch {
	case s.removal.volume && (has || len(s.removable) > 0): // an earlier patch may add it late
		finalizers := append(protection, s.removable...)
		return volumeStep{action: volumeChange, reason: "VolumeDeleted", change: kube.MetadataPatch{RemoveFinalizers: finalizers}}
	case s.removal.object:
		return volumeStep{action: volumeNothing, reason: "Deleted"}
	case s.removal.volume && !deleting:
		return volumeStep{action: volumeRemove, reason: "VolumeDeleted"}
	case s.removal.volume:
		return volumeStep{action: volumeNothing, reason: "OtherFinalizers"}
	case !reclaims(pv) && has:
		return volumeStep{action: volumeChange, reason: "Retained", change: kube.MetadataPatch{
			// The cache may be stale: a volume that is to be deleted by now must keep the finalizer.
			Tests:            map[string]any{"/spec/persistentVolumeReclaimPolicy": pv.Spec.PersistentVolumeReclaimPolicy},
			RemoveFinalizers: protection,
		}}
	case !reclaims(pv):
		return volumeStep{action: volumeNothing, reason: "Retained"}
	case deleting && !has:
		return volumeStep{action: volumeNothing, reason: "NotOurs"}
	case pv.Status.Phase == corev1.VolumeBound && !has:
		return volumeStep{action: volumeChange, reason: "Unprotected", change: kube.MetadataPatch{AddFinalizers: protection}}
	case pv.Status.Phase != corev1.VolumeReleased:
		return volumeStep{action: volumeNothing, reason: "InUse"}
	}
	return s.decideReleased(d)
}

// decideReleased returns the step for a PersistentVolume whose volume must be deleted.
func (s pvState) decideReleased(d driver) volumeStep {
	pv := s.pv
	translated, err := d.asCSI(pv)
	switch {
	case err != nil:
		return volumeStep{action: volumeFail, reason: "CannotTranslate", err: err}
	case translated.Spec.CSI == nil || translated.Spec.CSI.Driver != d.name:
		return volumeStep{action: volumeFail, reason: "NotCSI", err: fmt.Errorf(
			"PersistentVolume %q has no source of CSI driver %q", pv.Name, d.name)}
	case !d.caps.CreateDeleteVolume:
		return volumeStep{action: volumeFail, reason: "CannotDelete", err: fmt.Errorf(
			"driver %q does not support deleting volumes: it does not report CONTROLLER_SERVICE and CREATE_DELETE_VOLUME", d.name)}
	case s.user != "":
		return volumeStep{action: volumeFail, reason: "UsedByOther", err: fmt.Errorf(
			"volume %q is not deleted: %s names the same volume. To keep the volume, set the reclaim policy of PersistentVolume %q "+
				"to Retain. To delete the volume, delete the other object first", translated.Spec.CSI.VolumeHandle, s.user, pv.Name)}
	case d.caps.PublishUnpublishVolume && len(s.attachments) > 0:
		va := s.attachments[0]
		return volumeStep{action: volumeWait, reason: "Attached", err: fmt.Errorf(
			"persistentvolume %s is still attached to node %s (VolumeAttachment %q)", pv.Name, va.Spec.NodeName, va.Name)}
	}
	return volumeStep{action: volumeDelete, reason: "Released"}
}
