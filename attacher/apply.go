// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"fmt"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// apply executes step and stores in read what it has read. After an error the
// VolumeAttachment is retried with back-off.
func (t *term) apply(ctx context.Context, s attachmentState, step step, read *liveReads) (err error) {
	va := s.attachment
	switch step.action {
	case doReportError:
		return t.recordError(ctx, va, step.err)
	case doReadSecrets:
		if read.secrets, err = kube.ReadSecret(ctx, t.c.deps.Client, step.source.secrets); err != nil {
			return t.recordError(ctx, va, fmt.Errorf("failed to load %w", err))
		}
		read.secretsRead = true
		return nil
	case doReadAttachment:
		// The cache may lack the last writes of an earlier leader.
		if _, _, err := t.attachments.Refetch(ctx, t.c.deps.Client.StorageV1().VolumeAttachments(), va); err != nil {
			return fmt.Errorf("reading VolumeAttachment %q before calling the driver: %w", va.Name, err)
		}
		return nil
	case doReadVolume:
		if _, _, err := t.volumes.Refetch(ctx, t.c.deps.Client.CoreV1().PersistentVolumes(), s.volume); err != nil {
			return fmt.Errorf("reading PersistentVolume %q before calling the driver: %w", s.volume.Name, err)
		}
		return nil
	case doAddVolumeFinalizer:
		_, err := t.volumes.Patch(ctx, t.c.deps.Client.CoreV1().PersistentVolumes(), s.volume,
			kube.MetadataPatch{AddFinalizers: []string{t.c.driver.finalizer}})
		if err == nil || t.volumes.Outdated(s.volume, err) {
			return nil // decide again
		}
		return t.recordError(ctx, va, fmt.Errorf("could not add PersistentVolume finalizer: %w", err))
	case doAddFinalizer:
		err := t.changeAttachment(ctx, va, step.change)
		if err == nil || t.attachments.Outdated(va, err) {
			return nil // decide again
		}
		return t.recordError(ctx, va, fmt.Errorf("could not save VolumeAttachment: %w", err))
	case doPublish:
		*read = liveReads{} // the attachment may be deleted during the call, and its Secret changed
		return t.publish(ctx, s, step)
	case doUnpublish, doUnpublishFormer:
		return t.unpublish(ctx, s, step, read)
	case doUndoPublish:
		return s.call.Payload.undo(ctx, t)
	case doRemoveFinalizer:
		return t.changeAttachment(ctx, va, kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}})
	case doMarkAttached:
		return t.writeStatus(ctx, va, attachedStatus(va, nil))
	case doMarkDetached:
		return t.writeStatus(ctx, va, detachedStatus(va))
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

func (t *term) publish(ctx context.Context, s attachmentState, step step) error {
	va := s.attachment
	if err := pressure.Enter(ctx, "ControllerPublishVolume", va.Spec.NodeName); err != nil {
		return err
	}
	request, err := t.c.driver.publishRequest(step.source, step.nodeID, s.secrets)
	if err != nil {
		return t.recordError(ctx, va, err)
	}
	done, err := t.begin(ctx, va, step)
	if err != nil {
		return err
	}
	defer done()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, step.source.migrated), t.c.cfg.Timeout)
	defer cancel()
	if err := t.calls.Send(ctx, va.UID, step.source.args(va), t.c.driver.recorded(va, step)); err != nil {
		return err
	}
	response, err := t.c.deps.CSI.ControllerPublishVolume(call, request)
	t.outOfSync.recordChange(va.UID)
	if err == nil {
		err = checkMetadata(response.GetPublishContext())
	}
	if err != nil {
		return t.recordError(ctx, va, err)
	}
	// A failed write is no attach error. The next sync repeats the publish, which is
	// idempotent.
	if err := t.writeStatus(ctx, va, attachedStatus(va, response.GetPublishContext())); err != nil {
		return fmt.Errorf("updating status of VolumeAttachment %q after ControllerPublishVolume: %w", va.Name, err)
	}
	if _, exists := t.attachments.Newest(va); !exists {
		return nil // the next step is the undo
	}
	t.settle(va.UID)
	t.outOfSync.remove(va.UID)
	if !va.Status.Attached {
		t.c.metrics.attached(time.Since(va.CreationTimestamp.Time))
	}
	logDone(ctx, "Volume attached", va, step, va.CreationTimestamp)
	return nil
}

// logDone ends the trace of an attach or detach that was requested at that time, and logs it.
func logDone(ctx context.Context, message string, va *storagev1.VolumeAttachment, step step, requested metav1.Time) {
	tracing.EndOperation(ctx, requested.Time, "volumeAttachment", va.Name, "volumeHandle", step.source.handle, "node", va.Spec.NodeName)
	klog.FromContext(ctx).Info(message, "volumeHandle", step.source.handle, "node", klog.KRef("", va.Spec.NodeName), "nodeID", step.nodeID)
}

func (t *term) changeAttachment(ctx context.Context, va *storagev1.VolumeAttachment, change kube.MetadataPatch) error {
	t.outOfSync.recordChange(va.UID)
	_, err := t.attachments.Patch(ctx, t.c.deps.Client.StorageV1().VolumeAttachments(), va, change)
	return err
}

// writeStatus patches the status of va. Nil fields mean that it is up to date.
func (t *term) writeStatus(ctx context.Context, va *storagev1.VolumeAttachment, fields statusPatch) error {
	if fields == nil {
		return nil
	}
	t.outOfSync.recordChange(va.UID)
	data, err := fields.patch(va.UID)
	if err != nil {
		return err
	}
	attachments := t.c.deps.Client.StorageV1().VolumeAttachments()
	written, err := attachments.Patch(ctx, va.Name, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	if err != nil {
		written = va
	}
	return t.attachments.RecordWrite(va, written, err)
}

// recordError writes err to status.attachError or status.detachError and returns it.
func (t *term) recordError(ctx context.Context, va *storagev1.VolumeAttachment, err error) error {
	detach := va.DeletionTimestamp != nil
	t.c.metrics.failed(detach, err)
	if newest, ok := t.attachments.Newest(va); ok { // it may have changed during the RPC
		va = newest
	}
	fields := errorStatus(va, err, detach, t.c.cfg.StoreErrorCode, time.Now())
	if writeErr := t.writeStatus(ctx, va, fields); writeErr != nil {
		err = fmt.Errorf("%w; writing this to the status: %v", err, writeErr)
	}
	return err
}
