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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// apiServer is the [reader] that reads from the API server. An error of a read never means that an object does not exist.
type apiServer struct {
	client    kubernetes.Interface
	resources Resources     // nil: there are none
	timeout   time.Duration // of one request
}

// get returns the object with a name, or nil if it does not exist.
func get[T any](
	ctx context.Context, a apiServer, kind, name string, request func(context.Context, string, metav1.GetOptions) (*T, error),
) (*T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	obj, err := request(ctx, name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s %q: %w", kind, name, err)
	}
	return obj, nil
}

func (a apiServer) volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	return get(ctx, a, "PersistentVolume", name, a.client.CoreV1().PersistentVolumes().Get)
}

func (a apiServer) class(ctx context.Context, name string) (*storagev1.StorageClass, error) {
	return get(ctx, a, "StorageClass", name, a.client.StorageV1().StorageClasses().Get)
}

func (a apiServer) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return get(ctx, a, "Namespace", name, a.client.CoreV1().Namespaces().Get)
}

func (a apiServer) node(ctx context.Context, name string) (*corev1.Node, error) {
	return get(ctx, a, "Node", name, a.client.CoreV1().Nodes().Get)
}

func (a apiServer) csiNode(ctx context.Context, name string) (*storagev1.CSINode, error) {
	return get(ctx, a, "CSINode", name, a.client.StorageV1().CSINodes().Get)
}

func (a apiServer) configMap(ctx context.Context, namespace, driver string) (*corev1.ConfigMap, error) {
	return get(ctx, a, "ConfigMap", ConfigMapName(driver), a.client.CoreV1().ConfigMaps(namespace).Get)
}

func (a apiServer) claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	return get(ctx, a, "PersistentVolumeClaim", name, a.client.CoreV1().PersistentVolumeClaims(namespace).Get)
}

func (a apiServer) resource(ctx context.Context, name string) (*Resource, error) {
	if a.resources == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return a.resources.Get(ctx, name)
}

// list returns all objects, in pages that each have the timeout of a.
func list[T runtime.Object, L runtime.Object](
	ctx context.Context, a apiServer, what string, page func(context.Context, metav1.ListOptions) (L, error),
) ([]T, error) {
	all, err := kube.ListAll[T](ctx, func(ctx context.Context, o metav1.ListOptions) (L, error) {
		ctx, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		return page(ctx, o)
	})
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", what, err)
	}
	return all, nil
}

// nodes returns the Nodes with a label, or all of them for an empty selector, without the fields that are large and not used.
func (a apiServer) nodes(ctx context.Context, selector string) ([]*corev1.Node, error) {
	return list[*corev1.Node](ctx, a, "Nodes", func(ctx context.Context, o metav1.ListOptions) (*corev1.NodeList, error) {
		o.LabelSelector = selector
		found, err := a.client.CoreV1().Nodes().List(ctx, o)
		if err != nil {
			return nil, err
		}
		for i := range found.Items {
			found.Items[i].ManagedFields, found.Items[i].Status.Images = nil, nil
		}
		return found, nil
	})
}

func (a apiServer) labelled(ctx context.Context, key, value string) ([]*corev1.Node, error) {
	return a.nodes(ctx, labels.SelectorFromSet(labels.Set{key: value}).String())
}

func (a apiServer) pods(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	pods, err := list[*corev1.Pod](ctx, a, "Pods", a.client.CoreV1().Pods(claim.Namespace).List)
	return slices.DeleteFunc(pods, func(p *corev1.Pod) bool { return !slices.Contains(kube.ClaimsOfPod(p), kube.Key(claim)) }), err
}

func (a apiServer) attachments(ctx context.Context, volume string) (names []string, err error) {
	all, err := list[*storagev1.VolumeAttachment](ctx, a, "VolumeAttachments", a.client.StorageV1().VolumeAttachments().List)
	for _, va := range all {
		if pv := va.Spec.Source.PersistentVolumeName; pv != nil && *pv == volume {
			names = append(names, va.Name)
		}
	}
	return names, err
}

// listed are the lists of a pass.
type listed struct {
	at            time.Time // when those of Nodes and CSINodes began; zero: there are none
	nodes         []*corev1.Node
	csiNodes      []*storagev1.CSINode
	volumes       []*corev1.PersistentVolume
	volumesListed bool
}

// lists lists all Nodes and CSINodes, or all PersistentVolumes, in addition to what known has. The Nodes are listed last: a node
// that appears in between has its Node.
func (a apiServer) lists(ctx context.Context, known listed, nodes, volumes bool) (l listed, err error) {
	l = known
	if nodes {
		l.at = time.Now()
		l.csiNodes, err = list[*storagev1.CSINode](ctx, a, "CSINodes", a.client.StorageV1().CSINodes().List)
		if err != nil {
			return known, err
		}
		if l.nodes, err = a.nodes(ctx, ""); err != nil {
			return known, err
		}
	}
	if volumes {
		l.volumes, err = list[*corev1.PersistentVolume](ctx, a, "PersistentVolumes", a.client.CoreV1().PersistentVolumes().List)
		if err != nil {
			return known, err
		}
		l.volumesListed = true
	}
	return l, nil
}
