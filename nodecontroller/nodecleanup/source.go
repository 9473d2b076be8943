// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// getter returns the object with a name, or nil if it does not exist.
type getter[T any] func(ctx context.Context, name string) (*T, error)

// source reads objects from caches or from the API server, with the same meaning.
type source struct {
	volume    getter[corev1.PersistentVolume]
	class     getter[storagev1.StorageClass]
	namespace getter[corev1.Namespace]
	node      getter[corev1.Node]
	csiNode   getter[storagev1.CSINode]
	claim     func(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	// labelled returns the Nodes with this label.
	labelled func(ctx context.Context, key, value string) ([]*corev1.Node, error)
	// pods returns the pods that use a claim, on any node and in any phase.
	pods func(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error)
	// attachments returns the names of the VolumeAttachments of a volume.
	attachments func(ctx context.Context, volume string) ([]string, error)
}

// live is the source that reads from the API server. Only NotFound means that an object does not
// exist; any other error ends the attempt.
type live struct {
	source
	driver  getter[storagev1.CSIDriver]
	client  kubernetes.Interface
	timeout time.Duration // of one request
}

func newLive(client kubernetes.Interface, timeout time.Duration) live {
	l := live{client: client, timeout: timeout}
	core, storage := client.CoreV1(), client.StorageV1()
	l.driver = reader(l, "CSIDriver", storage.CSIDrivers().Get)
	l.source = source{
		volume: reader(l, "PersistentVolume", core.PersistentVolumes().Get), class: reader(l, "StorageClass", storage.StorageClasses().Get),
		namespace: reader(l, "Namespace", core.Namespaces().Get), node: reader(l, "Node", core.Nodes().Get),
		csiNode: reader(l, "CSINode", storage.CSINodes().Get), labelled: l.listLabelled, pods: l.listPods, attachments: l.listAttachments,
	}
	l.claim = func(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
		return reader(l, "PersistentVolumeClaim", core.PersistentVolumeClaims(namespace).Get)(ctx, name)
	}
	return l
}

// reader returns a function that gets an object from the API server.
func reader[T any](l live, what string, get func(context.Context, string, metav1.GetOptions) (*T, error)) getter[T] {
	return func(ctx context.Context, name string) (*T, error) {
		ctx, cancel := context.WithTimeout(ctx, l.timeout)
		defer cancel()
		obj, err := get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading %s %q: %w", what, name, err)
		}
		return obj, nil
	}
}

func (l live) listLabelled(ctx context.Context, key, value string) ([]*corev1.Node, error) {
	if key == "" || len(validation.IsValidLabelValue(value)) > 0 {
		return nil, nil // no node can have it
	}
	selector := labels.SelectorFromSet(labels.Set{key: value}).String()
	return list[*corev1.Node](ctx, l, "Nodes", func(ctx context.Context, o metav1.ListOptions) (*corev1.NodeList, error) {
		o.LabelSelector = selector
		return l.client.CoreV1().Nodes().List(ctx, o)
	})
}

func (l live) listPods(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	pods, err := list[*corev1.Pod](ctx, l, "Pods", l.client.CoreV1().Pods(claim.Namespace).List)
	return slices.DeleteFunc(pods, func(p *corev1.Pod) bool { return !slices.Contains(kube.ClaimsOfPod(p), kube.Key(claim)) }), err
}

func (l live) listAttachments(ctx context.Context, volume string) ([]string, error) {
	all, err := list[*storagev1.VolumeAttachment](ctx, l, "VolumeAttachments", l.client.StorageV1().VolumeAttachments().List)
	var names []string
	for _, va := range all {
		if pv := va.Spec.Source.PersistentVolumeName; pv != nil && *pv == volume {
			names = append(names, va.Name)
		}
	}
	return names, err
}

func (l live) listVolumes(ctx context.Context) ([]*corev1.PersistentVolume, error) {
	return list[*corev1.PersistentVolume](ctx, l, "PersistentVolumes", l.client.CoreV1().PersistentVolumes().List)
}

