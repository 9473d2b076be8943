// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"sync"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
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
