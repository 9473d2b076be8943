// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// decideReplaced returns the step for an attachment that must not publish src, the volume of its PersistentVolume, because another one
// of that name was published for it. It returns false otherwise.
func (d driver) decideReplaced(s attachmentState, src source) (step, bool) {
	published, _ := d.detachSource(s) // no error, like resolve
	other := published.handle != src.handle
	switch {
	case other && s.volumeUnconfirmed:
		return step{action: doReadVolume, reason: "VolumeUnconfirmed"}, true
	case other && !src.migrated && d.mayBePublished(s.attachment), s.calledForOther(src):
		return cannotAttach(fmt.Errorf("PersistentVolume %q was replaced: it has volume %q, but volume %q may be published for this "+
			"VolumeAttachment. Delete the VolumeAttachment", s.volume.Name, src.handle, published.handle)), true
	}
	return step{}, false
}

// detachSource returns the volume to unpublish. It comes from the annotations when the PersistentVolume was deleted or a different one has
// its name now. A call of this term takes precedence over both.
func (d driver) detachSource(s attachmentState) (source, error) {
	src, err := d.resolve(s.attachment, s.volume)
	if s.attachment.Spec.Source.PersistentVolumeName != nil && recordsOther(s.attachment, src) {
		src, err = source{handle: s.attachment.Annotations[annVolumeHandle], migrated: s.attachment.Annotations[annMigrated] == "true"}, nil
		if namespace, name, ok := strings.Cut(s.attachment.Annotations[annSecret], "/"); ok {
			src.secrets = &corev1.SecretReference{Namespace: namespace, Name: name}
		}
	}
	if s.calledForOther(src) {
		return s.call.Payload.step.source, nil
	}
	return src, err
}

// currentSource returns the volume to publish or unpublish.
func (d driver) currentSource(s attachmentState) (source, error) {
	src, err := d.resolve(s.attachment, s.volume)
	// A detach does not need the PersistentVolume, which may have been replaced since an attach.
	if s.attachment.DeletionTimestamp != nil || err == nil && s.attachment.Status.Attached && !src.migrated {
		return d.detachSource(s)
	}
	return src, err
}

// recordsOther reports whether va records another volume than src, that of its PersistentVolume, which was deleted or replaced.
func recordsOther(va *storagev1.VolumeAttachment, src source) bool {
	recorded := va.Annotations[annVolumeHandle]
	return recorded != "" && recorded != src.handle
}

// calledForOther reports whether a call of this term, for another volume than src, may have taken effect.
func (s attachmentState) calledForOther(src source) bool {
	return s.call.State.MayHaveEffect() && s.call.Args != src.args(s.attachment)
}

// publishedAgain reports whether another VolumeAttachment of the same name publishes the volume again. Its error ends the undo for
// now: an unpublish without a response could take effect after the volume is published for the other.
func (c lastCall) publishedAgain(ctx context.Context, t *term) (bool, error) {
	current, err := t.c.deps.Client.StorageV1().VolumeAttachments().Get(ctx, c.attachment.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading VolumeAttachment %q before calling the driver: %w", c.attachment.Name, err)
	}
	t.attachments.Observe(current)
	return t.c.driver.publishesAgain(t.gather(keyOf(current), liveReads{}), c.step)
}

// publishesAgain reports whether the VolumeAttachment of s publishes the volume of step to the same node, now or later. Its
// detach then unpublishes the volume. The error says that this is not known yet.
func (d driver) publishesAgain(s attachmentState, step step) (bool, error) {
	switch va := s.attachment; {
	case va == nil || va.Spec.Attacher != d.name || !d.mayBePublished(va) && va.DeletionTimestamp != nil:
		return false, nil
	case !d.mayBePublished(va): // it was not published yet
		return false, fmt.Errorf("VolumeAttachment %q was created again, and has no finalizer yet", va.Name)
	}
	src, err := d.detachSource(s)
	nodeIDs, nodeErr := d.detachNodeIDs(s)
	return err == nil && nodeErr == nil && src.handle == step.source.handle && slices.Contains(nodeIDs, step.nodeID), nil
}
