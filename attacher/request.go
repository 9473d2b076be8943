// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// source identifies the volume of a VolumeAttachment.
type source struct {
	handle   string
	secrets  *corev1.SecretReference // nil: none
	inline   bool                    // spec.source.inlineVolumeSpec
	migrated bool                    // the PersistentVolume has an in-tree source (CSI migration)
	// spec is nil if the source comes from the annotations of the VolumeAttachment, which
	// is enough to detach.
	spec *corev1.PersistentVolumeSpec
}

// args identifies the volume of va in its calls. The handle of an in-tree volume depends on the labels of the PersistentVolume.
func (src source) args(va *storagev1.VolumeAttachment) string {
	if src.migrated {
		return *va.Spec.Source.PersistentVolumeName
	}
	return src.handle
}

// Errors of a VolumeAttachment's spec. The texts are those of csi-attacher, because scripts
// and alerts match them.
//
//lint:file-ignore ST1005 upstream's texts are capitalized
var (
	errBothSources      = errors.New("both InlineCSIVolumeSource and PersistentVolumeName specified in VA source")
	errNoSource         = errors.New("neither InlineCSIVolumeSource nor PersistentVolumeName specified in VA source")
	errInlineWithoutCSI = errors.New("inline volume spec contains nil CSI source")
	errNotCSI           = errors.New("pv spec contained non-csi source that was not migrated")
)

// resolve returns the volume of va. pv is the PersistentVolume that va names, nil if it
// does not exist.
func (d driver) resolve(va *storagev1.VolumeAttachment, pv *corev1.PersistentVolume) (source, error) {
	name, inline := va.Spec.Source.PersistentVolumeName, va.Spec.Source.InlineVolumeSpec
	switch {
	case name != nil && inline != nil:
		return source{}, errBothSources
	case name == nil && inline == nil:
		return source{}, errNoSource
	case inline != nil && inline.CSI == nil:
		return source{}, errInlineWithoutCSI
	case inline != nil:
		src, err := d.sourceOf(inline, "")
		src.inline = true
		return src, err
	case pv == nil:
		return source{}, volumeNotFound(*name)
	}
	translated, migrated, err := migration.ToCSI(pv)
	if err != nil {
		return source{}, err
	}
	src, err := d.sourceOf(&translated.Spec, pv.Name)
	src.migrated = migrated
	return src, err
}

// sourceOf returns the volume of spec. pv is the name of the PersistentVolume, empty for an
// inline volume.
func (d driver) sourceOf(spec *corev1.PersistentVolumeSpec, pv string) (source, error) {
	switch {
	case spec.CSI == nil:
		return source{}, errNotCSI
	case spec.CSI.Driver != d.name:
		volume := "inline volume"
		if pv != "" {
			volume = fmt.Sprintf("PersistentVolume %q", pv)
		}
		return source{}, fmt.Errorf("%s belongs to CSI driver %q, spec.attacher is %q", volume, spec.CSI.Driver, d.name)
	}
	return source{handle: spec.CSI.VolumeHandle, secrets: spec.CSI.ControllerPublishSecretRef, spec: spec}, nil
}

// singleNode reports whether a volume with these access modes, which are valid, is for a single node.
func singleNode(modes []corev1.PersistentVolumeAccessMode) bool {
	return !slices.Contains(modes, corev1.ReadWriteMany) && !slices.Contains(modes, corev1.ReadOnlyMany)
}

func volumeNotFound(name string) error { return fmt.Errorf("persistentvolume %q not found", name) }

// publishRequest returns the request that attaches src to the node with that node ID.
func (d driver) publishRequest(src source, nodeID string, secrets map[string]string) (*csi.ControllerPublishVolumeRequest, error) {
	capability, err := volumerules.Capability(src.spec, d.defaultFSType, d.caps.SingleNodeMultiWriter)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         src.handle,
		NodeId:           nodeID,
		VolumeCapability: capability,
		Readonly:         d.caps.PublishReadonly && src.spec.CSI.ReadOnly,
		VolumeContext:    src.spec.CSI.VolumeAttributes,
		Secrets:          secrets,
	}, nil
}
