// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// This file models an API server, its watches and what administrators, kubelets and the controllers of
// Kubernetes do. TestPromises drives the decisions of this package over it.

const (
	worldDriver = "local.example.com"
	worldKey    = "topology.local.example.com/node"
	worldHosts  = 4 // h0 to h3; further nodes only make the cluster bigger
)

func hostName(i int) string { return fmt.Sprintf("h%d", i) }

// view is a set of objects: those of the API server, or those in the caches of a process. Objects are never
// modified, only replaced.
type view struct {
	nodes    map[string]*corev1.Node
	csiNodes map[string]*storagev1.CSINode
	volumes  map[string]*corev1.PersistentVolume
	claims   map[string]*corev1.PersistentVolumeClaim
	pods     map[string]*corev1.Pod // by claim
}

func newView() *view {
	return &view{map[string]*corev1.Node{}, map[string]*storagev1.CSINode{}, map[string]*corev1.PersistentVolume{},
		map[string]*corev1.PersistentVolumeClaim{}, map[string]*corev1.Pod{}}
}

// nodeEvent is a change of a Node or CSINode; caches observe them in order, one by one.
type nodeEvent struct {
	at      time.Time
	name    string
	node    *corev1.Node // nil with deleted or csi
	deleted *corev1.Node // last state of a deleted Node
	csi     bool
	csiNode *storagev1.CSINode // nil: deleted
}

// world is the API server.
type world struct {
	*view
	version    int
	log        []nodeEvent
	class      *storagev1.StorageClass
	namespace  *corev1.Namespace
	stored     *corev1.ConfigMap // nil: does not exist
	interleave func(request string)
	watcher    watcher
}

// watcher observes what the process that acts writes, before it takes effect.
type watcher interface {
	deletesClaim(claim *corev1.PersistentVolumeClaim)
	deletesVolume(pv *corev1.PersistentVolume)
	releases(node *corev1.Node)
	stores(after *corev1.ConfigMap)
}

func (w *world) meta(name string) metav1.ObjectMeta {
	w.version++
	return metav1.ObjectMeta{
		Name: name, UID: types.UID(fmt.Sprint(name, "-", w.version)), ResourceVersion: fmt.Sprint(w.version),
		CreationTimestamp: metav1.Now(),
	}
}

// changed returns a copy of the metadata of an object with the next resourceVersion.
func (w *world) changed(m metav1.ObjectMeta) metav1.ObjectMeta {
	w.version++
	m.ResourceVersion = fmt.Sprint(w.version)
	m.Annotations = maps.Clone(m.Annotations)
	m.Labels = maps.Clone(m.Labels)
	m.Finalizers = slices.Clone(m.Finalizers)
	return m
}

func (w *world) setNode(n *corev1.Node) {
	w.nodes[n.Name] = n
	w.log = append(w.log, nodeEvent{at: time.Now(), name: n.Name, node: n})
}

// removeNode removes a Node from the API.
func (w *world) removeNode(name string) {
	n := w.nodes[name]
	delete(w.nodes, name)
	w.log = append(w.log, nodeEvent{at: time.Now(), name: name, deleted: n})
}

// editNode replaces a Node by a changed copy, if it exists.
func (w *world) editNode(name string, edit func(n *corev1.Node)) {
	n := w.nodes[name]
	if n == nil {
		return
	}
	next := &corev1.Node{ObjectMeta: w.changed(n.ObjectMeta), Spec: n.Spec, Status: n.Status}
	edit(next)
	if next.DeletionTimestamp != nil && len(next.Finalizers) == 0 {
		w.removeNode(name)
		return
	}
	w.setNode(next)
}

// createNode creates a Node with the driver on it; value is that of its label, "" for none.
func (w *world) createNode(name, value string, finalizer bool) {
	if w.nodes[name] != nil {
		return
	}
	n := &corev1.Node{ObjectMeta: w.meta(name)}
	if value != "" {
		n.Labels = map[string]string{worldKey: value}
	}
	if finalizer {
		n.Finalizers = []string{worldDriver + "/node"}
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	w.setNode(n)
	w.setCSINode(name)
}

func (w *world) setCSINode(name string) {
	c := &storagev1.CSINode{ObjectMeta: w.meta(name), Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
		{Name: worldDriver, NodeID: name, TopologyKeys: []string{worldKey}},
	}}}
	w.csiNodes[name] = c
	w.log = append(w.log, nodeEvent{at: time.Now(), name: name, csi: true, csiNode: c})
}

