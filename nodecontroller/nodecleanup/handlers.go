// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	expiring "k8s.io/apimachinery/pkg/util/cache"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// onChange returns handlers that call changed with every version of an object, and with its last one.
func onChange[T metav1.Object](changed func(T)) kube.Handlers[T] {
	return kube.Handlers[T]{Add: changed, Update: func(_, obj T) { changed(obj) }, Delete: changed}
}

// watch registers the handlers. Those of Nodes and CSINodes work on every replica; all enqueue a pass during a term.
func (c *Controller) watch() {
	add := c.registered.Add
	add(c.nodes.Handle(kube.Handlers[*corev1.Node]{
		Add: func(*corev1.Node) { c.enqueue(true) }, Update: c.nodeUpdated, Delete: c.nodeDeleted,
	}))
	add(c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
		Add: func(*storagev1.CSINode) { c.enqueue(true) },
		Update: func(old, n *storagev1.CSINode) {
			if old.UID != n.UID {
				c.csiNodeDeleted(old)
			}
			c.enqueue(!equality.Semantic.DeepEqual(kube.DriverOnNode(old, c.cfg.Driver), kube.DriverOnNode(n, c.cfg.Driver)))
		},
		Delete: c.csiNodeDeleted,
	}))
	volumes := onChange(func(pv *corev1.PersistentVolume) { c.enqueue(c.mayBeLost(pv)) })
	volumes.Add = c.volumeCreated
	add(c.volumes.Handle(volumes))
	add(c.claims.Handle(onChange(func(claim *corev1.PersistentVolumeClaim) { c.enqueue(c.isOfLost(claim.Spec.VolumeName)) })))
	add(c.classes.Handle(onChange(func(class *storagev1.StorageClass) { c.enqueue(class.Provisioner == c.cfg.Driver) })))
	if c.attachments != nil {
		c.registered.AddUnawaited(c.attachments.Handle(onChange(func(va *storagev1.VolumeAttachment) {
			if pv := va.Spec.Source.PersistentVolumeName; pv != nil {
				c.enqueue(c.isOfLost(*pv))
			}
		})))
	}
	if c.configMap != nil {
		c.registered.AddUnawaited(c.configMap.Handle(onChange(func(cm *corev1.ConfigMap) {
			c.enqueue(c.version.Load() != cm.ResourceVersion)
		})))
	}
	if c.deps.Resources != nil {
		registration, err := c.deps.Resources.OnChange(func(node string) {
			p := c.Plan()
			c.enqueue(p == nil || !p.world.stays[node])
		})
		c.registered.AddUnawaited(registration, err)
		c.resources, c.optional = registration.Synced, append(c.optional, registration.Synced)
	}
}

// enqueue enqueues a pass during a term, if an event is relevant.
func (c *Controller) enqueue(relevant bool) {
	if queue := c.queue.Load(); queue != nil && relevant {
		queue.Add(c.cfg.Driver)
	}
}

// mayBeLost reports whether a value of pv meant no Node that stays in the last plan.
func (c *Controller) mayBeLost(pv *corev1.PersistentVolume) bool {
	p := c.Plan()
	if p == nil {
		return true
	}
	values, _ := localValues(pv, c.cfg.Driver, p.world.Key)
	return slices.ContainsFunc(values, func(value string) bool { return !p.world.stays[value] })
}

// isOfLost is mayBeLost for the volume with a name.
func (c *Controller) isOfLost(volume string) bool {
	pv, ok := c.volumes.Get(volume)
	return ok && c.mayBeLost(pv)
}

// volumeCreated: a custom resource of the volume may be due, because the lists of the pass lack the volume.
func (c *Controller) volumeCreated(pv *corev1.PersistentVolume) {
	if c.mayBeLost(pv) {
		c.changes.Add(1)
		c.enqueue(true)
	}
}

func (c *Controller) nodeDeleted(node *corev1.Node) {
	c.changes.Add(1)
	c.departures.add(c.cfg.Settings, node, node, true)
	c.enqueue(true)
}

func (c *Controller) csiNodeDeleted(*storagev1.CSINode) {
	c.changes.Add(1)
	c.enqueue(true)
}

// nodeUpdated enqueues nothing for what kubelets write periodically.
func (c *Controller) nodeUpdated(old, node *corev1.Node) {
	switch {
	case old.UID != node.UID: // the deletion was not observed
		c.nodeDeleted(old)
		return
	case old.DeletionTimestamp == nil && node.DeletionTimestamp != nil:
		c.changes.Add(1)
	}
	for label, value := range old.Labels {
		if node.Labels[label] != value && c.mayBeKey(node, label) {
			c.departures.add(c.cfg.Settings, old, node, false)
			break
		}
	}
	annotation := CleanupAnnotation(c.cfg.Driver)
	c.enqueue(!old.DeletionTimestamp.Equal(node.DeletionTimestamp) || !slices.Equal(old.Finalizers, node.Finalizers) ||
		!maps.Equal(old.Labels, node.Labels) || !slices.Equal(ownNames(old), ownNames(node)) ||
		old.Annotations[annotation] != node.Annotations[annotation] || old.Spec.Unschedulable != node.Spec.Unschedulable ||
		node.DeletionTimestamp != nil && isReady(old) != isReady(node) || c.unprotected(node))
}

