// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typedstoragev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
)

// worldClient gives the product access to a world. Requests that the product does not send panic.
type worldClient struct {
	kubernetes.Interface
	w *world
}

func (c worldClient) CoreV1() typedcorev1.CoreV1Interface          { return worldCore{w: c.w} }
func (c worldClient) StorageV1() typedstoragev1.StorageV1Interface { return worldStorage{w: c.w} }

type worldCore struct {
	typedcorev1.CoreV1Interface
	w *world
}

type worldStorage struct {
	typedstoragev1.StorageV1Interface
	w *world
}

func (c worldCore) Nodes() typedcorev1.NodeInterface { return nodesAPI{w: c.w} }
func (c worldCore) PersistentVolumes() typedcorev1.PersistentVolumeInterface {
	return volumesAPI{w: c.w}
}
func (c worldCore) PersistentVolumeClaims(string) typedcorev1.PersistentVolumeClaimInterface {
	return claimsAPI{w: c.w}
}
func (c worldCore) Pods(string) typedcorev1.PodInterface             { return podsAPI{w: c.w} }
func (c worldCore) Namespaces() typedcorev1.NamespaceInterface       { return namespacesAPI{w: c.w} }
func (c worldCore) ConfigMaps(string) typedcorev1.ConfigMapInterface { return configMapsAPI{w: c.w} }

func (c worldStorage) CSINodes() typedstoragev1.CSINodeInterface { return csiNodesAPI{w: c.w} }
func (c worldStorage) StorageClasses() typedstoragev1.StorageClassInterface {
	return classesAPI{w: c.w}
}
func (c worldStorage) CSIDrivers() typedstoragev1.CSIDriverInterface { return driversAPI{w: c.w} }
func (c worldStorage) VolumeAttachments() typedstoragev1.VolumeAttachmentInterface {
	return attachmentsAPI{w: c.w}
}

// request lets other actors write before a request of the product.
func (w *world) request(line string) {
	if w.interleave != nil {
		w.interleave(line)
	}
}

func get[T any](objects map[string]*T, name string) (*T, error) {
	if obj := objects[name]; obj != nil {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{}, name)
}

func conflict(name string) error { return apierrors.NewConflict(schema.GroupResource{}, name, nil) }

// violates reports whether an object is not the one that preconditions name.
func violates(m metav1.ObjectMeta, p *metav1.Preconditions) bool {
	return p != nil && (p.UID != nil && *p.UID != m.UID || p.ResourceVersion != nil && *p.ResourceVersion != m.ResourceVersion)
}

// released returns the finalizers that a JSON patch of the product leaves. It fails if a test operation fails.
func released(m metav1.ObjectMeta, data []byte) (left []string, err error) {
	patch, err := jsonpatch.DecodePatch(data)
	if err != nil {
		return nil, err
	}
	was, err := json.Marshal(metav1.PartialObjectMetadata{ObjectMeta: m})
	if err != nil {
		return nil, err
	}
	is, err := patch.Apply(was)
	if err != nil {
		return nil, conflict(m.Name)
	}
	var obj metav1.PartialObjectMetadata
	err = json.Unmarshal(is, &obj)
	return obj.Finalizers, err
}

type nodesAPI struct {
	typedcorev1.NodeInterface
	w *world
}

func (a nodesAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.Node, error) {
	a.w.request("get " + name)
	return get(a.w.nodes, name)
}

func (a nodesAPI) List(_ context.Context, o metav1.ListOptions) (*corev1.NodeList, error) {
	list := &corev1.NodeList{}
	for _, name := range slices.Sorted(maps.Keys(a.w.nodes)) {
		n := a.w.nodes[name]
		if key, value, ok := strings.Cut(o.LabelSelector, "="); !ok || n.Labels[key] == value {
			list.Items = append(list.Items, *n)
		}
	}
	return list, nil
}

func (a nodesAPI) Patch(_ context.Context, name string, _ types.PatchType, data []byte, _ metav1.PatchOptions, _ ...string) (*corev1.Node,
	error) {
	n, err := get(a.w.nodes, name)
	if err != nil {
		return nil, err
	}
	left, err := released(n.ObjectMeta, data)
	if err != nil {
		return nil, err
	}
	a.w.watcher.releases(n)
	a.w.editNode(name, func(n *corev1.Node) { n.Finalizers = left })
	return n, nil
}

type csiNodesAPI struct {
	typedstoragev1.CSINodeInterface
	w *world
}

func (a csiNodesAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*storagev1.CSINode, error) {
	return get(a.w.csiNodes, name)
}

func (a csiNodesAPI) List(context.Context, metav1.ListOptions) (*storagev1.CSINodeList, error) {
	list := &storagev1.CSINodeList{}
	for _, name := range slices.Sorted(maps.Keys(a.w.csiNodes)) {
		list.Items = append(list.Items, *a.w.csiNodes[name])
	}
	return list, nil
}

type volumesAPI struct {
	typedcorev1.PersistentVolumeInterface
	w *world
}

func (a volumesAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.PersistentVolume, error) {
	return get(a.w.volumes, name)
}

