package attacher

import (
	"context"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// apply does what decide chose. An error means that the attachment is tried again
// after its back-off; it is in the status then, where it is of use there.
func (t *term) apply(ctx context.Context, s snapshot, step step) error {
	va := s.attachment
	switch step.action {
	case doReportAttach, doReportDetach:
		return t.report(ctx, s, step.err)
	case doProtectVolume:
		if err := t.protectVolume(ctx, s.volume); err != nil {
			return t.report(ctx, s, fmt.Errorf("could not add PersistentVolume finalizer: %w", err))
		}
		return nil
	case doProtect:
		if err := t.changeAttachment(ctx, va, step.change); err != nil {
			return t.report(ctx, s, fmt.Errorf("could not save VolumeAttachment: %w", err))
		}
		return nil
	case doPublish:
		return t.publish(ctx, s, step)
	case doUnpublish:
		return t.unpublish(ctx, s, step)
	case doRelease:
		return t.changeAttachment(ctx, va, kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}})
	case doMarkAttached:
		return t.writeStatus(ctx, va, attachedStatus(va, nil))
	case doMarkDetached:
		return t.writeStatus(ctx, va, detachedStatus(va))
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

func (t *term) publish(ctx context.Context, s snapshot, step step) error {
	log, va := klog.FromContext(ctx), s.attachment
	request, err := t.c.driver.publishRequest(step.source, step.nodeID, s.secrets)
	if err != nil {
		return t.report(ctx, s, err)
	}
	defer t.c.deps.Locks.Share(step.source.handle)()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, step.source.migrated), t.c.cfg.Timeout)
	defer cancel()
	response, err := t.c.deps.CSI.ControllerPublishVolume(call, request)
	t.marks.noteChange(va.UID)
	if err != nil {
		return t.report(ctx, s, err)
	}
	if err := checkMetadata(response.GetPublishContext()); err != nil {
		return t.report(ctx, s, err)
	}
	// A failure here is not one of attaching: nothing to tell in the status, and
	// the next attempt publishes again, which the driver must take for the same.
	if err := t.writeStatus(ctx, va, attachedStatus(va, response.GetPublishContext())); err != nil {
		return fmt.Errorf("recording that VolumeAttachment %q is attached: %w", va.Name, err)
	}
	if left, exists := t.attachments.Get(va.Name); !exists || left.UID != va.UID {
		return t.takeBack(ctx, s, step)
	}
	t.marks.drop(va.UID)
	if !va.Status.Attached {
		t.c.metrics.attached(time.Since(va.CreationTimestamp.Time))
	}
	tracing.EndOperation(ctx, va.CreationTimestamp.Time, "volumeAttachment", va.Name, "volumeHandle", step.source.handle, "node", va.Spec.NodeName)
	log.Info("Volume attached", "volumeHandle", step.source.handle, "node", klog.KRef("", va.Spec.NodeName), "nodeID", step.nodeID)
	return nil
}

// takeBack unpublishes what was published for an attachment that went meanwhile, by force:
// nobody else will.
func (t *term) takeBack(ctx context.Context, s snapshot, step step) error {
	va := s.attachment
	defer t.c.deps.Locks.Share(step.source.handle)()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, step.source.migrated), t.c.cfg.Timeout)
	defer cancel()
	_, err := t.c.deps.CSI.ControllerUnpublishVolume(call, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: step.source.handle, NodeId: step.nodeID, Secrets: s.secrets,
	})
	if err != nil {
		klog.FromContext(ctx).Error(err, "The VolumeAttachment was removed while its volume was being published, and that could not be undone: detach the volume at the storage",
			"volumeHandle", step.source.handle, "node", klog.KRef("", va.Spec.NodeName), "nodeID", step.nodeID)
	}
	return err
}

// confirm reads an attachment from the API server. What another process, which led
// before, has done to it may not have come to the cache yet.
func (t *term) confirm(ctx context.Context, va *storagev1.VolumeAttachment) error {
	live, err := t.c.deps.Client.StorageV1().VolumeAttachments().Get(ctx, va.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != va.UID:
		t.attachments.MarkDeleted(va)
		return nil
	case err != nil:
		return fmt.Errorf("reading VolumeAttachment %q before the driver is called: %w", va.Name, err)
	}
	t.attachments.Observe(live)
	t.confirmed.Store(va.UID, struct{}{})
	return nil
}

