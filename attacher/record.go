// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Annotations of a VolumeAttachment that allow a detach after the CSINode or the
// PersistentVolume was deleted.
const (
	// annNodeID is the driver's ID of the node of a VolumeAttachment, as csi-attacher writes it: that of the last publish.
	annNodeID = "csi.alpha.kubernetes.io/node-id"
	// annFormerNodeIDs is a JSON list of earlier node IDs to which the volume of a VolumeAttachment may still be published.
	annFormerNodeIDs = "storage-controller.io/former-node-ids"
	// annVolumeHandle is the volume handle of a VolumeAttachment.
	annVolumeHandle = "storage-controller.io/volume-handle"
	// annSecret is NAMESPACE/NAME of the Secret for the detach of a VolumeAttachment.
	annSecret = "storage-controller.io/publish-secret"
	// annMigrated is "true" on the VolumeAttachment of an in-tree volume (CSI migration).
	annMigrated = "storage-controller.io/migrated"
)

// maxFormerNodeIDs is the length of [annFormerNodeIDs]. Before a further ID is added, the volume is unpublished from the oldest.
const maxFormerNodeIDs = 4

// detachAnnotations returns the change that records on a VolumeAttachment what its detach needs.
func detachAnnotations(src source, former []string, nodeID string) kube.MetadataPatch {
	change := kube.MetadataPatch{SetAnnotations: map[string]string{annNodeID: nodeID, annVolumeHandle: src.handle}}
	set := func(annotation, value string, has bool) {
		if has {
			change.SetAnnotations[annotation] = value
		} else {
			change.RemoveAnnotations = append(change.RemoveAnnotations, annotation)
		}
	}
	list, _ := json.Marshal(former) // strings have no error
	secret := ptr.Deref(src.secrets, corev1.SecretReference{})
	set(annFormerNodeIDs, string(list), len(former) > 0)
	set(annSecret, secret.Namespace+"/"+secret.Name, src.secrets != nil)
	set(annMigrated, "true", src.migrated)
	return change
}

// recorded reports whether va has what the detach after the publish of st needs.
func (d driver) recorded(va *storagev1.VolumeAttachment, st step) bool {
	handle, nodeID := Recorded(va)
	return slices.Contains(va.Finalizers, d.finalizer) && handle == st.source.handle && nodeID == st.nodeID
}

// sameRecord returns tests that fail if va is outdated and another leader has recorded node IDs on it.
func sameRecord(va *storagev1.VolumeAttachment) map[string]any {
	tests := map[string]any{}
	for _, name := range []string{annNodeID, annFormerNodeIDs} {
		tests[kube.AnnotationPath(name)] = nil
		if value, ok := va.Annotations[name]; ok {
			tests[kube.AnnotationPath(name)] = value
		}
	}
	return tests
}

// missingRecord returns the change that records on va, which csi-attacher has published, what its detach needs of pv. It
// returns nil if nothing is missing.
func (d driver) missingRecord(va *storagev1.VolumeAttachment, pv *corev1.PersistentVolume) *kube.MetadataPatch {
	if va == nil || !d.mayBePublished(va) || va.Annotations[annVolumeHandle] != "" || va.Annotations[annNodeID] == "" {
		return nil
	}
	src, err := d.resolve(va, pv)
	if err != nil {
		return nil
	}
	change := detachAnnotations(src, nil, va.Annotations[annNodeID])
	return &change
}

// mayBePublished reports whether the volume of va was or is being published, and not unpublished yet.
func (d driver) mayBePublished(va *storagev1.VolumeAttachment) bool {
	return va.Spec.Attacher == d.name && slices.Contains(va.Finalizers, d.finalizer)
}

// showsResult reports whether the status shows the result of the call, also if the response to its write was lost.
func (s attachmentState) showsResult() bool {
	va := s.attachment
	return va != nil && va.Status.Attached && va.DeletionTimestamp == nil
}

// recordedNodeIDs returns the node IDs to which the volume of va may be published, that of the last publish at the end. Both
// this attacher and csi-attacher record an ID before they publish to it.
func recordedNodeIDs(va *storagev1.VolumeAttachment) (ids []string, err error) {
	if former := va.Annotations[annFormerNodeIDs]; former != "" {
		if err := json.Unmarshal([]byte(former), &ids); err != nil {
			return nil, fmt.Errorf("reading annotation %s of VolumeAttachment %q: %w. Correct it: it is a JSON list of node IDs",
				annFormerNodeIDs, va.Name, err)
		}
	}
	last := va.Annotations[annNodeID]
	// A request without a node ID unpublishes the volume from all nodes.
	ids = slices.DeleteFunc(ids, func(id string) bool { return id == last || id == "" })
	if last != "" {
		ids = append(ids, last)
	}
	return ids, nil
}

// detachNodeIDs returns the node IDs from which the volume has to be unpublished: those that were recorded by the attach,
// whatever the CSINode says now, except those that this sync has unpublished it from. An attachment without a record, which
// another component created with the finalizer, has the ID of the CSINode.
func (d driver) detachNodeIDs(s attachmentState) ([]string, error) {
	ids, err := recordedNodeIDs(s.attachment)
	if err != nil {
		return nil, err
	}
	if len(ids) == 0 {
		id, err := d.nodeID(s)
		return []string{id}, err
	}
	former := slices.DeleteFunc(ids[:len(ids)-1], func(id string) bool { return slices.Contains(s.unpublished, id) })
	return append(former, ids[len(ids)-1]), nil
}

// formerNodeIDs returns the node IDs other than nodeID to which the volume may be published.
func (d driver) formerNodeIDs(s attachmentState, nodeID string) ([]string, error) {
	if !slices.Contains(s.attachment.Finalizers, d.finalizer) {
		return nil, nil // it was not published yet
	}
	ids, err := recordedNodeIDs(s.attachment)
	return slices.DeleteFunc(ids, func(id string) bool { return id == nodeID || slices.Contains(s.unpublished, id) }), err
}

// Recorded returns the volume handle and the node ID that an attach recorded on va for its detach; "" for each that is missing.
func Recorded(va *storagev1.VolumeAttachment) (handle, nodeID string) {
	return va.Annotations[annVolumeHandle], va.Annotations[annNodeID]
}
