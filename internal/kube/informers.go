// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	storageinformers "k8s.io/client-go/informers/storage/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/migration"
)

// Indexes of the informers. Pending claims are those without a volume. Unless noted, an index
// contains only objects of the driver.
const (
	// byVolume maps the [Bucket] of names of PersistentVolumes to VolumeAttachments of all drivers; see [AttachmentsOf].
	byVolume = "volume"
	// ByNode maps names of Nodes to VolumeAttachments, and to pending claims with that selected node.
	ByNode = "node"
	// ByClass maps names of StorageClasses to pending claims.
	ByClass = "class"
	// ByDependency maps a [DependencyKey] to pending and protected claims of all drivers.
	ByDependency = "dependency"
	// ByProvisioningRecord maps the name of the driver to claims with [ProvisioningFinalizer].
	ByProvisioningRecord = "provisioning-record"
	// ByHandle maps the [Bucket] of volume handles to PersistentVolumes; see [migration.Handles].
	ByHandle = "handle"
	// ByClaim maps keys of claims to pods that use them, also as generic ephemeral volumes.
	ByClaim = "claim"
)

// Informers holds one informer per resource, which all controllers of the process share with its
// indexes. A resource is watched if its method was called before [Informers.Start] or
// [Informers.StartLate]. The methods of resources must not be called concurrently with each other.
type Informers struct {
	*factories
	user     string // the controller that requests informers
	optional bool   // it can run without them
}

// factories is the state that the views of [Informers.For] share.
type factories struct {
	driver   string
	retained *RetainedFields
	typed    informers.SharedInformerFactory
	meta     metadatainformer.SharedInformerFactory
	filtered []factory // of informers with a namespace or a selector, and of custom resources
	client   kubernetes.Interface

	mu          sync.Mutex
	informers   map[string]cache.SharedIndexInformer // by resource
	required    map[string]map[string]bool           // by resource and controller: the controller cannot run without it
	watchErrors map[string]error                     // last error by resource
	started     context.Context                      // of Start; nil before
}

// factory starts informers once, however often it is called, and waits until they have stopped.
type factory interface {
	StartWithContext(ctx context.Context)
	Shutdown()
}

// NewInformers returns informers for driver. They start in [Informers.Start].
func NewInformers(client kubernetes.Interface, meta metadata.Interface, driver string) *Informers {
	retained := &RetainedFields{}
	trim := compacting(trim(driver, retained))
	return &Informers{factories: &factories{
		driver:      driver,
		retained:    retained,
		client:      client,
		typed:       informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(trim)),
		meta:        metadatainformer.NewSharedInformerFactoryWithOptions(meta, 0, metadatainformer.WithTransform(trim)),
		informers:   map[string]cache.SharedIndexInformer{},
		required:    map[string]map[string]bool{},
		watchErrors: map[string]error{},
	}}
}

// For returns a view of i that records user as the controller that requests the informers; see
// [Informers.Synced].
func (i *Informers) For(user string) *Informers { return &Informers{i.factories, user, i.optional} }

// IfAllowed returns a view of i whose resources are not required: a missing permission does not fail [Informers.Synced]. A resource
// that the same user also requests without it is required.
func (i *Informers) IfAllowed() *Informers { return &Informers{i.factories, i.user, true} }

// Retain adds to the fields that the informers retain. Call it before any other method.
func (i *Informers) Retain(fields RetainedFields) { i.retained.add(fields) }

// Start watches the requested resources until ctx ends.
func (i *Informers) Start(ctx context.Context) {
	i.mu.Lock() // an informer that is requested meanwhile must be set up before it is started
	defer i.mu.Unlock()
	i.started = ctx
	i.typed.StartWithContext(ctx)
	i.meta.Start(ctx.Done())
	for _, factory := range i.filtered {
		factory.StartWithContext(ctx)
	}
}

// StartLate watches resources that were requested after [Informers.Start].
func (i *Informers) StartLate() {
	i.mu.Lock()
	ctx := i.started
	i.mu.Unlock()
	if ctx != nil && ctx.Err() == nil {
		i.Start(ctx)
	}
}

