package nodecontroller

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// pageSize is how many objects a live list asks for at once.
const pageSize = 500

// reader asks the API server itself, never a cache: a cache that lags, or that lost its
// watch, has made others delete the data of nodes that were there. Only a clear NotFound
// says that something is gone; any other error ends the attempt.
type reader struct {
	client  kubernetes.Interface
	policy  policy
	timeout time.Duration // of one request
	system  *atomic.Value // the UID of kube-system at the start of the process; empty: not read yet
	spent   *spent        // what has been approved and is over
	// tried is told how the attempts to read that have ended.
	tried func(what string, err error)
}

// identifyInterval is the time between two attempts to find out which cluster this is.
const identifyInterval = 5 * time.Second

// identify notes by what the cluster is known again, once for the life of the process: a
// Lease may have been lost because another cluster has begun to answer. Until it has
// succeeded, nothing is cleaned up of nodes that are gone.
func (r *reader) identify(ctx context.Context) {
	for r.system.Load() == nil {
		ns, ok, err := r.namespace(ctx, metav1.NamespaceSystem)
		r.tried("namespace/"+metav1.NamespaceSystem, err)
		if ok {
			r.system.Store(ns.UID)
			return
		}
		klog.FromContext(ctx).Info("The namespace by which a cluster is known cannot be read; nothing is cleaned up until it can", "namespace", metav1.NamespaceSystem, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(identifyInterval):
		}
	}
}

// sameCluster tells whether this is the cluster in which the work began.
func (r *reader) sameCluster(ctx context.Context) (bool, error) {
	began := r.system.Load()
	if began == nil { // the first workers are faster: that is no reason to wait as long as for another cluster
		return false, fmt.Errorf("the namespace %s, by which the cluster is known again, has not been read yet", metav1.NamespaceSystem)
	}
	ns, ok, err := r.namespace(ctx, metav1.NamespaceSystem)
	return ok && began == ns.UID, err
}

// read is a GET whose NotFound is an answer.
func read[T any](ctx context.Context, timeout time.Duration, what, name string, get func(context.Context, string, metav1.GetOptions) (T, error)) (obj T, exists bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	obj, err = get(ctx, name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return obj, false, nil
	}
	if err != nil {
		return obj, false, fmt.Errorf("reading %s %q: %w", what, name, err)
	}
	return obj, true, nil
}

func (r *reader) node(ctx context.Context, name string) (*corev1.Node, bool, error) {
	return read(ctx, r.timeout, "Node", name, r.client.CoreV1().Nodes().Get)
}

func (r *reader) csiNode(ctx context.Context, name string) (*storagev1.CSINode, bool, error) {
	return read(ctx, r.timeout, "CSINode", name, r.client.StorageV1().CSINodes().Get)
}

func (r *reader) volume(ctx context.Context, name string) (*corev1.PersistentVolume, bool, error) {
	return read(ctx, r.timeout, "PersistentVolume", name, r.client.CoreV1().PersistentVolumes().Get)
}

func (r *reader) claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, bool, error) {
	return read(ctx, r.timeout, "PersistentVolumeClaim", name, r.client.CoreV1().PersistentVolumeClaims(namespace).Get)
}

func (r *reader) class(ctx context.Context, name string) (*storagev1.StorageClass, bool, error) {
	return read(ctx, r.timeout, "StorageClass", name, r.client.StorageV1().StorageClasses().Get)
}

func (r *reader) namespace(ctx context.Context, name string) (*corev1.Namespace, bool, error) {
	return read(ctx, r.timeout, "Namespace", name, r.client.CoreV1().Namespaces().Get)
}

// approval is what the administrator has approved just now.
func (r *reader) approval(ctx context.Context, now time.Time) (approval, error) {
	driver, ok, err := read(ctx, r.timeout, "CSIDriver", r.policy.driver, r.client.StorageV1().CSIDrivers().Get)
	if err != nil || !ok {
		return approval{}, err
	}
	granted, _ := r.policy.ann.parseApproval(driver.Annotations, now) // what has no effect was told when it was written
	return r.spent.from(granted), nil
}

// pages calls visit for every object of a kind until it returns false. list makes one
// page and returns its objects and where to go on.
func pages[T any](ctx context.Context, timeout time.Duration, what string, list func(context.Context, metav1.ListOptions) ([]T, string, error), opts metav1.ListOptions, visit func(T) bool) error {
	opts.Limit = pageSize
	for {
		page, cancel := context.WithTimeout(ctx, timeout)
		items, next, err := list(page, opts)
		cancel()
		if err != nil {
			return fmt.Errorf("listing %s: %w", what, err)
		}
		for _, item := range items {
			if !visit(item) {
				return nil
			}
		}
		if next == "" {
			return nil
		}
		opts.Continue = next
	}
}

