// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"errors"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// Parameters of --extra-modify-metadata.
const (
	parameterClaim     = volumerules.ParameterPrefix + "pvc/name"
	parameterNamespace = volumerules.ParameterPrefix + "pvc/namespace"
	parameterVolume    = volumerules.ParameterPrefix + "pv/name"
)

// source is the volume of a PersistentVolume for the driver.
type source struct {
	spec                       *corev1.PersistentVolumeSpec
	migrated                   bool // the PersistentVolume has an in-tree source (CSI migration)
	expandSecret, modifySecret *corev1.SecretReference
}

// source returns the volume of pv.
func (d driver) source(pv *corev1.PersistentVolume) (source, error) {
	translated, migrated, err := migration.ToCSI(pv)
	if err != nil {
		return source{}, err
	}
	src := source{spec: &translated.Spec, migrated: migrated}
	if src.spec.CSI == nil || src.spec.CSI.VolumeHandle == "" {
		return source{}, errors.New("empty volume handle")
	}
	src.expandSecret = src.spec.CSI.ControllerExpandSecretRef
	src.modifySecret = src.expandSecret
	name, namespace := pv.Annotations[volumerules.AnnModifySecretName], pv.Annotations[volumerules.AnnModifySecretNamespace]
	if name != "" && namespace != "" {
		src.modifySecret = &corev1.SecretReference{Namespace: namespace, Name: name}
	}
	return src, nil
}

// expandRequest returns the request that expands src to size.
func (d driver) expandRequest(src source, size resource.Quantity, secrets map[string]string) (*csi.ControllerExpandVolumeRequest, error) {
	capability, err := volumerules.Capability(src.spec, "", d.singleNodeMultiWriter)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeRequest{
		VolumeId: src.spec.CSI.VolumeHandle, CapacityRange: &csi.CapacityRange{RequiredBytes: size.Value()},
		Secrets: secrets, VolumeCapability: capability,
	}, nil
}

// modifyRequest returns the request that modifies the volume of pv, which src describes, to class.
func (d driver) modifyRequest(
	src source, claim *corev1.PersistentVolumeClaim, class *storagev1.VolumeAttributesClass, secrets map[string]string,
) *csi.ControllerModifyVolumeRequest {
	parameters := maps.Clone(class.Parameters)
	if d.ExtraModifyMetadata {
		if parameters == nil {
			parameters = map[string]string{}
		}
		parameters[parameterClaim], parameters[parameterNamespace] = claim.Name, claim.Namespace
		parameters[parameterVolume] = claim.Spec.VolumeName
	}
	return &csi.ControllerModifyVolumeRequest{VolumeId: src.spec.CSI.VolumeHandle, MutableParameters: parameters, Secrets: secrets}
}

// secretError returns the error for a secret that cannot be read.
func secretError(ref *corev1.SecretReference, err error) error {
	if cause := errors.Unwrap(err); cause != nil { // without the name of the secret
		err = cause
	}
	return fmt.Errorf("error getting secret %s in namespace %s: %w", ref.Name, ref.Namespace, err)
}
