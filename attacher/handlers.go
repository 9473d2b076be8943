// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
)

// register adds the event handlers that fill the queues.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	add(t.c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{
		Add: t.attachmentAdded, Update: t.attachmentUpdated, Delete: t.attachmentDeleted,
	}))
	add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{
		Add: t.volumeAdded, Update: t.volumeUpdated, Delete: func(pv *corev1.PersistentVolume) { t.pvQueue.Forget(pv.Name) },
	}))
	if t.c.driver.caps.PublishUnpublishVolume {
		add(t.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{Add: t.csiNodeChanged, Update: t.csiNodeUpdated}))
	}
	return registrations
}

// unfinished reports whether va needs a sync.
func (t *term) unfinished(va *storagev1.VolumeAttachment) bool {
	if va.Spec.Attacher != t.c.driver.name {
		return false
	}
	if va.DeletionTimestamp != nil {
		return slices.Contains(va.Finalizers, t.c.driver.finalizer) || t.c.driver.caps.PublishUnpublishVolume && detachedStatus(va) != nil
	}
	return !va.Status.Attached
}

func (t *term) attachmentAdded(va *storagev1.VolumeAttachment) {
	t.outOfSync.recordChange(va.UID)
	if t.unfinished(va) {
		t.vaQueue.Add(keyOf(va))
	}
}

func (t *term) attachmentUpdated(old, va *storagev1.VolumeAttachment) {
	t.outOfSync.recordChange(va.UID)
	if old.UID != va.UID { // deleted and recreated while the watch was interrupted
		t.attachmentDeleted(old)
	}
	if t.c.driver.mayBePublished(old) && !t.c.driver.mayBePublished(va) {
		t.enqueueOthers(va)
	}
	switch unfinished := t.unfinished(va); {
	case unfinished && !t.c.driver.onlyOwnChanges(old, va):
		t.vaQueue.Add(keyOf(va))
	case unfinished: // another component may have undone a write before the watch delivered it; a failed call keeps its back-off
		t.vaQueue.Resync(keyOf(va))
	}
}

func (t *term) attachmentDeleted(va *storagev1.VolumeAttachment) {
	// Also of a planned call: it may be sent before the next sync.
	if t.calls.Get(va.UID).State.InProgress() {
		t.vaQueue.Add(keyOf(va))
	} else {
		t.vaQueue.Forget(keyOf(va))
	}
	t.outOfSync.recordChange(va.UID)
	t.outOfSync.remove(va.UID)
	if name := va.Spec.Source.PersistentVolumeName; name != nil {
		if pv, ok := t.c.volumes.Get(*name); ok {
			t.volumeChanged(pv)
		}
	}
	t.enqueueOthers(va)
}

// enqueueOthers enqueues the attachments that may wait for the detach of va, see [term.detachingFirst].
func (t *term) enqueueOthers(va *storagev1.VolumeAttachment) {
	name := va.Spec.Source.PersistentVolumeName
	if name == nil {
		return
	}
	if pv, ok := t.c.volumes.Get(*name); !ok || !singleNode(pv.Spec.AccessModes) {
		return
	}
	for _, other := range kube.AttachmentsOf(t.c.attachments, *name) {
		if other.DeletionTimestamp == nil && other.UID != va.UID {
			t.attachmentAdded(other)
		}
	}
}

// volumeAdded also enqueues the attachments that failed because pv did not exist.
func (t *term) volumeAdded(pv *corev1.PersistentVolume) {
	for _, va := range kube.AttachmentsOf(t.c.attachments, pv.Name) {
		t.attachmentAdded(va)
	}
	t.volumeChanged(pv)
}

// volumeUpdated also enqueues the attachments that failed for a field that a user can correct in an existing PersistentVolume.
func (t *term) volumeUpdated(old, pv *corev1.PersistentVolume) {
	if old.UID != pv.UID || !slices.Equal(old.Spec.AccessModes, pv.Spec.AccessModes) ||
		!slices.Equal(old.Spec.MountOptions, pv.Spec.MountOptions) || migration.IsInTree(pv) && !maps.Equal(old.Labels, pv.Labels) {
		t.volumeAdded(pv)
		return
	}
	t.volumeChanged(pv)
}

func (t *term) volumeChanged(pv *corev1.PersistentVolume) {
	if t.c.driver.releasesUnused(pv) {
		t.pvQueue.Add(pv.Name)
	}
}

// csiNodeChanged enqueues the attachments that failed because the driver was not
// registered on their node.
func (t *term) csiNodeChanged(node *storagev1.CSINode) {
	for _, va := range t.c.attachments.ByIndex(kube.ByNode, node.Name) {
		t.attachmentAdded(va)
	}
}

func (t *term) csiNodeUpdated(old, node *storagev1.CSINode) {
	sameID := func(a, b storagev1.CSINodeDriver) bool { return a.NodeID == b.NodeID }
	if !slices.EqualFunc(old.Spec.Drivers, node.Spec.Drivers, sameID) {
		t.csiNodeChanged(node)
	}
}

// resync enqueues everything unfinished.
func (t *term) resync() {
	for _, va := range t.c.attachments.List() {
		if t.unfinished(va) {
			t.vaQueue.Resync(keyOf(va))
		}
	}
	for _, pv := range t.c.volumes.List() {
		if t.c.driver.releasesUnused(pv) {
			t.pvQueue.Resync(pv.Name)
		}
	}
}
