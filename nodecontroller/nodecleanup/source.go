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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// source reads objects from caches or from the API server, with the same meaning. Objects that do
// not exist are nil.
type source interface {
	volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
	claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	class(ctx context.Context, name string) (*storagev1.StorageClass, error)
	namespace(ctx context.Context, name string) (*corev1.Namespace, error)
	node(ctx context.Context, name string) (*corev1.Node, error)
	csiNode(ctx context.Context, name string) (*storagev1.CSINode, error)
	// labelled returns the Nodes with this label.
	labelled(ctx context.Context, key, value string) ([]*corev1.Node, error)
	// pods returns the pods that use a claim, on any node and in any phase.
	pods(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error)
	// attachments returns the names of the VolumeAttachments of a volume.
	attachments(ctx context.Context, volume string) ([]string, error)
}

// live is the source that reads from the API server. Only NotFound means that an object does not
// exist; any other error ends the attempt.
type live struct {
	client  kubernetes.Interface
	timeout time.Duration // of one request
}

// read gets an object. It returns nil for NotFound.
func read[T any](
	ctx context.Context, l live, what, name string, get func(context.Context, string, metav1.GetOptions) (*T, error),
) (*T, error) {
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

func (l live) volume(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	return read(ctx, l, "PersistentVolume", name, l.client.CoreV1().PersistentVolumes().Get)
}

func (l live) claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	return read(ctx, l, "PersistentVolumeClaim", name, l.client.CoreV1().PersistentVolumeClaims(namespace).Get)
}

func (l live) class(ctx context.Context, name string) (*storagev1.StorageClass, error) {
	return read(ctx, l, "StorageClass", name, l.client.StorageV1().StorageClasses().Get)
}

func (l live) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return read(ctx, l, "Namespace", name, l.client.CoreV1().Namespaces().Get)
}

func (l live) node(ctx context.Context, name string) (*corev1.Node, error) {
	return read(ctx, l, "Node", name, l.client.CoreV1().Nodes().Get)
}

func (l live) csiNode(ctx context.Context, name string) (*storagev1.CSINode, error) {
	return read(ctx, l, "CSINode", name, l.client.StorageV1().CSINodes().Get)
}

func (l live) labelled(ctx context.Context, key, value string) ([]*corev1.Node, error) {
	if key == "" || len(validation.IsValidLabelValue(value)) > 0 {
		return nil, nil // no node can have it
	}
	selector := labels.SelectorFromSet(labels.Set{key: value}).String()
	return list[*corev1.Node](ctx, l, "Nodes", func(ctx context.Context, o metav1.ListOptions) (*corev1.NodeList, error) {
		o.LabelSelector = selector
		return l.client.CoreV1().Nodes().List(ctx, o)
	})
}

func (l live) pods(ctx context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	pods, err := list[*corev1.Pod](ctx, l, "Pods", l.client.CoreV1().Pods(claim.Namespace).List)
	return slices.DeleteFunc(pods, func(p *corev1.Pod) bool { return !slices.Contains(kube.ClaimsOfPod(p), kube.Key(claim)) }), err
}

func (l live) attachments(ctx context.Context, volume string) ([]string, error) {
	all, err := list[*storagev1.VolumeAttachment](ctx, l, "VolumeAttachments", l.client.StorageV1().VolumeAttachments().List)
	var names []string
	for _, va := range all {
		if pv := va.Spec.Source.PersistentVolumeName; pv != nil && *pv == volume {
			names = append(names, va.Name)
		}
	}
	return names, err
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

// sanity reports whether [live.ready], and whether the cluster is the one whose namespace kube-system has the UID system.
func (l live) sanity(ctx context.Context, nodes []string, driver string, system types.UID) (ready, same bool, err error) {
	if ready, err = l.ready(ctx, nodes, driver); err != nil {
		return false, false, err
	}
	ns, err := l.namespace(ctx, metav1.NamespaceSystem)
	return ready, ns != nil && ns.UID == system, err
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

// caches is the source that reads the caches of a term. Namespaces are not watched: they are read
// live, once in [Settings.LookInterval] at most.
type caches struct {
	t *term
	live
}

func found[T any](obj *T, ok bool) (*T, error) {
	if !ok {
		return nil, nil
	}
	return obj, nil
}

func (s caches) volume(_ context.Context, name string) (*corev1.PersistentVolume, error) {
	return found(s.t.volumes.Get(name))
}

func (s caches) claim(_ context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	return found(s.t.claims.Get(namespace + "/" + name))
}

func (s caches) class(_ context.Context, name string) (*storagev1.StorageClass, error) {
	return found(s.t.c.classes.Get(name))
}

func (s caches) node(_ context.Context, name string) (*corev1.Node, error) {
	return found(s.t.nodes.Get(name))
}

func (s caches) csiNode(_ context.Context, name string) (*storagev1.CSINode, error) {
	return found(s.t.c.csiNodes.Get(name))
}

// labelled returns nothing: the index has found the names of these Nodes.
func (s caches) labelled(context.Context, string, string) ([]*corev1.Node, error) { return nil, nil }

func (s caches) pods(_ context.Context, claim *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	if s.t.c.pods == nil {
		return nil, nil
	}
	return s.t.c.pods.ByIndex(kube.ByClaim, kube.Key(claim)), nil
}

func (s caches) attachments(_ context.Context, volume string) ([]string, error) {
	if s.t.c.attachments == nil {
		return nil, nil
	}
	var names []string
	for _, va := range s.t.c.attachments.ByIndex(kube.ByVolume, volume) {
		names = append(names, va.Name)
	}
	return names, nil
}

func (s caches) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	if ns, ok := s.t.namespaces.Get(name); ok {
		ns, _ := ns.(*corev1.Namespace)
		return ns, nil
	}
	ns, err := s.live.namespace(ctx, name)
	if err == nil {
		s.t.namespaces.Set(name, ns, s.t.policy.LookInterval)
	}
	return ns, err
}

// isName reports whether an object can have this name.
func isName(name string) bool { return name != "" && len(content.IsPathSegmentName(name)) == 0 }