// index lists all CSINodes, then all Nodes: a node that appears in between has its Node.
func (l live) index(ctx context.Context, driver, key string) (*index, error) {
	i := newIndex(driver, key)
	csiNodes, err := list[*storagev1.CSINode](ctx, l, "CSINodes", l.client.StorageV1().CSINodes().List)
	if err != nil {
		return nil, err
	}
	for _, n := range csiNodes {
		i.setCSINode(n.Name, kube.DriverOnNode(n, driver), true)
	}
	nodes, err := list[*corev1.Node](ctx, l, "Nodes", l.client.CoreV1().Nodes().List)
	for _, n := range nodes {
		i.setNode(n)
	}
	return i, err
}

// ready reports whether the driver is on one of nodes that is ready. It reads at most three.
func (l live) ready(ctx context.Context, nodes []string, driver string) (bool, error) {
	for _, name := range nodes[:min(3, len(nodes))] {
		node, err := l.node(ctx, name)
		if err != nil {
			return false, err
		}
		csiNode, err := l.csiNode(ctx, name)
		if err != nil {
			return false, err
		}
		if node != nil && isReady(node) && node.DeletionTimestamp == nil && kube.DriverOnNode(csiNode, driver) != nil {
			return true, nil
		}
	}
	return false, nil
}

// list returns all objects, in pages that each have the timeout of l.
func list[T runtime.Object, L runtime.Object](
	ctx context.Context, l live, what string, page func(context.Context, metav1.ListOptions) (L, error),
) ([]T, error) {
	all, err := kube.ListAll[T](ctx, func(ctx context.Context, o metav1.ListOptions) (L, error) {
		ctx, cancel := context.WithTimeout(ctx, l.timeout)
		defer cancel()
		return page(ctx, o)
	})
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", what, err)
	}
	return all, nil
}

// cachedGetter returns a getter of objects in a cache.
func cachedGetter[T any](get func(string) (*T, bool)) getter[T] {
	return func(_ context.Context, name string) (*T, error) {
		obj, ok := get(name)
		if !ok {
			return nil, nil
		}
		return obj, nil
	}
}

// caches returns the source that reads the caches of the term.
func (t *term) caches() source {
	claims := cachedGetter(t.claims.Get)
	return source{
		volume: cachedGetter(t.volumes.Get), class: cachedGetter(t.c.classes.Get), namespace: t.namespace,
		node: cachedGetter(t.nodes.Get), csiNode: cachedGetter(t.c.csiNodes.Get),
		claim: func(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
			return claims(ctx, namespace+"/"+name)
		},
		// The index has found the names of these Nodes.
		labelled: func(context.Context, string, string) ([]*corev1.Node, error) { return nil, nil },
		pods: func(_ context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
			if t.c.pods == nil {
				return nil, nil
			}
			return t.c.pods.ByIndex(kube.ByClaim, kube.Key(claim)), nil
		},
		attachments: func(_ context.Context, volume string) (names []string, err error) {
			if t.c.attachments == nil {
				return nil, nil
			}
			for _, va := range t.c.attachments.ByIndex(kube.ByVolume, volume) {
				names = append(names, va.Name)
			}
			return names, nil
		},
	}
}

// namespace reads a Namespace from the API server, at most twice in [Settings.LookInterval], so that each check of the lost
// nodes has a new one: Namespaces are not watched.
func (t *term) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	if ns, ok := t.namespaces.Get(name); ok {
		ns, _ := ns.(*corev1.Namespace)
		return ns, nil
	}
	ns, err := t.live.namespace(ctx, name)
	if err == nil {
		t.namespaces.Set(name, ns, t.policy.LookInterval/2)
	}
	return ns, err
}

// isName reports whether an object can have this name.
func isName(name string) bool { return name != "" && len(content.IsPathSegmentName(name)) == 0 }