func (t *term) unpublish(ctx context.Context, s snapshot, step step) error {
	log, va := klog.FromContext(ctx), s.attachment
	defer t.c.deps.Locks.Share(step.source.handle)()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, step.source.migrated), t.c.cfg.Timeout)
	defer cancel()
	_, err := t.c.deps.CSI.ControllerUnpublishVolume(call, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: step.source.handle, NodeId: step.nodeID, Secrets: s.secrets,
	})
	t.marks.noteChange(va.UID)
	if err != nil { // NotFound too: of a volume that the driver does not know it may still be attached
		return t.report(ctx, s, err)
	}
	// The finalizer first: an attachment that is being deleted and has none counts as
	// detached, so that a crash after this write causes no second unpublish.
	if err := t.changeAttachment(ctx, va, kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}}); err != nil {
		return t.report(ctx, s, fmt.Errorf("could not mark as detached: %w", err))
	}
	t.marks.drop(va.UID)
	if va.DeletionTimestamp != nil {
		tracing.EndOperation(ctx, va.DeletionTimestamp.Time, "volumeAttachment", va.Name, "volumeHandle", step.source.handle, "node", va.Spec.NodeName)
	}
	log.Info("Volume detached", "volumeHandle", step.source.handle, "node", klog.KRef("", va.Spec.NodeName), "nodeID", step.nodeID)
	left, exists := t.attachments.Get(va.Name)
	if !exists || left.UID != va.UID {
		return nil // it had only been waiting for us
	}
	if err := t.writeStatus(ctx, left, detachedStatus(left)); err != nil {
		return t.report(ctx, s, fmt.Errorf("could not mark as detached: %w", err))
	}
	return nil
}

// protectVolume writes the finalizer of a volume, once for all its attachments.
func (t *term) protectVolume(ctx context.Context, pv *corev1.PersistentVolume) error {
	h := fnv.New32a()
	_, _ = h.Write([]byte(pv.Name)) // a hash cannot fail
	mu := &t.protecting[h.Sum32()%uint32(len(t.protecting))]
	mu.Lock()
	defer mu.Unlock()
	if newest, ok := t.volumes.Get(pv.Name); ok {
		pv = newest
	}
	return t.changeVolume(ctx, pv, kube.MetadataPatch{AddFinalizers: []string{t.c.driver.finalizer}})
}

func (t *term) changeVolume(ctx context.Context, pv *corev1.PersistentVolume, change kube.MetadataPatch) error {
	changed, err := kube.PatchMetadata(ctx, t.c.deps.Client.CoreV1().PersistentVolumes(), pv, change)
	return t.volumes.RecordWrite(pv, changed, err)
}

func (t *term) changeAttachment(ctx context.Context, va *storagev1.VolumeAttachment, change kube.MetadataPatch) error {
	t.marks.noteChange(va.UID)
	changed, err := kube.PatchMetadata(ctx, t.c.deps.Client.StorageV1().VolumeAttachments(), va, change)
	if err == nil && changed != va { // it is there
		t.confirmed.Store(va.UID, struct{}{})
	}
	return t.attachments.RecordWrite(va, changed, err)
}

// writeStatus writes fields; nil means that they are what the status says already.
func (t *term) writeStatus(ctx context.Context, va *storagev1.VolumeAttachment, fields statusPatch) error {
	if fields == nil {
		return nil
	}
	t.marks.noteChange(va.UID)
	data, err := fields.patch(va.UID)
	if err != nil {
		return err
	}
	written, err := t.c.deps.Client.StorageV1().VolumeAttachments().Patch(ctx, va.Name, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	if err != nil {
		written = va
	}
	return t.attachments.RecordWrite(va, written, err)
}

// report puts err into the status, where it is not there already, and returns it.
func (t *term) report(ctx context.Context, s snapshot, err error) error {
	va := s.attachment
	detach := va.DeletionTimestamp != nil
	t.c.metrics.failed(detach, err)
	// A call that was running may have taken long: look at what is there now.
	if newest, ok := t.attachments.Get(va.Name); ok && newest.UID == va.UID {
		va = newest
	}
	if e := t.writeStatus(ctx, va, errorStatus(va, err, detach, t.c.cfg.StoreErrorCode, time.Now())); e != nil {
		klog.FromContext(ctx).Info("The error is not in the status", "err", e)
	}
	return err
}