// named is every node that has one of names as its name, or one of values as its label
// key, and the CSINodes called like one of names.
func (r *reader) named(ctx context.Context, key string, values, names []string) (nodes []*corev1.Node, csiNodes []*storagev1.CSINode, err error) {
	seen := map[string]bool{}
	for _, name := range names {
		if name == "" || len(content.IsPathSegmentName(name)) > 0 || seen[name] {
			continue // a value that is no name: nothing can be called that
		}
		seen[name] = true
		node, ok, err := r.node(ctx, name)
		if err != nil {
			return nil, nil, err
		}
		if ok {
			nodes = append(nodes, node)
		}
		csiNode, ok, err := r.csiNode(ctx, name)
		if err != nil {
			return nil, nil, err
		}
		if ok {
			csiNodes = append(csiNodes, csiNode)
		}
	}
	valid := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return len(validation.IsValidLabelValue(v)) > 0 })
	if len(valid) == 0 {
		return nodes, csiNodes, nil
	}
	requirement, err := labels.NewRequirement(key, selection.In, valid)
	if err != nil {
		return nil, nil, fmt.Errorf("looking for nodes by their label %s: %w", key, err)
	}
	opts := metav1.ListOptions{LabelSelector: labels.NewSelector().Add(*requirement).String()}
	err = pages(ctx, r.timeout, "Nodes", r.listNodes, opts, func(node *corev1.Node) bool {
		if !slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Name == node.Name }) {
			nodes = append(nodes, node)
		}
		return true
	})
	return nodes, csiNodes, err
}

func (r *reader) listNodes(ctx context.Context, opts metav1.ListOptions) ([]*corev1.Node, string, error) {
	list, err := r.client.CoreV1().Nodes().List(ctx, opts)
	if err != nil {
		return nil, "", err
	}
	return pointers(list.Items), list.Continue, nil
}

func pointers[T any](items []T) []*T {
	out := make([]*T, len(items))
	for i := range items {
		out[i] = &items[i]
	}
	return out
}

// readyNode is a ready node that has the driver; "" when there is none. likely is asked
// first, so that not all nodes have to be read.
func (r *reader) readyNode(ctx context.Context, likely []string) (string, error) {
	for _, name := range likely {
		node, ok, err := r.node(ctx, name)
		if err != nil {
			return "", err
		}
		if !ok || !isReady(node) || node.DeletionTimestamp != nil {
			continue
		}
		csiNode, ok, err := r.csiNode(ctx, name)
		if err != nil {
			return "", err
		}
		if ok && r.hasDriver(csiNode) {
			return name, nil
		}
	}
	drivers := map[string]bool{}
	err := pages(ctx, r.timeout, "CSINodes", r.listCSINodes, metav1.ListOptions{}, func(n *storagev1.CSINode) bool {
		drivers[n.Name] = r.hasDriver(n)
		return true
	})
	if err != nil {
		return "", err
	}
	found := ""
	err = pages(ctx, r.timeout, "Nodes", r.listNodes, metav1.ListOptions{}, func(n *corev1.Node) bool {
		if drivers[n.Name] && isReady(n) && n.DeletionTimestamp == nil {
			found = n.Name
		}
		return found == ""
	})
	return found, err
}

func (r *reader) listCSINodes(ctx context.Context, opts metav1.ListOptions) ([]*storagev1.CSINode, string, error) {
	list, err := r.client.StorageV1().CSINodes().List(ctx, opts)
	if err != nil {
		return nil, "", err
	}
	return pointers(list.Items), list.Continue, nil
}

func (r *reader) hasDriver(n *storagev1.CSINode) bool {
	_, ok := registration(n, r.policy.driver)
	return ok
}

// users is the pods that use a claim on a node that exists and is none of except.
func (r *reader) users(ctx context.Context, namespace, claim string, except []string) ([]string, error) {
	nodes := map[string][]string{} // pods by node
	list := func(ctx context.Context, opts metav1.ListOptions) ([]*corev1.Pod, string, error) {
		list, err := r.client.CoreV1().Pods(namespace).List(ctx, opts)
		if err != nil {
			return nil, "", err
		}
		return pointers(list.Items), list.Continue, nil
	}
	err := pages(ctx, r.timeout, "Pods", list, metav1.ListOptions{}, func(pod *corev1.Pod) bool {
		ended := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		if node := pod.Spec.NodeName; node != "" && !ended && !slices.Contains(except, node) && slices.Contains(kube.ClaimsOfPod(pod), namespace+"/"+claim) {
			nodes[node] = append(nodes[node], kube.Key(pod))
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	var users []string
	for node, pods := range nodes {
		_, exists, err := r.node(ctx, node)
		if err != nil {
			return nil, err
		}
		if exists { // the pods of others are left to the garbage collection of pods
			users = append(users, pods...)
		}
	}
	slices.Sort(users)
	return users, nil
}

// attachments is the names of the VolumeAttachments of a volume.
func (r *reader) attachments(ctx context.Context, volume string) ([]string, error) {
	var names []string
	list := func(ctx context.Context, opts metav1.ListOptions) ([]*storagev1.VolumeAttachment, string, error) {
		list, err := r.client.StorageV1().VolumeAttachments().List(ctx, opts)
		if err != nil {
			return nil, "", err
		}
		return pointers(list.Items), list.Continue, nil
	}
	err := pages(ctx, r.timeout, "VolumeAttachments", list, metav1.ListOptions{}, func(va *storagev1.VolumeAttachment) bool {
		if pv := va.Spec.Source.PersistentVolumeName; pv != nil && *pv == volume {
			names = append(names, va.Name)
		}
		return true
	})
	return names, err
}
