// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Annotations of a VolumeAttachment that allow a detach after the CSINode or the
// PersistentVolume was deleted.
const (
	// annNodeID is the driver's ID of the node of a VolumeAttachment, as csi-attacher writes it.
	annNodeID = "csi.alpha.kubernetes.io/node-id"
	// annVolumeHandle is the volume handle of a VolumeAttachment.
	annVolumeHandle = "storage-controller.io/volume-handle"
	// annSecret is NAMESPACE/NAME of the Secret for the detach of a VolumeAttachment.
	annSecret = "storage-controller.io/publish-secret"
	// annMigrated is "true" on the VolumeAttachment of an in-tree volume (CSI migration).
	annMigrated = "storage-controller.io/migrated"
)

// detachAnnotations returns the change that records on a VolumeAttachment what its detach
// needs.
func detachAnnotations(src source, nodeID string) kube.MetadataPatch {
	change := kube.MetadataPatch{SetAnnotations: map[string]string{annNodeID: nodeID, annVolumeHandle: src.handle}}
	if src.secrets != nil {
		change.SetAnnotations[annSecret] = src.secrets.Namespace + "/" + src.secrets.Name
	} else {
		change.RemoveAnnotations = append(change.RemoveAnnotations, annSecret)
	}
	if src.migrated {
		change.SetAnnotations[annMigrated] = "true"
	} else {
		change.RemoveAnnotations = append(change.RemoveAnnotations, annMigrated)
	}
	return change
}

// detachSource returns the volume to unpublish. It comes from the annotations when the
// PersistentVolume was deleted or a different one has its name now.
func (d driver) detachSource(s attachmentState) (source, error) {
	src, err := d.resolve(s.attachment, s.volume)
	handle := s.attachment.Annotations[annVolumeHandle]
	if s.attachment.Spec.Source.PersistentVolumeName == nil || handle == "" || err == nil && src.handle == handle {
		return src, err
	}
	src = source{handle: handle, migrated: s.attachment.Annotations[annMigrated] == "true"}
	if namespace, name, ok := strings.Cut(s.attachment.Annotations[annSecret], "/"); ok {
		src.secrets = &corev1.SecretReference{Namespace: namespace, Name: name}
	}
	return src, nil
}

// detachNodeID returns the driver's ID of the node, or the one recorded by the attach if
// the driver is not registered on the node anymore.
func (d driver) detachNodeID(s attachmentState) (string, error) {
	id, err := d.nodeID(s)
	if recorded := s.attachment.Annotations[annNodeID]; err != nil && recorded != "" {
		return recorded, nil
	}
	return id, err
}