func (a volumesAPI) List(context.Context, metav1.ListOptions) (*corev1.PersistentVolumeList, error) {
	list := &corev1.PersistentVolumeList{}
	for _, name := range slices.Sorted(maps.Keys(a.w.volumes)) {
		list.Items = append(list.Items, *a.w.volumes[name])
	}
	return list, nil
}

func (a volumesAPI) Delete(_ context.Context, name string, o metav1.DeleteOptions) error {
	a.w.request("delete volume")
	pv, err := get(a.w.volumes, name)
	if err != nil {
		return err
	}
	if violates(pv.ObjectMeta, o.Preconditions) {
		return conflict(name)
	}
	a.w.watcher.deletesVolume(pv)
	a.w.editVolume(name, func(pv *corev1.PersistentVolume) {
		if pv.DeletionTimestamp == nil {
			now := metav1.Now()
			pv.DeletionTimestamp = &now
		}
	})
	return nil
}

func (a volumesAPI) Patch(_ context.Context, name string, _ types.PatchType, data []byte, _ metav1.PatchOptions,
	_ ...string) (*corev1.PersistentVolume, error) {
	a.w.request("patch volume")
	pv, err := get(a.w.volumes, name)
	if err != nil {
		return nil, err
	}
	left, err := released(pv.ObjectMeta, data)
	if err != nil {
		return nil, err
	}
	a.w.watcher.deletesVolume(pv)
	a.w.editVolume(name, func(pv *corev1.PersistentVolume) { pv.Finalizers = left })
	return pv, nil
}

type claimsAPI struct {
	typedcorev1.PersistentVolumeClaimInterface
	w *world
}

func (a claimsAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.PersistentVolumeClaim, error) {
	return get(a.w.claims, name)
}

func (a claimsAPI) Delete(_ context.Context, name string, o metav1.DeleteOptions) error {
	a.w.request("delete claim")
	claim, err := get(a.w.claims, name)
	if err != nil {
		return err
	}
	if violates(claim.ObjectMeta, o.Preconditions) {
		return conflict(name)
	}
	a.w.watcher.deletesClaim(claim)
	a.w.editClaim(name, func(c *corev1.PersistentVolumeClaim) {
		if c.DeletionTimestamp == nil {
			now := metav1.Now()
			c.DeletionTimestamp = &now
		}
	})
	return nil
}

type podsAPI struct {
	typedcorev1.PodInterface
	w *world
}

func (a podsAPI) List(context.Context, metav1.ListOptions) (*corev1.PodList, error) {
	list := &corev1.PodList{}
	for _, claim := range slices.Sorted(maps.Keys(a.w.pods)) {
		list.Items = append(list.Items, *a.w.pods[claim])
	}
	return list, nil
}

type namespacesAPI struct {
	typedcorev1.NamespaceInterface
	w *world
}

func (a namespacesAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.Namespace, error) {
	return a.w.namespace, nil
}

type classesAPI struct {
	typedstoragev1.StorageClassInterface
	w *world
}

func (a classesAPI) Get(context.Context, string, metav1.GetOptions) (*storagev1.StorageClass, error) {
	return a.w.class, nil
}

type driversAPI struct {
	typedstoragev1.CSIDriverInterface
	w *world
}

func (a driversAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*storagev1.CSIDriver, error) {
	return &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

type attachmentsAPI struct {
	typedstoragev1.VolumeAttachmentInterface
	w *world
}

func (a attachmentsAPI) List(context.Context, metav1.ListOptions) (*storagev1.VolumeAttachmentList, error) {
	return &storagev1.VolumeAttachmentList{}, nil
}

type configMapsAPI struct {
	typedcorev1.ConfigMapInterface
	w *world
}

func (a configMapsAPI) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.ConfigMap, error) {
	if a.w.stored == nil {
		return nil, apierrors.NewNotFound(schema.GroupResource{}, name)
	}
	return a.w.stored.DeepCopy(), nil
}

func (a configMapsAPI) Create(_ context.Context, cm *corev1.ConfigMap, _ metav1.CreateOptions) (*corev1.ConfigMap, error) {
	a.w.request("write records")
	if a.w.stored != nil {
		return nil, apierrors.NewAlreadyExists(schema.GroupResource{}, cm.Name)
	}
	return a.store(cm), nil
}

func (a configMapsAPI) Update(_ context.Context, cm *corev1.ConfigMap, _ metav1.UpdateOptions) (*corev1.ConfigMap, error) {
	a.w.request("write records")
	if a.w.stored == nil {
		return nil, apierrors.NewNotFound(schema.GroupResource{}, cm.Name)
	}
	if a.w.stored.ResourceVersion != cm.ResourceVersion {
		return nil, conflict(cm.Name)
	}
	return a.store(cm), nil
}

func (a configMapsAPI) store(cm *corev1.ConfigMap) *corev1.ConfigMap {
	next := cm.DeepCopy()
	next.ObjectMeta = a.w.changed(next.ObjectMeta)
	a.w.watcher.stores(next)
	a.w.stored = next
	return next.DeepCopy()
}
