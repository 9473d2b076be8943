// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// attachmentKey identifies a VolumeAttachment. The UID gives a recreated object of the
// same name a back-off of its own.
type attachmentKey struct {
	Name string
	UID  types.UID
}

// String returns the name, for logs and /statusz.
func (k attachmentKey) String() string { return k.Name }

func keyOf(va *storagev1.VolumeAttachment) attachmentKey { return attachmentKey{va.Name, va.UID} }

// nodeOf returns the node of an attachment for [workloop.NewFair], also if it was deleted and has to be undone, else "".
func (t *term) nodeOf(key attachmentKey) string {
	if va, ok := t.c.attachments.Get(key.Name); ok && va.UID == key.UID {
		return va.Spec.NodeName
	}
	if va := t.calls.Get(key.UID).Payload.attachment; va != nil {
		return va.Spec.NodeName
	}
	return ""
}

// isAttach reports whether an attachment is to be attached: a pod waits for it, and for no detach.
func (t *term) isAttach(key attachmentKey) bool {
	va, ok := t.c.attachments.Get(key.Name)
	return ok && va.UID == key.UID && va.DeletionTimestamp == nil
}

// attachmentState is the input of [driver.decide].
type attachmentState struct {
	attachment *storagev1.VolumeAttachment // nil: deleted
	volume     *corev1.PersistentVolume    // nil: deleted, or the attachment has an inline volume
	csiNode    *storagev1.CSINode          // nil: not found
	// outOfSync: ListVolumes reported something else than the status.
	outOfSync bool
	// publishedAtFormer: ListVolumes reported the volume at an ID that the node had when it was published.
	publishedAtFormer bool
	// detaching is an attachment of the volume, which is for one node, to another node. It is being deleted, and its volume may
	// still be published there.
	detaching *storagev1.VolumeAttachment
	// unconfirmed: not yet read from the API server in this term, or not since outOfSync; the cache may be stale.
	unconfirmed bool
	// volumeUnconfirmed: the cache may lack the last writes of an earlier leader to the PersistentVolume.
	volumeUnconfirmed bool
	call              intent.Entry[lastCall]
	liveReads
}

// liveReads holds what earlier steps of the same sync read from the API server, and did at the driver.
type liveReads struct {
	unpublished []string // former node IDs
	secretsRead bool
	secrets     map[string]string
}

// gather reads the caches, including own writes that the watch has not delivered yet.
func (t *term) gather(key attachmentKey, read liveReads) attachmentState {
	s := attachmentState{call: t.calls.Get(key.UID), liveReads: read}
	va, fresh, ok := t.attachments.Fresh(key.Name)
	if !ok || va.UID != key.UID {
		return s
	}
	s.attachment = va
	s.publishedAtFormer, s.outOfSync = t.outOfSync.of(key.UID)
	s.unconfirmed = !fresh
	if name := va.Spec.Source.PersistentVolumeName; name != nil {
		s.volume, fresh, ok = t.volumes.Fresh(*name)
		s.volumeUnconfirmed = ok && !fresh
	}
	if t.c.driver.caps.PublishUnpublishVolume {
		s.csiNode, _ = t.c.csiNodes.Get(va.Spec.NodeName)
		s.detaching = t.detachingFirst(va, s.volume)
	}
	return s
}

// detachingFirst returns an attachment of pv that has to be detached before va is attached, or nil. A volume for a single node
// "can only be published [...] on a single node, at any given time" (CSI spec, "VolumeCapability").
func (t *term) detachingFirst(va *storagev1.VolumeAttachment, pv *corev1.PersistentVolume) *storagev1.VolumeAttachment {
	if va.DeletionTimestamp != nil || pv == nil || !singleNode(pv.Spec.AccessModes) {
		return nil
	}
	for _, cached := range kube.AttachmentsOf(t.c.attachments, pv.Name) {
		other, ok := t.attachments.Get(cached.Name)
		if ok && other.Spec.NodeName != va.Spec.NodeName && other.DeletionTimestamp != nil && t.c.driver.mayBePublished(other) {
			return other
		}
	}
	return nil
}
