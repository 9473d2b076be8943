// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package cluster simulates the other components of a cluster that storage-controller works with: the
// PersistentVolume binder, the protection of claims and volumes, the scheduler, the attach-detach
// controller, the kubelet, the snapshot-controller, and users. Each is a set of steps that are possible in the
// current state of the API server.
package cluster

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// Namespace is the namespace of all claims.
const Namespace = "default"

// The resources of the cluster.
var (
	Claims      = corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims")
	Volumes     = corev1.SchemeGroupVersion.WithResource("persistentvolumes")
	Classes     = storagev1.SchemeGroupVersion.WithResource("storageclasses")
	Nodes       = corev1.SchemeGroupVersion.WithResource("nodes")
	Namespaces  = corev1.SchemeGroupVersion.WithResource("namespaces")
	Pods        = corev1.SchemeGroupVersion.WithResource("pods")
	ConfigMaps  = corev1.SchemeGroupVersion.WithResource("configmaps")
	CSINodes    = storagev1.SchemeGroupVersion.WithResource("csinodes")
	Attachments = storagev1.SchemeGroupVersion.WithResource("volumeattachments")
	Capacities  = storagev1.SchemeGroupVersion.WithResource("csistoragecapacities")
	Snapshots   = snapshotv1.SchemeGroupVersion.WithResource("volumesnapshots")
	Contents    = snapshotv1.SchemeGroupVersion.WithResource("volumesnapshotcontents")
)

// Features selects what users use besides volumes and attachments.
type Features struct {
	Resize    bool // they expand volumes and modify them
	Snapshots bool
	Copies    bool // they clone volumes, and restore snapshots
	Secrets   bool // the classes name a Secret, which they delete and create again
	Topology  bool // volumes are accessible from one node
	Capacity  bool // the scheduler selects only nodes with enough capacity
	Shared    bool // all claims but every third have access modes for several nodes, on which pods use them
	// Topolvm: the driver is that of TopoLVM, whose volumes are created on the nodes, without VolumeAttachments.
	Topolvm bool
	// NodeFinalizer: topolvm-node protects its Node.
	NodeFinalizer bool
	Nodes         bool // administrators delete nodes, and the node controller cleans up after them
	Static        bool // administrators create volumes at the storage system
	Backups       bool // users restore what was deleted from backups
	// Without are the groups of [Cluster.UserSteps] that users do not take, as bits.
	Without uint
}

// Step is something that a component or a user can do now.
type Step struct {
	Name string
	Do   func(context.Context) error
}

// Pod is a pod as far as storage is concerned.
type Pod struct{ Claim, Node string }

// Cluster is everything around storage-controller and the driver.
type Cluster struct {
	api         *apiserver.Server
	snapshots   snapshotclient.SnapshotV1Interface
	driver      string
	features    Features
	Nodes       []string
	pods        []Pod
	classes     int                     // the number of VolumeSnapshotClasses that were created
	generations map[string]int          // how often each StorageClass was created
	selected    map[types.UID]time.Time // when the scheduler last selected a node, by claim
	live        kubernetes.Interface    // not nil: the pods are those of the API
	hosts       map[string]*host        // by node; empty without TopoLVM
	typed       sync.Map                // objects of custom resources with their types, by the object of the API server

	backups backups
	statics int // volumes that administrators have created
	// CreateVolume creates a volume with that name at the storage system, and returns its handle.
	CreateVolume func(name string) (handle string, err error)

	// SecretDeleted: a user has deleted the Secret once.
	SecretDeleted bool
	// deletesContents: an administrator deletes the contents whose snapshots do not exist.
	deletesContents bool

	version uint64 // of steps
	changed bool   // pods changed since then
	steps   []Step
}

// New returns a cluster without objects.
func New(api *apiserver.Server, driver string, nodes int, features Features) (*Cluster, error) {
	snapshots, err := snapshotclient.NewForConfig(api.Config("cluster"))
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		api: api, snapshots: snapshots, driver: driver, features: features, generations: map[string]int{},
		selected: map[types.UID]time.Time{},
	}
	for i := range nodes {
		c.Nodes = append(c.Nodes, fmt.Sprintf("node-%d", i))
	}
	if features.Topolvm {
		c.hosts, err = newHosts(api, c.Nodes)
	}
	return c, err
}

