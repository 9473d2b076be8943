// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// outOfSync holds the VolumeAttachments whose status differs from what ListVolumes
// reported. An entry stays until an RPC for it succeeds or a later report agrees. The zero
// value is empty.
type outOfSync struct {
	mu   sync.Mutex
	uids map[types.UID]bool // the value: published at a former node ID
	// changed holds the attachments that changed since the current listing began; the
	// listing is too old for them. Nil while no listing runs.
	changed map[types.UID]struct{}
}

// of reports whether there is an entry, and whether the volume is published at an ID that the node had before.
func (o *outOfSync) of(attachment types.UID) (atFormer, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	atFormer, ok = o.uids[attachment]
	return atFormer, ok
}

// add returns false if the attachment has changed since the listing began. isNew reports
// whether there was no such entry before.
//
// Check and insertion are atomic. An RPC calls recordChange before remove, so that no entry
// outlives the difference that it stands for.
func (o *outOfSync) add(attachment types.UID, atFormer bool) (added, isNew bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, changed := o.changed[attachment]; changed {
		return false, false
	}
	if o.uids == nil {
		o.uids = map[types.UID]bool{}
	}
	was, before := o.uids[attachment]
	o.uids[attachment] = atFormer
	return true, !before || was != atFormer
}

func (o *outOfSync) remove(attachment types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.uids, attachment)
}

// recordChange excludes an attachment from the current reconciliation. It is called for
// each event, before each own write and after each RPC, whatever its result.
func (o *outOfSync) recordChange(attachment types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed != nil {
		o.changed[attachment] = struct{}{}
	}
}

func (o *outOfSync) hasChanged(attachment types.UID) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ok := o.changed[attachment]
	return ok
}

// trackChanges starts the recording of changes. stop ends it.
func (o *outOfSync) trackChanges() (stop func()) {
	set := func(changed map[types.UID]struct{}) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.changed = changed
	}
	set(map[types.UID]struct{}{})
	return func() { set(nil) }
}

// publishedVolumes maps volume handles to the status that ListVolumes returned. A volume
// that is published nowhere is missing; nil means that the driver reported no status.
type publishedVolumes map[string]*csi.ListVolumesResponse_VolumeStatus

func (p publishedVolumes) add(entry *csi.ListVolumesResponse_Entry) {
	handle, status := entry.GetVolume().GetVolumeId(), entry.GetStatus()
	switch {
	case entry.GetVolume() == nil:
	case status != nil && len(status.GetPublishedNodeIds()) == 0:
		delete(p, handle) // if a volume is listed twice, the last entry counts
	default:
		p[handle] = status
	}
}

// isPublished reports whether a volume is published to a node. known is false if the driver
// reported no status for the volume.
func (p publishedVolumes) isPublished(handle, nodeID string) (published, known bool) {
	status, listed := p[handle]
	if listed && status == nil {
		return false, false
	}
	return slices.Contains(status.GetPublishedNodeIds(), nodeID), true
}

// maxReconcilePause bounds how long a difference remains because passes take long.
const maxReconcilePause = 10 * time.Minute

// reconcilePause returns the time between two passes. It is the configured interval, or longer
// after a pass that took long, so that the driver spends at most a tenth of its time on passes.
func reconcilePause(configured, took time.Duration) time.Duration {
	return max(configured, min(9*took, maxReconcilePause))
}

// runReconciliation implements --reconcile-sync: it reconciles immediately and then after each pause plus up to a tenth, so that the
// controllers of many drivers do not call them at the same time.
func (t *term) runReconciliation(ctx context.Context) {
	for {
		if t.c.deps.Ready(ctx) != nil {
			return
		}
		start := time.Now()
		err := t.reconcile(ctx)
		pause := reconcilePause(t.c.cfg.ReconcileSync, time.Since(start))
		switch {
		case err == nil:
			t.c.metrics.reconciliations.WithLabelValues("ok").Inc()
		case ctx.Err() == nil:
			t.c.metrics.reconciliations.WithLabelValues("error").Inc()
			klog.FromContext(ctx).Error(err, "Reconciling with ListVolumes failed", "retryIn", pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(pause, 0.1)):
		}
	}
}