// Shutdown waits until all watches have ended. Cancel the context of Start first.
func (i *Informers) Shutdown() {
	i.typed.Shutdown()
	i.meta.Shutdown()
	for _, factory := range i.filtered {
		factory.Shutdown()
	}
}

// Claims returns the informer for PersistentVolumeClaims.
func (i *Informers) Claims() Informer[*corev1.PersistentVolumeClaim] {
	selectedNode := func(pvc *corev1.PersistentVolumeClaim) string { return pvc.Annotations[storagehelpers.AnnSelectedNode] }
	pending := func(value func(*corev1.PersistentVolumeClaim) string) cache.IndexFunc {
		return index(func(pvc *corev1.PersistentVolumeClaim) string {
			if !i.isPending(pvc) {
				return ""
			}
			return value(pvc)
		})
	}
	return informerFor[*corev1.PersistentVolumeClaim](i, "persistentvolumeclaims", i.withoutNamespaces(
		&corev1.PersistentVolumeClaim{}, func(resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
			return coreinformers.NewPersistentVolumeClaimInformer(i.client, metav1.NamespaceAll, resync, indexers)
		},
	), cache.Indexers{
		ByClass: pending(storagehelpers.GetPersistentVolumeClaimClass),
		ByNode:  pending(selectedNode),
		ByProvisioningRecord: index(func(pvc *corev1.PersistentVolumeClaim) string {
			if !slices.Contains(pvc.Finalizers, ProvisioningFinalizer) || !ClaimHandledBy(i.driver, pvc) {
				return ""
			}
			return i.driver
		}),
		ByDependency: func(obj any) ([]string, error) {
			// A bound claim whose request has no result still copies its source.
			if pvc, ok := typedObject[*corev1.PersistentVolumeClaim](obj); ok &&
				(pvc.Spec.VolumeName == "" || slices.Contains(pvc.Finalizers, ProvisioningFinalizer)) {
				return dependencies(pvc), nil
			}
			return nil, nil
		},
	})
}

func (i *Informers) isPending(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.Spec.VolumeName == "" && ClaimHandledBy(i.driver, pvc)
}

// Volumes returns the informer for PersistentVolumes.
func (i *Informers) Volumes() Informer[*corev1.PersistentVolume] {
	return informerFor[*corev1.PersistentVolume](i, "persistentvolumes", i.withoutNamespaces(
		&corev1.PersistentVolume{}, func(resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
			return coreinformers.NewPersistentVolumeInformer(i.client, resync, indexers)
		},
	), cache.Indexers{
		ByHandle: func(obj any) ([]string, error) {
			var buckets []string
			if pv, ok := typedObject[*corev1.PersistentVolume](obj); ok {
				for _, handle := range migration.Handles(i.driver, pv) {
					buckets = append(buckets, Bucket(handle))
				}
			}
			return buckets, nil
		},
	})
}

// Bucket returns the value of an index by a handle or name that few objects have. Several names share it, so that the index takes
// little memory: it has a set of objects for each value. Compare the names of the objects that the index returns.
func Bucket(name string) string {
	return strconv.FormatUint(uint64(crc32.ChecksumIEEE([]byte(name))%4096), 16)
}

// Classes returns the informer for StorageClasses.
func (i *Informers) Classes() Informer[*storagev1.StorageClass] {
	return informerFor[*storagev1.StorageClass](i, "storageclasses", i.typed.Storage().V1().StorageClasses().Informer, nil)
}

// CSINodes returns the informer for CSINodes, without the entries of other drivers.
func (i *Informers) CSINodes() Informer[*storagev1.CSINode] {
	return informerFor[*storagev1.CSINode](i, "csinodes", i.typed.Storage().V1().CSINodes().Informer, nil)
}

// Drivers returns the informer for CSIDrivers.
func (i *Informers) Drivers() Informer[*storagev1.CSIDriver] {
	return informerFor[*storagev1.CSIDriver](i, "csidrivers", i.typed.Storage().V1().CSIDrivers().Informer, nil)
}

