// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/metrics"
)

// listClasses returns an error if VolumeAttributesClasses cannot be listed. Then volumes are not modified.
func (t *term) listClasses(ctx context.Context) error {
	_, err := t.c.deps.Client.StorageV1().VolumeAttributesClasses().List(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case err == nil:
		t.c.noClasses.Store(nil)
	case ctx.Err() == nil && t.c.noClasses.Swap(&err) == nil:
		logNoClasses(klog.FromContext(ctx), err)
	}
	return err
}

func logNoClasses(log klog.Logger, err error) {
	switch {
	case apierrors.IsForbidden(err):
		log.Info("Volumes are not modified: VolumeAttributesClasses cannot be listed. Grant get, list and watch on them, "+
			"or set --feature-gates=VolumeAttributesClass=false", "err", err)
	case apierrors.IsNotFound(err):
		log.Info("Volumes are not modified: the API server does not serve VolumeAttributesClasses. Upgrade to Kubernetes 1.34 or later, "+
			"or set --feature-gates=VolumeAttributesClass=false", "err", err)
	default:
		log.Info("Volumes are not modified: VolumeAttributesClasses cannot be listed. Retrying", "err", err)
	}
}

// awaitClasses enqueues the modifications when VolumeAttributesClasses can be listed.
func (t *term) awaitClasses(ctx context.Context) {
	if kube.Recheck(ctx, kube.LongestRecheck, t.listClasses) {
		klog.FromContext(ctx).Info("Volumes are modified: VolumeAttributesClasses can be listed")
		t.enqueueAll(t.queue.Add)
	}
}

// Ready returns a warning while volumes cannot be modified although the driver supports it.
func (c *Controller) Ready() error {
	if err := c.noClasses.Load(); err != nil {
		return metrics.Warning("volumes are not modified: " + (*err).Error())
	}
	return nil
}

// watchClasses starts the watch that ends the wait for a missing class, once per term. Without missing
// classes there is no watch: a class is read for each attempt.
func (t *term) watchClasses() {
	t.classesWatched.Do(func() {
		classes := kube.NewOptionalMetadata(t.c.deps.Metadata, kube.AttributesClasses, t.classHandlers())
		t.background.Go(func() { classes.Run(t.ctx) })
	})
}

// classHandlers returns the handlers that enqueue the modifications that wait for a class.
func (t *term) classHandlers() kube.Handlers[*metav1.PartialObjectMetadata] {
	added := func(*metav1.PartialObjectMetadata) {
		// The class may have been read before it was created, and its reader not wait yet.
		for _, stage := range []string{stageClassNeeded, stageClassMissing} {
			for _, k := range t.inStage(stage) {
				t.queue.Add(k)
			}
		}
	}
	return kube.Handlers[*metav1.PartialObjectMetadata]{Add: added, Update: func(old, class *metav1.PartialObjectMetadata) {
		if old.UID != class.UID { // deleted and recreated while the watch was interrupted
			added(class)
		}
	}}
}
