// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
)

// Errors of the access modes of a PersistentVolume. The texts are those of csi-attacher, because
// scripts and alerts match them.
//
//lint:file-ignore ST1005 upstream's texts are capitalized
var (
	errExclusiveMode = errors.New("Kubernetes does not support use of ReadWriteOncePod with other access modes " +
		"on the same PersistentVolume")
	errMixedModes = errors.New("CSI does not support ReadOnlyMany and ReadWriteOnce on the same PersistentVolume")
)

// Capability returns the capability of a volume for calls of the controller service. fsType
// is the default file system; singleNodeMultiWriter is the capability of the driver.
func Capability(spec *corev1.PersistentVolumeSpec, fsType string, singleNodeMultiWriter bool) (*csi.VolumeCapability, error) {
	mode, err := AccessMode(spec.AccessModes, singleNodeMultiWriter)
	if err != nil {
		return nil, err
	}
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if IsBlock(spec.VolumeMode) {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		return c, nil
	}
	if spec.CSI != nil && spec.CSI.FSType != "" {
		fsType = spec.CSI.FSType
	}
	c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: spec.MountOptions}}
	return c, nil
}

// AccessMode returns the access mode of a request: the most permissive of modes.
func AccessMode(
	modes []corev1.PersistentVolumeAccessMode, singleNodeMultiWriter bool,
) (csi.VolumeCapability_AccessMode_Mode, error) {
	has := func(m corev1.PersistentVolumeAccessMode) bool { return slices.Contains(modes, m) }
	writer, exclusive := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	if singleNodeMultiWriter {
		writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		exclusive = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	}
	switch {
	case has(corev1.ReadWriteOncePod):
		if slices.ContainsFunc(modes, func(m corev1.PersistentVolumeAccessMode) bool { return m != corev1.ReadWriteOncePod }) {
			return 0, errExclusiveMode
		}
		return exclusive, nil
	case has(corev1.ReadWriteMany):
		return csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, nil
	case has(corev1.ReadOnlyMany) && has(corev1.ReadWriteOnce):
		return 0, errMixedModes
	case has(corev1.ReadOnlyMany):
		return csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, nil
	case has(corev1.ReadWriteOnce):
		return writer, nil
	}
	return 0, fmt.Errorf("unsupported AccessMode combination: %v", modes)
}
