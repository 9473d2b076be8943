// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// AnnAllowModeChange on a VolumeSnapshotContent permits a claim with another volume mode (KEP-3141).
const AnnAllowModeChange = "snapshot.storage.kubernetes.io/allow-volume-mode-change"

// BoundContent returns the name of the VolumeSnapshotContent of a snapshot. It returns an error if
// the snapshot cannot be restored. A snapshot that is being deleted can be restored while the
// finalizer of the provisioner keeps it.
func BoundContent(s *snapshotv1.VolumeSnapshot) (string, error) {
	switch {
	case s.DeletionTimestamp != nil && !slices.Contains(s.Finalizers, kube.SnapshotProtection):
		return "", errors.New("it is being deleted")
	case s.Status == nil || ptr.Deref(s.Status.BoundVolumeSnapshotContentName, "") == "":
		return "", errors.New("it is not bound to a VolumeSnapshotContent yet")
	}
	return *s.Status.BoundVolumeSnapshotContentName, nil
}

// SnapshotContent returns the content source of a claim that restores a snapshot of driver (CSI
// spec, "VolumeContentSource"). content is the VolumeSnapshotContent that the snapshot names.
// keepMode refuses a claim with another volume mode, unless an administrator permitted it.
func SnapshotContent(
	driver string, s *snapshotv1.VolumeSnapshot, content *snapshotv1.VolumeSnapshotContent,
	claim *corev1.PersistentVolumeClaim, keepMode bool,
) (*csi.VolumeContentSource, error) {
	ref := content.Spec.VolumeSnapshotRef
	switch {
	case ref.UID != s.UID || ref.Namespace != s.Namespace || ref.Name != s.Name:
		return nil, fmt.Errorf("its VolumeSnapshotContent %q is bound to another snapshot, %s/%s with UID %q",
			content.Name, ref.Namespace, ref.Name, ref.UID)
	case content.Spec.Driver != driver:
		return nil, fmt.Errorf("it belongs to driver %q, not to %q", content.Spec.Driver, driver)
	case s.Status == nil || !ptr.Deref(s.Status.ReadyToUse, false):
		return nil, errors.New("it is not ready to use yet")
	case content.Status == nil || ptr.Deref(content.Status.SnapshotHandle, "") == "":
		return nil, fmt.Errorf("its VolumeSnapshotContent %q has no snapshot handle", content.Name)
	}
	if size := s.Status.RestoreSize; size != nil {
		if requested := claim.Spec.Resources.Requests[corev1.ResourceStorage]; requested.Cmp(*size) < 0 {
			return nil, fmt.Errorf(
				"the claim requests %s, less than the restore size %s of the snapshot", requested.String(), size.String(),
			)
		}
	}
	if keepMode {
		if err := checkModeChange(content, claim); err != nil {
			return nil, err
		}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: *content.Status.SnapshotHandle},
	}}, nil
}

// checkModeChange refuses to restore a block volume as a file system, and the reverse, unless an
// administrator permitted it.
func checkModeChange(content *snapshotv1.VolumeSnapshotContent, claim *corev1.PersistentVolumeClaim) error {
	from, to := content.Spec.SourceVolumeMode, claim.Spec.VolumeMode
	if from == nil || to == nil || *from == *to {
		return nil
	}
	difference := fmt.Sprintf("volume mode %s of the claim differs from %s of the snapshot", *to, *from)
	value, ok := content.Annotations[AnnAllowModeChange]
	if !ok {
		return fmt.Errorf(
			"%s, and VolumeSnapshotContent %q lacks annotation %s, which permits that", difference, content.Name, AnnAllowModeChange,
		)
	}
	allowed, err := strconv.ParseBool(value)
	switch {
	case err != nil:
		return fmt.Errorf("%s, and annotation %s of VolumeSnapshotContent %q is %q, neither true nor false",
			difference, AnnAllowModeChange, content.Name, value)
	case !allowed:
		return fmt.Errorf("%s, which annotation %s of VolumeSnapshotContent %q forbids", difference, AnnAllowModeChange, content.Name)
	}
	return nil
}

// CheckClone returns an error if source cannot be cloned for claim. A source that is being deleted
// can be cloned while the finalizer of the provisioner keeps it: that finalizer stays while claims wait for clones.
func CheckClone(source, claim *corev1.PersistentVolumeClaim) error {
	requested, size := claim.Spec.Resources.Requests[corev1.ResourceStorage], source.Spec.Resources.Requests[corev1.ResourceStorage]
	switch {
	case source.DeletionTimestamp != nil && !slices.Contains(source.Finalizers, kube.CloningProtection):
		return errors.New("it is being deleted")
	case source.Status.Phase != corev1.ClaimBound:
		return fmt.Errorf("it is %s, not Bound", source.Status.Phase)
	case source.Spec.StorageClassName == nil || claim.Spec.StorageClassName == nil:
		return errors.New("both claims need spec.storageClassName")
	case requested.Cmp(size) < 0:
		return fmt.Errorf("the claim requests %s, less than the %s of the source", requested.String(), size.String())
	case source.Spec.VolumeName == "":
		return errors.New("it has no volume")
	}
	return nil
}

// CloneContent returns the content source of a claim that clones source, which has the volume pv
// of driver. pv has a CSI source, also if its volume was migrated.
func CloneContent(driver string, source *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) (
	*csi.VolumeContentSource, error,
) {
	volume := fmt.Sprintf("PersistentVolume %q of the source", pv.Name)
	switch ref := pv.Spec.ClaimRef; {
	case pv.Spec.CSI == nil:
		return nil, fmt.Errorf("%s is not a CSI volume", volume)
	case pv.Spec.CSI.Driver != driver:
		return nil, fmt.Errorf("%s belongs to driver %q, not to %q", volume, pv.Spec.CSI.Driver, driver)
	case ref == nil || ref.UID != source.UID || ref.Namespace != source.Namespace || ref.Name != source.Name:
		return nil, fmt.Errorf("%s is not bound to it", volume)
	case pv.Status.Phase != corev1.VolumeBound:
		return nil, fmt.Errorf("%s is %s, not Bound", volume, pv.Status.Phase)
	case IsBlock(pv.Spec.VolumeMode) != IsBlock(claim.Spec.VolumeMode):
		return nil, errors.New("the volume modes of the claim and of the source differ")
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: pv.Spec.CSI.VolumeHandle},
	}}, nil
}

// IsBlock reports whether a volume mode is Block. The default is Filesystem.
func IsBlock(mode *corev1.PersistentVolumeMode) bool {
	return mode != nil && *mode == corev1.PersistentVolumeBlock
}