// Attachments returns the informer for VolumeAttachments.
func (i *Informers) Attachments() Informer[*storagev1.VolumeAttachment] {
	return informerFor[*storagev1.VolumeAttachment](i, "volumeattachments", i.withoutNamespaces(
		&storagev1.VolumeAttachment{}, func(resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
			return storageinformers.NewVolumeAttachmentInformer(i.client, resync, indexers)
		},
	), cache.Indexers{
		byVolume: index(func(va *storagev1.VolumeAttachment) string {
			if name := va.Spec.Source.PersistentVolumeName; name != nil {
				return Bucket(*name)
			}
			return ""
		}),
		ByNode: index(func(va *storagev1.VolumeAttachment) string {
			if va.Spec.Attacher != i.driver {
				return ""
			}
			return va.Spec.NodeName
		}),
	})
}

// AttachmentsOf returns the cached VolumeAttachments, of all drivers, of a PersistentVolume.
func AttachmentsOf(attachments Informer[*storagev1.VolumeAttachment], volume string) []*storagev1.VolumeAttachment {
	return slices.DeleteFunc(attachments.ByIndex(byVolume, Bucket(volume)), func(va *storagev1.VolumeAttachment) bool {
		return *va.Spec.Source.PersistentVolumeName != volume
	})
}

// Nodes returns the informer for Nodes. It watches metadata only, so that a heartbeat of a kubelet
// costs a few hundred bytes, unless [RetainedFields] retain more.
func (i *Informers) Nodes() Informer[metav1.Object] {
	if i.retained.Nodes {
		return Informer[metav1.Object]{i.FullNodes().informer}
	}
	get := i.meta.ForResource(corev1.SchemeGroupVersion.WithResource("nodes"))
	return informerFor[metav1.Object](i, "nodes", get.Informer, nil)
}

// FullNodes returns the informer for Nodes with all retained fields. It panics unless
// [RetainedFields] retain nodes, because it would be a second watch.
func (i *Informers) FullNodes() Informer[*corev1.Node] {
	if !i.retained.Nodes {
		panic("nodes are watched as metadata only")
	}
	return informerFor[*corev1.Node](i, "nodes", i.typed.Core().V1().Nodes().Informer, nil)
}

// Capacities returns the informer for the CSIStorageCapacity objects with these labels in
// namespace. Call it with one namespace and set of labels only.
func (i *Informers) Capacities(namespace string, labels map[string]string) Informer[*storagev1.CSIStorageCapacity] {
	factory := informers.NewSharedInformerFactoryWithOptions(i.client, 0,
		informers.WithNamespace(namespace), informers.WithTransform(trimCapacity),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: labels})
		}))
	return informerFor[*storagev1.CSIStorageCapacity](i, "csistoragecapacities",
		i.from(factory, factory.Storage().V1().CSIStorageCapacities().Informer), nil)
}

// withoutNamespaces returns a shared informer for the type of obj, without the index by namespace that informers have by default:
// nothing reads it, and it takes as much memory as the index by key.
func (f *factories) withoutNamespaces(
	obj runtime.Object, create func(resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer,
) func() cache.SharedIndexInformer {
	return func() cache.SharedIndexInformer {
		return f.typed.InformerFor(obj, func(_ kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
			return create(resync, cache.Indexers{})
		})
	}
}

// from returns get, which also adds its factory to those that [Informers.Start] starts. [informerFor] calls it
// with the lock held.
func (f *factories) from(of factory, get func() cache.SharedIndexInformer) func() cache.SharedIndexInformer {
	return func() cache.SharedIndexInformer {
		f.filtered = append(f.filtered, of)
		return get()
	}
}

// ConfigMap returns the informer for one ConfigMap. Call it for one ConfigMap only.
func (i *Informers) ConfigMap(namespace, name string) Informer[*corev1.ConfigMap] {
	factory := informers.NewSharedInformerFactoryWithOptions(i.client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}))
	return informerFor[*corev1.ConfigMap](i, "configmaps", i.from(factory, factory.Core().V1().ConfigMaps().Informer), nil)
}

