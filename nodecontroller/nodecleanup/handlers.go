// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// onChange returns handlers that call changed with every version of an object, and deleted with its last one.
func onChange[T metav1.Object](changed, deleted func(T)) kube.Handlers[T] {
	return kube.Handlers[T]{Add: changed, Update: func(_, obj T) { changed(obj) }, Delete: deleted}
}

// watch registers the handlers, which update the index on every replica and enqueue hosts during a term.
func (c *Controller) watch() {
	add := c.indexed.Add
	add(c.csiNodes.Handle(onChange(
		func(n *storagev1.CSINode) { c.csiNodeChanged(n, true) }, func(n *storagev1.CSINode) { c.csiNodeChanged(n, false) })))
	add(c.nodes.Handle(kube.Handlers[*corev1.Node]{
		Add: c.nodeChanged, Update: c.nodeUpdated,
		Delete: func(n *corev1.Node) { c.enqueue(c.index.dropNode(n, c.policy.annotation, time.Now())...) },
	}))
	add(c.volumes.Handle(onChange(
		func(pv *corev1.PersistentVolume) { c.enqueueLost(c.index.setVolume(pv.Name, pv)) },
		func(pv *corev1.PersistentVolume) { c.enqueue(c.index.setVolume(pv.Name, nil)...) })))
	add(c.claims.Handle(onChange(c.claimChanged, c.claimChanged)))
	add(c.classes.Handle(onChange(func(class *storagev1.StorageClass) {
		if class.Provisioner == c.deps.Driver {
			c.enqueue(recordsKey)
		}
	}, nil)))
	if c.attachments != nil {
		detached := func(va *storagev1.VolumeAttachment) {
			if pv := va.Spec.Source.PersistentVolumeName; pv != nil {
				c.enqueueLost(c.index.volumes.of(*pv))
			}
		}
		c.indexed.AddUnawaited(c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Delete: detached}))
	}
	if c.configMap != nil {
		c.indexed.AddUnawaited(c.configMap.Handle(onChange(func(cm *corev1.ConfigMap) {
			for _, r := range ParseLostNodes(cm) {
				if r.OptedOut {
					c.index.amend(r.Value, r.UID, func(l *lastSeen) { l.recorded = true })
				}
			}
			if t := c.term.Load(); t != nil && t.records.version() != cm.ResourceVersion {
				c.enqueue(recordsKey)
			}
		}, func(*corev1.ConfigMap) { c.enqueue(recordsKey) })))
	}
}

// enqueue enqueues hosts during a term.
func (c *Controller) enqueue(hosts ...string) {
	if t := c.term.Load(); t != nil {
		for _, host := range hosts {
			t.queue.Add(host)
		}
	}
}

// enqueueLost enqueues the hosts without a Node, or whose Nodes are all being deleted.
func (c *Controller) enqueueLost(hosts []string) {
	c.enqueue(slices.DeleteFunc(slices.Clone(hosts), c.index.stays)...)
}

func (c *Controller) csiNodeChanged(n *storagev1.CSINode, exists bool) {
	var entry *storagev1.CSINodeDriver
	if exists {
		entry = kube.DriverOnNode(n, c.deps.Driver)
	}
	touched, rekeyed := c.index.setCSINode(n.Name, entry, exists)
	if rekeyed {
		c.reindex()
	}
	c.enqueue(touched...)
}

// reindex sets all volumes again, for another topology key. The index has done so for the Nodes: a Node of the cache may be
// deleted meanwhile.
func (c *Controller) reindex() {
	for _, pv := range c.volumes.List() {
		c.index.setVolume(pv.Name, pv)
	}
	c.enqueue(recordsKey)
}

func (c *Controller) nodeChanged(node *corev1.Node) {
	before, _ := c.index.ambiguous()
	c.enqueue(c.index.setNode(node)...)
	if bare, _ := c.index.ambiguous(); !slices.Equal(before, bare) {
		c.enqueue(recordsKey)
	}
}

// nodeUpdated enqueues nothing for what kubelets write periodically.
func (c *Controller) nodeUpdated(old, node *corev1.Node) {
	if old.UID == node.UID && old.DeletionTimestamp.Equal(node.DeletionTimestamp) && slices.Equal(old.Finalizers, node.Finalizers) &&
		equality.Semantic.DeepEqual(old.Labels, node.Labels) && slices.Equal(ownNames(old), ownNames(node)) &&
		isReady(old) == isReady(node) && old.Spec.Unschedulable == node.Spec.Unschedulable &&
		old.Annotations[c.policy.annotation] == node.Annotations[c.policy.annotation] && !c.unprotected(node) {
		c.index.setNode(node)
		return
	}
	var former []string
	if old.UID != node.UID { // the deletion was not observed
		former = c.index.dropNode(old, c.policy.annotation, time.Now())
	}
	c.nodeChanged(node)
	c.enqueue(former...)
}

// unprotected reports whether [term.protect] adds our finalizer to a Node. Another client may have removed it before the
// watch observed that the controller added it.
func (c *Controller) unprotected(node *corev1.Node) bool {
	return c.policy.NodeFinalizerMode == FinalizerManage && c.index.registered(node.Name) && node.DeletionTimestamp == nil &&
		!slices.Contains(node.Finalizers, c.policy.NodeFinalizer)
}

func (c *Controller) claimChanged(claim *corev1.PersistentVolumeClaim) {
	c.enqueueLost(c.index.volumes.of(claim.Spec.VolumeName))
}