// unprotected reports whether a pass adds our finalizer to a Node. Another client may have removed it before the watch observed
// that this process has added it.
func (c *Controller) unprotected(node *corev1.Node) bool {
	csiNode, _ := c.csiNodes.Get(node.Name)
	return c.cfg.protects(node, csiNode)
}

// mayBeKey reports whether volumes may name a Node by a label. Other labels may change often.
func (c *Controller) mayBeKey(node *corev1.Node, label string) bool {
	key := c.cfg.TopologyNodeKey
	if c.configMap != nil && key == "" {
		if cm, ok := c.configMap.Get(c.deps.Namespace + "/" + ConfigMapName(c.deps.Driver)); ok {
			key = cm.Annotations[AnnotationTopologyKey]
		}
	}
	csiNode, _ := c.csiNodes.Get(node.Name)
	d := kube.DriverOnNode(csiNode, c.cfg.Driver)
	return label == key || label == corev1.LabelHostname || d == nil && key == "" || d != nil && slices.Contains(d.TopologyKeys, label)
}

const (
	// departedAge is the time for which deleted Nodes are remembered. The records outlive it.
	departedAge = time.Hour
	// maxDeparted bounds the Nodes that are remembered, without those that had opted out. Nothing is deleted for departedAge after
	// one that was not remembered.
	maxDeparted = 10_000
)

// departures are the Nodes that were deleted lately, and the former labels of Nodes. The zero value is ready for use.
type departures struct {
	mu     sync.Mutex
	nodes  []departed
	missed time.Time // when a Node was not remembered last
}

// add remembers the last state of a Node, or its state before its labels changed. It had opted out if one of the two states has.
func (d *departures) add(s Settings, last, node *corev1.Node, deleted bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := departed{Name: last.Name, UID: last.UID, Labels: last.Labels, Created: last.CreationTimestamp.Time, At: time.Now(),
		Deleted: deleted, OptedOut: s.optOut("Node", last) != "" || s.optOut("Node", node) != ""}
	if len(d.nodes) >= maxDeparted && !n.OptedOut {
		d.missed = n.At
		return
	}
	d.nodes = append(d.nodes, n)
}

// since forgets the older ones, and returns the Nodes of the last departedAge. incomplete says that there were more.
func (d *departures) since(now time.Time) (nodes []departed, incomplete string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nodes = slices.DeleteFunc(d.nodes, func(n departed) bool { return now.Sub(n.At) > departedAge })
	if now.Sub(d.missed) <= departedAge {
		incomplete = fmt.Sprintf("more than %d Nodes were deleted or relabelled within %v", maxDeparted, departedAge)
	}
	return slices.Clone(d.nodes), incomplete
}

// caches is the [reader] that reads from the caches. It reads Namespaces, which are not watched, from the API server.
type caches struct {
	c          *Controller
	live       apiServer
	namespaces *expiring.Expiring // that were read lately
}

func (r caches) volume(_ context.Context, name string) (*corev1.PersistentVolume, error) {
	pv, _ := r.c.volumes.Get(name)
	return pv, nil
}

func (r caches) class(_ context.Context, name string) (*storagev1.StorageClass, error) {
	class, _ := r.c.classes.Get(name)
	return class, nil
}

func (r caches) node(_ context.Context, name string) (*corev1.Node, error) {
	node, _ := r.c.nodes.Get(name)
	return node, nil
}

func (r caches) claim(_ context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	claim, _ := r.c.claims.Get(namespace + "/" + name)
	return claim, nil
}

// namespace reads at most twice in [Settings.CheckInterval], so that each check has a new one.
func (r caches) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	if ns, ok := r.namespaces.Get(name); ok {
		ns, _ := ns.(*corev1.Namespace)
		return ns, nil
	}
	ns, err := r.live.namespace(ctx, name)
	if err == nil {
		r.namespaces.Set(name, ns, r.c.cfg.CheckInterval/2)
	}
	return ns, err
}

var errPodsUnknown = errors.New("the cache of pods is not complete")

func (r caches) pods(_ context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	switch {
	case r.c.pods == nil: // nothing is deleted
		return nil, nil
	case !r.c.pods.Synced():
		return nil, errPodsUnknown
	}
	return r.c.pods.ByIndex(kube.ByClaim, kube.Key(claim)), nil
}

func (r caches) attachments(_ context.Context, volume string) (names []string, err error) {
	if r.c.attachments == nil {
		return nil, nil
	}
	for _, va := range kube.AttachmentsOf(*r.c.attachments, volume) {
		names = append(names, va.Name)
	}
	return names, nil
}
