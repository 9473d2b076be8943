package provisioner

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// annAllowModeChange on a VolumeSnapshotContent lets a volume of another mode be made of it.
const annAllowModeChange = "snapshot.storage.kubernetes.io/allow-volume-mode-change"

// snapshotContent is what a claim that restores a snapshot asks of the driver (CSI
// spec, "VolumeContentSource"). content is the one that the snapshot names.
func (d driver) snapshotContent(s *snapshotv1.VolumeSnapshot, content *snapshotv1.VolumeSnapshotContent, claim *corev1.PersistentVolumeClaim) (*csi.VolumeContentSource, error) {
	ref := content.Spec.VolumeSnapshotRef
	switch {
	case ref.UID != s.UID || ref.Namespace != s.Namespace || ref.Name != s.Name:
		return nil, fmt.Errorf("its VolumeSnapshotContent %q is bound to another snapshot, %s/%s with UID %q", content.Name, ref.Namespace, ref.Name, ref.UID)
	case content.Spec.Driver != d.name:
		return nil, fmt.Errorf("it is one of driver %q, not of %q", content.Spec.Driver, d.name)
	case s.Status == nil || !ptr.Deref(s.Status.ReadyToUse, false):
		return nil, errors.New("it is not ready to use yet")
	case content.Status == nil || ptr.Deref(content.Status.SnapshotHandle, "") == "":
		return nil, fmt.Errorf("its VolumeSnapshotContent %q has no snapshot handle", content.Name)
	}
	if size := s.Status.RestoreSize; size != nil {
		if asked := claim.Spec.Resources.Requests[corev1.ResourceStorage]; asked.Cmp(*size) < 0 {
			return nil, fmt.Errorf("the claim requests %s, less than the restore size %s of the snapshot", asked.String(), size.String())
		}
	}
	if d.PreventVolumeModeConversion {
		if err := checkModeChange(content, claim); err != nil {
			return nil, err
		}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: *content.Status.SnapshotHandle},
	}}, nil
}

// checkSnapshot refuses a snapshot before its content is read, and names that.
func checkSnapshot(s *snapshotv1.VolumeSnapshot) (content string, err error) {
	switch {
	case s.DeletionTimestamp != nil && !slices.Contains(s.Finalizers, snapshotFinalizer):
		return "", errors.New("it is being deleted")
	case s.Status == nil || ptr.Deref(s.Status.BoundVolumeSnapshotContentName, "") == "":
		return "", errors.New("it is not bound to a VolumeSnapshotContent yet")
	}
	return *s.Status.BoundVolumeSnapshotContentName, nil
}

// checkModeChange refuses a file system made of what was a block device, and the
// reverse, unless an administrator has allowed it (KEP-3141).
func checkModeChange(content *snapshotv1.VolumeSnapshotContent, claim *corev1.PersistentVolumeClaim) error {
	from, to := content.Spec.SourceVolumeMode, claim.Spec.VolumeMode
	if from == nil || to == nil || *from == *to {
		return nil
	}
	what := fmt.Sprintf("volume mode %s of the claim differs from %s of the snapshot", *to, *from)
	value, ok := content.Annotations[annAllowModeChange]
	if !ok {
		return fmt.Errorf("%s, and annotation %s, which would allow that, is missing from VolumeSnapshotContent %q", what, annAllowModeChange, content.Name)
	}
	allowed, err := strconv.ParseBool(value)
	switch {
	case err != nil:
		return fmt.Errorf("%s, and annotation %s of VolumeSnapshotContent %q is %q, neither true nor false", what, annAllowModeChange, content.Name, value)
	case !allowed:
		return fmt.Errorf("%s, which annotation %s of VolumeSnapshotContent %q forbids", what, annAllowModeChange, content.Name)
	}
	return nil
}

// checkCloned refuses a claim as the source of claim. A claim that is being deleted
// can be finished, when its cloning finalizer tells that it was begun before.
func checkCloned(source, claim *corev1.PersistentVolumeClaim, resuming bool) error {
	asked, has := claim.Spec.Resources.Requests[corev1.ResourceStorage], source.Spec.Resources.Requests[corev1.ResourceStorage]
	switch {
	case source.DeletionTimestamp != nil && !(resuming && slices.Contains(source.Finalizers, cloneFinalizer)):
		return errors.New("it is being deleted")
	case source.Status.Phase != corev1.ClaimBound:
		return fmt.Errorf("it is %s, not Bound", source.Status.Phase)
	case source.Spec.StorageClassName == nil || claim.Spec.StorageClassName == nil:
		return errors.New("both claims need spec.storageClassName")
	case asked.Cmp(has) < 0:
		return fmt.Errorf("the claim requests %s, less than the %s of the source", asked.String(), has.String())
	case source.Spec.VolumeName == "":
		return errors.New("it has no volume")
	}
	return nil
}

// clonedContent is what a claim that clones another asks of the driver. pv is the
// volume of source, and has a CSI source already if it had one of a built-in plugin.
func (d driver) clonedContent(source *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) (*csi.VolumeContentSource, error) {
	what := fmt.Sprintf("PersistentVolume %q of the source", pv.Name)
	switch ref := pv.Spec.ClaimRef; {
	case pv.Spec.CSI == nil:
		return nil, fmt.Errorf("%s is not a CSI volume", what)
	case pv.Spec.CSI.Driver != d.name:
		return nil, fmt.Errorf("%s is one of driver %q, not of %q", what, pv.Spec.CSI.Driver, d.name)
	case ref == nil || ref.UID != source.UID || ref.Namespace != source.Namespace || ref.Name != source.Name:
		return nil, fmt.Errorf("%s is not bound to it", what)
	case pv.Status.Phase != corev1.VolumeBound:
		return nil, fmt.Errorf("%s is %s, not Bound", what, pv.Status.Phase)
	case isBlock(pv.Spec.VolumeMode) != isBlock(claim.Spec.VolumeMode):
		return nil, errors.New("the volume modes of the claim and of the source differ")
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: pv.Spec.CSI.VolumeHandle},
	}}, nil
}
