// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
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

// nodeOf returns the node of an attachment, or "" if it was deleted, for [workloop.NewFair].
func (c *Controller) nodeOf(key attachmentKey) string {
	va, ok := c.attachments.Get(key.Name)
	if !ok || va.UID != key.UID {
		return ""
	}
	return va.Spec.NodeName
}

// attachmentState is the input of [driver.decide].
type attachmentState struct {
	attachment *storagev1.VolumeAttachment // nil: deleted
	volume     *corev1.PersistentVolume    // nil: deleted, or the attachment has an inline volume
	csiNode    *storagev1.CSINode          // nil: not found
	// outOfSync: ListVolumes reported something else than the status.
	outOfSync bool
	// unconfirmed: not yet read from the API server in this term; the cache may be stale.
	unconfirmed bool
	// volumeUnconfirmed: the cache may lack the last writes of an earlier leader to the PersistentVolume.
	volumeUnconfirmed bool
	publication       *publication // of a deleted attachment
	liveReads
}

// liveReads holds what earlier steps of the same sync read from the API server.
type liveReads struct {
	attachmentRead bool
	volumeRead     bool
	secretsRead    bool
	secrets        map[string]string
}

// gather reads the caches, including own writes that the watch has not delivered yet.
func (t *term) gather(key attachmentKey, read liveReads) attachmentState {
	s := attachmentState{liveReads: read}
	va, ok := t.attachments.Get(key.Name)
	if !ok || va.UID != key.UID {
		s.publication = t.publications.of(key.UID)
		return s
	}
	s.attachment, s.outOfSync = va, t.outOfSync.has(key.UID)
	_, confirmed := t.confirmed.Load(key.UID)
	s.unconfirmed = !read.attachmentRead && (!confirmed || s.outOfSync)
	if name := va.Spec.Source.PersistentVolumeName; name != nil {
		var since bool
		s.volume, since, _ = t.volumes.GetSince(*name, t.volumeVersion)
		s.volumeUnconfirmed = s.volume != nil && !since && !read.volumeRead
	}
	if t.c.driver.publishes {
		s.csiNode, _ = t.c.csiNodes.Get(va.Spec.NodeName)
	}
	return s
}
