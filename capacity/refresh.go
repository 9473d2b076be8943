// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// VolumeProvisioned schedules a refresh of the segments from which pv is accessible.
func (c *Controller) VolumeProvisioned(pv *corev1.PersistentVolume) {
	t := c.term.Load()
	if t == nil {
		return
	}
	if pv.Spec.NodeAffinity == nil {
		t.refreshes.add(pv.Spec.StorageClassName)
		return
	}
	t.refreshVolume(pv)
}

// VolumeNotProvisioned schedules a refresh of class after a failed CreateVolume: less
// capacity may be available than published.
func (c *Controller) VolumeNotProvisioned(class string) {
	if t := c.term.Load(); t != nil {
		t.refreshes.add(class)
	}
}

// VolumeDeleted schedules a refresh of the segments from which pv was accessible. Without
// node affinity these are unknown, and the next poll finds the change.
func (c *Controller) VolumeDeleted(pv *corev1.PersistentVolume) {
	if t := c.term.Load(); t != nil && pv.Spec.NodeAffinity != nil {
		t.refreshVolume(pv)
	}
}

// SegmentChanged schedules a refresh of the segment with these labels, in all classes: the driver reports another capacity for it.
func (c *Controller) SegmentChanged(labels map[string]string) {
	if t := c.term.Load(); t != nil {
		t.refresh(t.state.pairsOf(segmentOf(labels)))
	}
}

// refreshVolume refreshes the segments of pv. The node affinity of an in-tree volume may
// have labels that are no topology keys of the driver; then it refreshes the whole class.
func (t *term) refreshVolume(pv *corev1.PersistentVolume) {
	pairs := t.state.pairsOfVolume(pv)
	if pairs == nil && pv.Spec.CSI == nil {
		t.refreshes.add(pv.Spec.StorageClassName)
		return
	}
	t.refresh(pairs)
}

// refresh enqueues pairs, except those in back-off.
func (t *term) refresh(pairs []pair) {
	for _, p := range t.state.requestRefresh(pairs) {
		t.queue.Resync(p)
	}
}

// classRefreshes collects the classes to refresh. Many claims of a class may fail at the
// same time, and a class may have thousands of segments.
type classRefreshes struct {
	mu    sync.Mutex
	names map[string]struct{}
	wake  chan struct{} // has a value if names is not empty
}

func (c *classRefreshes) add(class string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.names == nil {
		c.names = map[string]struct{}{}
	}
	c.names[class] = struct{}{}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *classRefreshes) take() map[string]struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := c.names
	c.names = nil
	return names
}

// classRefreshInterval is the minimum interval between refreshes of classes.
const classRefreshInterval = time.Second

// refreshClasses refreshes the collected classes until ctx ends.
func (t *term) refreshClasses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.refreshes.wake:
		}
		for class := range t.refreshes.take() {
			t.refresh(t.state.pairsOfPublishedClass(class))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(classRefreshInterval):
		}
	}
}