// create, update and updateStatus return what a step does.

func (c *Cluster) create(gvr schema.GroupVersionResource, obj runtime.Object) func(context.Context) error {
	return func(context.Context) error { return c.api.Create(gvr, obj) }
}

func (c *Cluster) update(gvr schema.GroupVersionResource, obj runtime.Object) func(context.Context) error {
	return func(context.Context) error { return c.api.Update(gvr, obj, "") }
}

func (c *Cluster) updateStatus(gvr schema.GroupVersionResource, obj runtime.Object) func(context.Context) error {
	return func(context.Context) error { return c.api.Update(gvr, obj, "status") }
}

// List returns the objects of a resource.
func List[T runtime.Object](api *apiserver.Server, gvr schema.GroupVersionResource) []T {
	var list []T
	for _, obj := range api.List(gvr) {
		list = append(list, obj.(T))
	}
	return list
}

// Typed returns the objects of a custom resource, which the API server has without a type. They must not be modified.
func Typed[T any](c *Cluster, gvr schema.GroupVersionResource) []*T {
	var list []*T
	for _, obj := range c.api.List(gvr) {
		list = append(list, TypedOf[T](c, obj))
	}
	return list
}

// TypedOf returns a custom resource, which the API server has stored, as T.
func TypedOf[T any](c *Cluster, obj any) *T {
	if typed, ok := c.typed.Load(obj); ok {
		return typed.(*T)
	}
	typed := new(T)
	content := obj.(runtime.Unstructured).UnstructuredContent()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, typed); err != nil {
		panic(err) // the clients have written it with the same type
	}
	c.typed.Store(obj, typed)
	return typed
}

// Steps returns the steps of the components that are possible, in the same order for the same state.
func (c *Cluster) Steps() []Step {
	if version := c.api.Version(); version != c.version || c.changed || c.live != nil {
		c.version, c.changed = version, false
		state := c.read()
		var scheduled []Step
		if c.live == nil {
			scheduled = c.schedule(state)
		} else {
			scheduled = c.observe(state)
		}
		c.steps = slices.Concat(c.bind(state), c.protect(state), scheduled, c.attach(state), c.register(),
			c.nodes(state), c.topolvmNodes(), c.expand(state), c.snapshot(state), c.deleteContents(state))
	}
	return c.steps
}

// state is what the components read.
type state struct {
	claims      []*corev1.PersistentVolumeClaim
	volumes     []*corev1.PersistentVolume
	attachments []*storagev1.VolumeAttachment
	classes     []*storagev1.StorageClass
	snapshots   []*snapshotv1.VolumeSnapshot
	contents    []*snapshotv1.VolumeSnapshotContent
}

func (c *Cluster) read() state {
	s := state{
		claims: List[*corev1.PersistentVolumeClaim](c.api, Claims), volumes: List[*corev1.PersistentVolume](c.api, Volumes),
		attachments: List[*storagev1.VolumeAttachment](c.api, Attachments), classes: List[*storagev1.StorageClass](c.api, Classes),
	}
	if c.features.Snapshots {
		s.snapshots = Typed[snapshotv1.VolumeSnapshot](c, Snapshots)
		s.contents = Typed[snapshotv1.VolumeSnapshotContent](c, Contents)
	}
	return s
}

// claim returns the claim with that name, or nil.
func (s state) claim(name string) *corev1.PersistentVolumeClaim {
	for _, claim := range s.claims {
		if claim.Name == name {
			return claim
		}
	}
	return nil
}

// class returns the StorageClass of claim, or nil.
func (s state) class(claim *corev1.PersistentVolumeClaim) *storagev1.StorageClass {
	for _, class := range s.classes {
		if claim.Spec.StorageClassName != nil && class.Name == *claim.Spec.StorageClassName {
			return class
		}
	}
	return nil
}

// volume returns the PersistentVolume with that name, or nil.
func (s state) volume(name string) *corev1.PersistentVolume {
	for _, pv := range s.volumes {
		if pv.Name == name {
			return pv
		}
	}
	return nil
}

// pod returns the pod that uses the claim with that name, or nil.
func (c *Cluster) pod(claim string) *Pod {
	for i := range c.pods {
		if c.pods[i].Claim == claim {
			return &c.pods[i]
		}
	}
	return nil
}
