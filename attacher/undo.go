// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

// undo unpublishes the volume of a VolumeAttachment that was deleted without a detach, because another client removed
// its finalizer. The volume stays if another VolumeAttachment of the same name needs it.
func (c lastCall) undo(ctx context.Context, t *term) error {
	va, src := c.attachment, c.step.source
	if err := pressure.Enter(ctx, "ControllerUnpublishVolume", va.Spec.NodeName); err != nil {
		return err
	}
	release, ok := t.c.deps.Locks.TryExclusive(src.handle) // another VolumeAttachment is published after this call
	if !ok {
		return fmt.Errorf("unpublishing volume %q: another call for the volume is running", src.handle)
	}
	defer release()
	_, _, err := t.calls.Apply(va.UID, intent.Change[lastCall]{Event: intent.Reject})
	var secrets map[string]string
	if err == nil && src.secrets != nil {
		secrets, err = kube.ReadSecret(ctx, t.c.deps.Client, src.secrets)
	}
	nodeIDs, unreadable := recordedNodeIDs(va)
	if unreadable != nil || !slices.Contains(nodeIDs, c.step.nodeID) {
		nodeIDs = append(nodeIDs, c.step.nodeID)
	}
	for _, id := range nodeIDs {
		if err == nil {
			c.step.nodeID = id
			err = c.undoAt(ctx, t, secrets)
		}
	}
	if err != nil {
		c.log(ctx, "VolumeAttachment was deleted by force and unpublishing its volume failed. It is retried while this process leads", err)
		return err
	}
	t.settle(va.UID)
	return nil
}

// undoAt unpublishes the volume from the node ID of the step, unless another VolumeAttachment of the same name needs it there.
func (c lastCall) undoAt(ctx context.Context, t *term, secrets map[string]string) error {
	again, err := c.publishedAgain(ctx, t)
	if err != nil || again {
		return err
	}
	err = c.unpublish(ctx, t, secrets)
	if status.Code(err) == codes.NotFound {
		// Nothing can be published. Without this, a deletion by force would not end the calls of a detach that cannot succeed.
		c.log(ctx, "VolumeAttachment was deleted by force and the driver knows no such volume or node. Unpublishing is not repeated", err)
		return nil
	}
	return err
}

// logUndone logs a call that remains at the end of the term and that no VolumeAttachment ends.
func (c lastCall) logUndone(ctx context.Context, t *term) {
	if _, exists := t.attachments.Newest(c.attachment); !exists {
		c.log(ctx, "Volume may be attached. Detach it at the storage system", errors.New("its VolumeAttachment was deleted by force"))
	}
}

func (c lastCall) log(ctx context.Context, message string, err error) {
	klog.FromContext(ctx).Error(err, message, "volumeAttachment", c.attachment.Name, "volumeHandle", c.step.source.handle,
		"node", klog.KRef("", c.attachment.Spec.NodeName), "nodeID", c.step.nodeID)
}
