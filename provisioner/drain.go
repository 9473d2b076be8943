// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"maps"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// outlive returns what a write needs that the next leader relies on: a context that does not end with the term but after
// [workloop.APIGrace], and a client without a rate limit. The process may be shutting down, or have lost its Lease.
func (c *Controller) outlive(ctx context.Context) (context.Context, context.CancelFunc, kubernetes.Interface) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), workloop.APIGrace)
	return ctx, cancel, c.deps.UnthrottledClient
}

// drainLimit bounds the PersistentVolumes that are created at the same time before the process exits.
const drainLimit = 20

// saveAll tries once more to create the PersistentVolumes that are not saved, before the
// process exits or another replica leads.
func (l *claimLoop) saveAll(ctx context.Context) {
	ctx, cancel, client := l.c.outlive(ctx)
	defer cancel()
	var all errgroup.Group
	all.SetLimit(drainLimit)
	for key, unsaved := range maps.Collect(l.ops.All()) {
		o := unsaved.Payload
		if unsaved.State != intent.Answered || o.lostPV() {
			continue
		}
		all.Go(func() error {
			c, err := l.createPV(ctx, client, key, o)
			_, _, _ = l.ops.Apply(key, c) // legal: no worker runs any more
			if err != nil {
				klog.FromContext(ctx).Error(err, "PersistentVolume not created. The next leader retries CreateVolume while the PVC exists",
					"persistentVolumeClaim", klog.KRef(key.Namespace, key.Name), "volumeHandle", o.handle,
					"stage", stageOf(unsaved))
			}
			return nil
		})
	}
	_ = all.Wait() // each has logged its error
}

// logUnrecorded logs the volumes that the driver may have and no other process knows of. The record on a claim is missing
// if the claim was deleted during its first CreateVolume, for example.
func (l *claimLoop) logUnrecorded(ctx context.Context) {
	for key, c := range l.ops.All() {
		o := c.Payload
		claim, ok := l.claims.Get(key.String())
		recorded := ok && claim.UID == key.UID && isProtected(claim)
		if recorded || !c.State.MayHaveEffect() || c.State == intent.Answered {
			continue
		}
		err, handle := errors.New("the outcome of CreateVolume is unknown"), ""
		if c.State == intent.Undoing {
			err, handle = o.rejectReason, o.handle
		}
		klog.FromContext(ctx).Error(err, "Volume may exist. If the PVC is deleted, delete the volume on the storage backend",
			"persistentVolumeClaim", klog.KRef(key.Namespace, key.Name), "volume", o.plan.VolumeName, "volumeHandle", handle,
			"stage", stageOf(c))
	}
}
