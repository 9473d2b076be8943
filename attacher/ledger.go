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

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// lastCall is the last call for a VolumeAttachment. The undo of one that was deleted by force needs it.
type lastCall struct {
	attachment *storagev1.VolumeAttachment
	step       step
}

// begin locks the volume for a call that publishes or unpublishes it, and plans the call or its repetition. VolumeAttachments of one
// name have one volume and node, for which the driver gets one call at a time (CSI spec, "Concurrency"). Call done after the call, at
// least once: whatever the response, a call that was sent and is not settled may have an effect.
func (t *term) begin(ctx context.Context, va *storagev1.VolumeAttachment, step step) (done func(), err error) {
	release, err := t.c.deps.Locks.Share(ctx, step.source.handle)
	if err != nil {
		return nil, err
	}
	unlock, ok := t.running.TryExclusive(va.Name)
	if !ok {
		defer release()
		return nil, t.recordError(ctx, va, fmt.Errorf("a call for volume %q and node %q is still running, for an earlier "+
			"VolumeAttachment of this name", step.source.handle, va.Spec.NodeName))
	}
	change := intent.Change[lastCall]{Args: step.source.args(va), Set: func(c *lastCall) { *c = lastCall{va, step} }}
	if t.calls.Get(va.UID).State == intent.Idle {
		change.Event = intent.Plan
	}
	_, _, _ = t.calls.Apply(va.UID, change)
	return sync.OnceFunc(func() {
		switch t.calls.Get(va.UID).State {
		case intent.Planned:
			// Nothing was sent.
			t.settle(va.UID)
		case intent.Sent:
			_, _, _ = t.calls.Apply(va.UID, intent.Change[lastCall]{Event: intent.Lose})
		}
		unlock()
		release()
	}), nil
}

// settle ends the calls for a VolumeAttachment: the result is in its status, or the volume is unpublished.
func (t *term) settle(attachment types.UID) {
	t.calls.Take(attachment)
}

// undo unpublishes the volume of a VolumeAttachment that was deleted without a detach, because another client removed
// its finalizer. The volume stays if another VolumeAttachment of the same name needs it.
func (c lastCall) undo(ctx context.Context, t *term) error {
	va, src := c.attachment, c.step.source
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

// logUndone logs a call that remains at the end of the term and that no VolumeAttachment ends.
func (c lastCall) logUndone(ctx context.Context, t *term) {
	if _, exists := t.newest(c.attachment); !exists {
		c.log(ctx, "Volume may be attached. Detach it at the storage system", errors.New("its VolumeAttachment was deleted by force"))
	}
}

func (c lastCall) log(ctx context.Context, message string, err error) {
	klog.FromContext(ctx).Error(err, message, "volumeAttachment", c.attachment.Name, "volumeHandle", c.step.source.handle,
		"node", klog.KRef("", c.attachment.Spec.NodeName), "nodeID", c.step.nodeID)
}