// Pods returns the informer for Pods.
func (i *Informers) Pods() Informer[*corev1.Pod] {
	return informerFor[*corev1.Pod](i, "pods", i.withoutNamespaces(
		&corev1.Pod{}, func(resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
			return coreinformers.NewPodInformer(i.client, metav1.NamespaceAll, resync, indexers)
		},
	), cache.Indexers{
		ByClaim: func(obj any) ([]string, error) {
			if pod, ok := typedObject[*corev1.Pod](obj); ok {
				return ClaimsOfPod(pod), nil
			}
			return nil, nil
		},
	})
}

// Forbidden returns the errors of optional resources whose first list is forbidden, by resource. A view of [Informers.For]
// considers only the resources of its user. The requests are retried.
func (i *Informers) Forbidden() map[string]error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var users []string
	if i.user != "" {
		users = []string{i.user}
	}
	forbidden := map[string]error{}
	for resource := range i.informers {
		if i.used(resource, users) && i.forbidden(resource, users...) {
			forbidden[resource] = i.watchErrors[resource]
		}
	}
	return forbidden
}

// forbidden reports whether the first list of resource is forbidden, and none of users requires it. Without users,
// it considers all. It must be called with the lock held.
func (i *Informers) forbidden(resource string, users ...string) bool {
	for user, required := range i.required[resource] {
		if required && (len(users) == 0 || slices.Contains(users, user)) {
			return false
		}
	}
	return !i.informers[resource].HasSynced() && apierrors.IsForbidden(i.watchErrors[resource])
}

// used must be called with the lock held.
func (i *Informers) used(resource string, users []string) bool {
	return len(users) == 0 || slices.ContainsFunc(users, func(user string) bool { _, ok := i.required[resource][user]; return ok })
}

// informerFor returns the informer for resource. The first call sets it up; it panics if the
// informer was started before.
func informerFor[T metav1.Object](
	i *Informers, resource string, get func() cache.SharedIndexInformer, indexers cache.Indexers,
) Informer[T] {
	i.mu.Lock() // metrics and probes read the maps during the construction of controllers
	defer i.mu.Unlock()
	if i.required[resource] == nil {
		i.required[resource] = map[string]bool{}
	}
	i.required[resource][i.user] = i.required[resource][i.user] || !i.optional
	if informer, ok := i.informers[resource]; ok {
		return Informer[T]{informer}
	}
	informer := get()
	err := informer.AddIndexers(indexers)
	if err == nil {
		err = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
			i.watchFailed(ctx, resource, r, err)
		})
	}
	if err != nil {
		panic(fmt.Sprintf("informer for %s: %v", resource, err))
	}
	i.informers[resource] = informer
	return Informer[T]{informer}
}

// watchFailed records an error of a list or watch.
func (i *Informers) watchFailed(ctx context.Context, resource string, r *cache.Reflector, err error) {
	i.mu.Lock()
	before := i.watchErrors[resource]
	i.watchErrors[resource] = err
	i.mu.Unlock()
	switch {
	case apierrors.IsForbidden(err):
		reportForbidden(ctx, resource, before, err)
	case apierrors.IsNotFound(err) && apierrors.IsNotFound(before): // reported before
	case apierrors.IsNotFound(err):
		klog.FromContext(ctx).Info("Resource is not served, retrying. Install its CustomResourceDefinition", "resource", resource)
	default:
		cache.DefaultWatchErrorHandler(ctx, r, err)
	}
}

// reportForbidden logs err, unless the previous error of the list or watch was the same: not on every retry.
func reportForbidden(ctx context.Context, resource string, before, err error) {
	if !apierrors.IsForbidden(before) {
		klog.FromContext(ctx).Error(err, "List and watch are forbidden. Grant list and watch on the resource to the ServiceAccount",
			"resource", resource)
	}
}
