// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// volumeOf returns the PersistentVolume for a created volume, with its CSI source.
func (d driver) volumeOf(o operation, v *csi.Volume) *corev1.PersistentVolume {
	claim, p := o.claim, o.plan
	capacity := v.GetCapacityBytes()
	if capacity == 0 { // the driver does not know it
		capacity = o.request.GetCapacityRange().GetRequiredBytes()
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
			NodeAffinity: d.affinityOf(v),
		},
	}
	if p.AttributesClass != "" {
		pv.Spec.VolumeAttributesClassName = &p.AttributesClass
	}
	if p.ReclaimPolicy != nil {
		pv.Spec.PersistentVolumeReclaimPolicy = *p.ReclaimPolicy
	}
	if reclaims(pv) {
		pv.Finalizers = []string{storagehelpers.PVDeletionProtectionFinalizer}
	}
	if p.Migrated { // kube-controller-manager would add the annotation later
		pv.Annotations[storagehelpers.AnnMigratedTo] = d.name
	}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{
		Driver: d.name, VolumeHandle: v.GetVolumeId(), FSType: p.FSType,
		VolumeAttributes:           map[string]string{identityAttribute: d.identity},
		ReadOnly:                   d.ControllerPublishReadonly && onlyRead(o.request.GetVolumeCapabilities()),
		ControllerPublishSecretRef: p.Secrets.ControllerPublish, NodeStageSecretRef: p.Secrets.NodeStage,
		NodePublishSecretRef: p.Secrets.NodePublish, ControllerExpandSecretRef: p.Secrets.ControllerExpand,
		NodeExpandSecretRef: p.Secrets.NodeExpand,
	}
	maps.Copy(pv.Spec.CSI.VolumeAttributes, v.GetVolumeContext())
	return pv
}

// reclaims reports whether the volume is deleted when its claim is deleted. An empty policy means
// Delete, as in a StorageClass.
func reclaims(pv *corev1.PersistentVolume) bool {
	policy := pv.Spec.PersistentVolumeReclaimPolicy
	return policy == "" || policy == corev1.PersistentVolumeReclaimDelete
}

func volumeAnnotations(provisioner string, secrets volumerules.Secrets) map[string]string {
	annotations := map[string]string{
		storagehelpers.AnnDynamicallyProvisioned: provisioner,
		// Empty annotations mean that no secret is needed. If they are missing, the class decides.
		volumerules.AnnDeletionSecretName: "", volumerules.AnnDeletionSecretNamespace: "",
	}
	if s := secrets.Provisioner; s != nil {
		annotations[volumerules.AnnDeletionSecretName], annotations[volumerules.AnnDeletionSecretNamespace] = s.Name, s.Namespace
	}
	if s := secrets.ControllerModify; s != nil {
		annotations[volumerules.AnnModifySecretName], annotations[volumerules.AnnModifySecretNamespace] = s.Name, s.Namespace
	}
	return annotations
}

func onlyRead(caps []*csi.VolumeCapability) bool {
	return len(caps) == 1 && caps[0].GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
}