func (w *world) removeCSINode(name string) {
	if w.csiNodes[name] == nil {
		return
	}
	delete(w.csiNodes, name)
	w.log = append(w.log, nodeEvent{at: time.Now(), name: name, csi: true})
}

// deleteNode requests the deletion of a Node.
func (w *world) deleteNode(name string) {
	w.editNode(name, func(n *corev1.Node) {
		if n.DeletionTimestamp == nil {
			n.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		}
	})
}

// bind creates a volume on hosts and a claim, bound to each other.
func (w *world) bind(name string, hosts ...string) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: w.meta(name)}
	claim.Namespace, claim.Spec.VolumeName, claim.Status.Phase = "ns", "pv-"+name, corev1.ClaimBound
	claim.Spec.StorageClassName = &w.class.Name
	claim.Finalizers = []string{"kubernetes.io/pvc-protection"}
	pv := &corev1.PersistentVolume{ObjectMeta: w.meta("pv-" + name)}
	pv.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: worldDriver}
	pv.Finalizers = []string{provisionerFinalizer, "kubernetes.io/pv-protection"}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: worldDriver, VolumeHandle: name}
	pv.Spec.PersistentVolumeReclaimPolicy, pv.Spec.StorageClassName = corev1.PersistentVolumeReclaimDelete, w.class.Name
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "ns", Name: name, UID: claim.UID}
	pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: worldKey, Operator: corev1.NodeSelectorOpIn, Values: hosts}},
	}}}}
	pv.Status.Phase = corev1.VolumeBound
	w.volumes[pv.Name], w.claims[name] = pv, claim
}

// editVolume replaces a volume by a changed copy, if it exists.
func (w *world) editVolume(name string, edit func(pv *corev1.PersistentVolume)) {
	pv := w.volumes[name]
	if pv == nil {
		return
	}
	next := &corev1.PersistentVolume{ObjectMeta: w.changed(pv.ObjectMeta), Spec: pv.Spec, Status: pv.Status}
	edit(next)
	if w.volumes[name] = next; next.DeletionTimestamp != nil && len(next.Finalizers) == 0 {
		delete(w.volumes, name)
	}
}

// editClaim likewise.
func (w *world) editClaim(name string, edit func(c *corev1.PersistentVolumeClaim)) {
	c := w.claims[name]
	if c == nil {
		return
	}
	next := &corev1.PersistentVolumeClaim{ObjectMeta: w.changed(c.ObjectMeta), Spec: c.Spec, Status: c.Status}
	edit(next)
	if w.claims[name] = next; next.DeletionTimestamp != nil && len(next.Finalizers) == 0 {
		delete(w.claims, name)
		w.editVolume(next.Spec.VolumeName, func(pv *corev1.PersistentVolume) {
			if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == next.UID {
				pv.Status.Phase, pv.Status.LastPhaseTransitionTime = corev1.VolumeReleased, &metav1.Time{Time: time.Now()}
			}
		})
	}
}

// nodesOf returns the Nodes with the label value of a host, or its name.
func (w *world) nodesOf(host string) (nodes []*corev1.Node) {
	for _, n := range w.nodes {
		if n.Name == host || n.Labels[worldKey] == host {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// cacheGetter returns a getter of objects in a cache, whose maps histories replace.
func cacheGetter[T any](objects func() map[string]*T) getter[T] {
	return func(_ context.Context, name string) (*T, error) { return objects()[name], nil }
}

// cacheSource reads the caches of a process.
func cacheSource(w *world, v *view) source {
	claims := cacheGetter(func() map[string]*corev1.PersistentVolumeClaim { return v.claims })
	return source{
		volume:    cacheGetter(func() map[string]*corev1.PersistentVolume { return v.volumes }),
		node:      cacheGetter(func() map[string]*corev1.Node { return v.nodes }),
		csiNode:   cacheGetter(func() map[string]*storagev1.CSINode { return v.csiNodes }),
		class:     func(context.Context, string) (*storagev1.StorageClass, error) { return w.class, nil },
		namespace: func(context.Context, string) (*corev1.Namespace, error) { return w.namespace, nil },
		claim: func(ctx context.Context, _, name string) (*corev1.PersistentVolumeClaim, error) {
			return claims(ctx, name)
		},
		labelled: func(context.Context, string, string) ([]*corev1.Node, error) { return nil, nil },
		pods: func(_ context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
			if pod := v.pods[claim.Name]; pod != nil {
				return []*corev1.Pod{pod}, nil
			}
			return nil, nil
		},
		attachments: func(context.Context, string) ([]string, error) { return nil, nil },
	}
}