// reconcile enqueues the VolumeAttachments whose status differs from ListVolumes, and writes nothing. It calls ListVolumes before it
// reads the VolumeAttachments, and skips those that change in between; the next reconciliation checks them. A panic becomes an error.
func (t *term) reconcile(ctx context.Context) (err error) {
	defer workloop.Recover(&err)
	defer t.outOfSync.trackChanges()()
	published := publishedVolumes{}
	if err := csiclient.EachVolume(ctx, t.c.deps.CSI, t.c.cfg.Timeout, t.c.cfg.MaxEntries, published.add); err != nil {
		return err
	}
	t.enqueueDifferences(ctx, published)
	return nil
}

func (t *term) enqueueDifferences(ctx context.Context, reported publishedVolumes) {
	log := klog.FromContext(ctx)
	for _, va := range t.c.attachments.List() {
		key := keyOf(va)
		if va.Spec.Attacher != t.c.driver.name || t.outOfSync.hasChanged(va.UID) || t.vaQueue.Processing(key) {
			continue
		}
		s := t.gather(key, liveReads{})
		if s.attachment == nil {
			continue
		}
		attached := s.attachment.Status.Attached
		published, atFormer, known, err := t.c.driver.isPublished(s, reported)
		switch {
		case err != nil:
			log.V(2).Info("VolumeAttachment skipped: cannot resolve its volume", "volumeAttachment", va.Name, "err", err)
			continue
		case !known:
			continue
		case published == attached && !needsRepublish(s.attachment):
			t.outOfSync.remove(va.UID)
			continue
		}
		t.attachments.Doubt(va) // before a sync finds the difference
		added, isNew := t.outOfSync.add(va.UID, atFormer)
		if added && published != attached {
			t.c.metrics.mismatch(published)
			src, _ := t.c.driver.currentSource(s) // isPublished has succeeded with it
			log.Info("VolumeAttachment status differs from the driver", "volumeAttachment", va.Name, "volumeHandle", src.handle,
				"node", klog.KRef("", va.Spec.NodeName), "attached", attached, "published", published)
		}
		switch {
		case isNew:
			t.vaQueue.Add(key)
		case added: // it is being retried; a reconciliation must not reset its back-off
			t.vaQueue.Resync(key)
		}
	}
}

// needsRepublish reports whether the last repeated publish of va failed. It may have taken
// effect with a publish_context that differs from the status. Only a successful publish
// returns that, and it also removes the error.
func needsRepublish(va *storagev1.VolumeAttachment) bool {
	return va.DeletionTimestamp == nil && va.Status.Attached && va.Status.AttachError != nil
}

// isPublished reports whether the driver listed the volume of an attachment as published to its node. The node may have another
// ID than when the volume was published: an attachment needs the volume at the present ID, and a detach unpublishes it from those
// that were recorded. atFormer reports whether the volume is published only at a recorded ID that is not the present one.
func (d driver) isPublished(s attachmentState, reported publishedVolumes) (published, atFormer, known bool, err error) {
	src, err := d.currentSource(s)
	if err != nil {
		return false, false, false, err
	}
	recorded, err := d.detachNodeIDs(s)
	if err != nil {
		return false, false, false, err
	}
	present := recorded
	if id, err := d.nodeID(s); err == nil && s.attachment.DeletionTimestamp == nil {
		present = []string{id}
	}
	published, known, err = d.isPublishedAt(src, present, reported)
	if err == nil && known && !published {
		atFormer, _, err = d.isPublishedAt(src, recorded, reported)
	}
	return published, atFormer, known, err
}

// isPublishedAt reports whether the driver listed src as published at one of the node IDs.
func (d driver) isPublishedAt(src source, nodeIDs []string, reported publishedVolumes) (published, known bool, err error) {
	for _, id := range nodeIDs {
		handle, err := d.reportedHandle(src, id)
		if err != nil {
			return false, false, err
		}
		published, known = reported.isPublished(handle, id)
		if published || !known {
			break
		}
	}
	return published, known, nil
}

// reportedHandle returns the volume ID of src in ListVolumes. The translation of some
// in-tree plugins leaves placeholders that the node ID resolves.
func (d driver) reportedHandle(src source, nodeID string) (string, error) {
	if !src.migrated && !(src.inline && migration.PluginOf(d.name) != "") {
		return src.handle, nil
	}
	return migration.RepairHandle(d.name, src.handle, nodeID)
}
