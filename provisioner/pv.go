package provisioner

import (
	"errors"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

var (
	errNoVolume = errors.New("the driver answered without a volume, or with one that has no ID; this is a defect of the driver")
	// errUnusable is a volume that is to be deleted again.
	errUnusable = errors.New("the volume that the driver made cannot be used")
)

// checkVolume refuses a volume that the claim cannot be given.
func checkVolume(request *csi.CreateVolumeRequest, v *csi.Volume) error {
	required := request.GetCapacityRange().GetRequiredBytes()
	switch {
	case v.GetVolumeId() == "":
		return errNoVolume
	case v.GetCapacityBytes() != 0 && v.GetCapacityBytes() < required:
		return fmt.Errorf("%w: it is smaller than what was asked for, %d bytes instead of %d", errUnusable, v.GetCapacityBytes(), required)
	case request.GetVolumeContentSource() != nil && v.GetContentSource() == nil:
		return fmt.Errorf("%w: the driver does not confirm that it has the content of the source; this is a defect of the driver", errUnusable)
	}
	return nil
}

// volumeOf is the PersistentVolume of a claim for the volume that the driver made. It
// fails only for a volume that is to have the source of a built-in plugin.
func (d driver) volumeOf(claim *corev1.PersistentVolumeClaim, request *csi.CreateVolumeRequest, p plan, v *csi.Volume) (*corev1.PersistentVolume, error) {
	capacity := v.GetCapacityBytes()
	if capacity == 0 { // unknown to the driver
		capacity = request.GetCapacityRange().GetRequiredBytes()
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: p.VolumeName, Annotations: volumeAnnotations(p.Provisioner, p.Secrets)},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:      p.AccessModes,
			Capacity:         corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(capacity, resource.BinarySI)},
			MountOptions:     p.MountOptions,
			StorageClassName: p.ClassName,
			VolumeMode:       p.VolumeMode,
			ClaimRef: &corev1.ObjectReference{
				Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: claim.Namespace, Name: claim.Name,
				UID: claim.UID, ResourceVersion: claim.ResourceVersion,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: d.name, VolumeHandle: v.GetVolumeId(), FSType: p.FSType, VolumeAttributes: map[string]string{identityAttribute: d.identity},
				ReadOnly:                   d.ControllerPublishReadonly && onlyRead(request.GetVolumeCapabilities()),
				ControllerPublishSecretRef: p.Secrets.ControllerPublish, NodeStageSecretRef: p.Secrets.NodeStage,
				NodePublishSecretRef: p.Secrets.NodePublish, ControllerExpandSecretRef: p.Secrets.ControllerExpand,
				NodeExpandSecretRef: p.Secrets.NodeExpand,
			}},
		},
	}
	if p.AttributesClass != "" {
		pv.Spec.VolumeAttributesClassName = &p.AttributesClass
	}
	maps.Copy(pv.Spec.CSI.VolumeAttributes, v.GetVolumeContext())
	if p.ReclaimPolicy != nil {
		pv.Spec.PersistentVolumeReclaimPolicy = *p.ReclaimPolicy
	}
	if reclaims(pv) {
		pv.Finalizers = []string{volumeFinalizer}
	}
	if d.topology {
		pv.Spec.NodeAffinity = affinity(v.GetAccessibleTopology())
	}
	if p.Migrated {
		return migration.ToInTree(pv)
	}
	return pv, nil
}

// reclaims tells whether the volume is deleted with its claim. No policy means
// Delete, as it does for a class.
func reclaims(pv *corev1.PersistentVolume) bool {
	policy := pv.Spec.PersistentVolumeReclaimPolicy
	return policy == "" || policy == corev1.PersistentVolumeReclaimDelete
}

func volumeAnnotations(provisioner string, secrets volumerules.Secrets) map[string]string {
	annotations := map[string]string{
		storagehelpers.AnnDynamicallyProvisioned: provisioner,
		// Both are there in any case: empty ones tell that no secret is needed.
		annDeletionSecretName: "", annDeletionSecretNamespace: "",
	}
	if s := secrets.Provisioner; s != nil {
		annotations[annDeletionSecretName], annotations[annDeletionSecretNamespace] = s.Name, s.Namespace
	}
	if s := secrets.ControllerModify; s != nil {
		annotations[annModifySecretName], annotations[annModifySecretNamespace] = s.Name, s.Namespace
	}
	return annotations
}

func onlyRead(caps []*csi.VolumeCapability) bool {
	return len(caps) == 1 && caps[0].GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
}
