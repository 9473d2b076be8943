// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// publication records a call for a VolumeAttachment until its result is in the status, or the volume is unpublished.
type publication struct {
	attachment *storagev1.VolumeAttachment
	step       step
}

// publications holds the publications of a term.
type publications struct {
	sync.Map                       // each [publication], by the UID of its VolumeAttachment
	calls    keylock.Locks[string] // running calls, by the name of the VolumeAttachment
}

// begin records the publication before a call that publishes or unpublishes the volume. VolumeAttachments of one name have one
// volume and node, for which the driver gets one call at a time (CSI spec, "Concurrency"). Call done after the call.
func (p *publications) begin(va *storagev1.VolumeAttachment, step step) (done func(), err error) {
	done, ok := p.calls.TryExclusive(va.Name)
	if !ok {
		return nil, fmt.Errorf("a call for volume %q and node %q is still running, for an earlier VolumeAttachment of this name",
			step.source.handle, va.Spec.NodeName)
	}
	p.Store(va.UID, publication{va, step})
	return done, nil
}

// of returns the publication of a VolumeAttachment, or nil.
func (p *publications) of(uid types.UID) *publication {
	if found, ok := p.Load(uid); ok {
		return new(found.(publication))
	}
	return nil
}

// undo unpublishes the volume of a VolumeAttachment that was deleted without a detach, because another client removed
// its finalizer. The volume stays if another VolumeAttachment of the same name needs it.
func (p publication) undo(ctx context.Context, t *term) error {
	va, src := p.attachment, p.step.source
	release, ok := t.c.deps.Locks.TryExclusive(src.handle) // another VolumeAttachment is published after this call
	if !ok {
		return fmt.Errorf("unpublishing volume %q: another call for the volume is running", src.handle)
	}
	defer release()
	s, err := attachmentState{}, error(nil)
	if src.secrets != nil {
		s.secrets, err = kube.ReadSecret(ctx, t.c.deps.Client, src.secrets)
	}
	nodeIDs, unreadable := recordedNodeIDs(va)
	if unreadable != nil || !slices.Contains(nodeIDs, p.step.nodeID) {
		nodeIDs = append(nodeIDs, p.step.nodeID)
	}
	for _, id := range nodeIDs {
		if err == nil {
			p.step.nodeID = id
			err = p.undoAt(ctx, t, s)
		}
	}
	if err != nil {
		p.log(ctx, "VolumeAttachment was deleted by force and unpublishing its volume failed. It is retried while this process leads", err)
		return err
	}
	t.publications.Delete(va.UID)
	return nil
}

// undoAt unpublishes the volume from the node ID of the step, unless another VolumeAttachment of the same name needs it there.
func (p publication) undoAt(ctx context.Context, t *term, s attachmentState) error {
	again, err := p.publishedAgain(ctx, t)
	if err != nil || again {
		return err
	}
	err = t.c.callUnpublish(ctx, s, p.step)
	if status.Code(err) == codes.NotFound {
		// Nothing can be published. Without this, a deletion by force would not end the calls of a detach that cannot succeed.
		p.log(ctx, "VolumeAttachment was deleted by force and the driver knows no such volume or node. Unpublishing is not repeated", err)
		return nil
	}
	return err
}

// publishedAgain reports whether another VolumeAttachment of the same name publishes the volume again. Its error ends the undo for
// now: an unpublish without a response could take effect after the volume is published for the other.
func (p publication) publishedAgain(ctx context.Context, t *term) (bool, error) {
	current, err := t.c.deps.Client.StorageV1().VolumeAttachments().Get(ctx, p.attachment.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading VolumeAttachment %q before calling the driver: %w", p.attachment.Name, err)
	}
	t.attachments.Observe(current)
	return t.c.driver.publishesAgain(t.gather(keyOf(current), liveReads{}), p.step)
}

// logUndone logs a publication that remains at the end of the term and that no VolumeAttachment ends.
func (p publication) logUndone(ctx context.Context, t *term) {
	if _, exists := t.newest(p.attachment); !exists {
		p.log(ctx, "Volume may be attached. Detach it at the storage system", errors.New("its VolumeAttachment was deleted by force"))
	}
}

func (p publication) log(ctx context.Context, message string, err error) {
	klog.FromContext(ctx).Error(err, message, "volumeAttachment", p.attachment.Name, "volumeHandle", p.step.source.handle,
		"node", klog.KRef("", p.attachment.Spec.NodeName), "nodeID", p.step.nodeID)
}
