// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

// unpublish calls ControllerUnpublishVolume and, once the volume is detached, removes the finalizer
// and updates the status of the VolumeAttachment. After the call for a former node ID it only remembers that in read.
func (t *term) unpublish(ctx context.Context, s attachmentState, step step, read *liveReads) error {
	va := s.attachment
	if err := pressure.Enter(ctx, "ControllerUnpublishVolume", va.Spec.NodeName); err != nil {
		return err
	}
	done, err := t.begin(ctx, va, step)
	if err != nil {
		return err
	}
	defer done()
	err = lastCall{va, step}.unpublish(ctx, t, s.secrets)
	done() // without the finalizer, another VolumeAttachment of this name may follow at once
	t.outOfSync.recordChange(va.UID)
	switch now, unknown := t.c.driver.nodeID(s); {
	case errors.Is(err, election.ErrLost): // without a call; the status belongs to the next leader
		return err
	case step.action == doUnpublishFormer && (err == nil || status.Code(err) == codes.NotFound):
		// NotFound: the driver knows no node with the former ID. If it does not know the volume, the call for the last ID fails.
		klog.FromContext(ctx).Info("Volume unpublished from former node ID", "volumeHandle", step.source.handle,
			"node", klog.KRef("", va.Spec.NodeName), "nodeID", step.nodeID, "err", err)
		read.unpublished = append(read.unpublished, step.nodeID)
		return nil
	case err == nil:
	// NotFound is no success: the volume "is not assumed to be ControllerUnpublished from node" (CSI spec, "ControllerUnpublishVolume
	// Errors").
	case unknown == nil && now != step.nodeID:
		return t.recordError(ctx, va, fmt.Errorf("%w. The volume was published with node ID %q, node %s has ID %q now. If the volume is "+
			"not published with the former ID any more, remove it from the annotations of the VolumeAttachment", err, step.nodeID,
			va.Spec.NodeName, now))
	default:
		return t.recordError(ctx, va, err)
	}
	t.settle(va.UID)
	// The finalizer first: without it, a VolumeAttachment that is being deleted counts as
	// detached, so that a crash after this write causes no second unpublish.
	if err := t.changeAttachment(ctx, va, kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}}); err != nil {
		// The write may have taken effect, and another VolumeAttachment of the same name may exist.
		t.attachments.Doubt(va)
		return t.recordError(ctx, va, fmt.Errorf("could not mark as detached: %w", err))
	}
	t.outOfSync.remove(va.UID)
	logDone(ctx, "Volume detached", va, step, *va.DeletionTimestamp)
	rest, exists := t.attachments.Newest(va)
	if !exists {
		return nil
	}
	// Another finalizer keeps the object.
	if err := t.writeStatus(ctx, rest, detachedStatus(rest)); err != nil {
		return t.recordError(ctx, rest, fmt.Errorf("could not mark as detached: %w", err))
	}
	return nil
}

// unpublish calls ControllerUnpublishVolume.
func (c lastCall) unpublish(ctx context.Context, t *term, secrets map[string]string) error {
	src := c.step.source
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, src.migrated), t.c.cfg.Timeout)
	defer cancel()
	// It needs no record: the finalizer stays until it succeeds.
	if err := t.calls.Send(ctx, c.attachment.UID, src.args(c.attachment), true); err != nil {
		return err
	}
	_, err := t.c.deps.CSI.ControllerUnpublishVolume(call, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: src.handle, NodeId: c.step.nodeID, Secrets: secrets,
	})
	return err
}
