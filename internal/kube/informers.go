package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
)

// Indexes of the kinds. Objects of other drivers are in none but [ByVolume],
// [ByDependency] and [ByNamespace].
const (
	// ByVolume finds the VolumeAttachments, those of other drivers included, by
	// the name of their PersistentVolume.
	ByVolume = "volume"
	// ByNode finds the VolumeAttachments by the name of their node, and the
	// claims that wait for a volume by the name of their selected node.
	ByNode = "node"
	// BySelectedNode finds the claims, those of other drivers and with a volume included,
	// by the name of their selected node. Of other drivers only [RetainedFields] keep that.
	BySelectedNode = "selected-node"
	// ByClass finds the claims that wait for a volume by the name of their class.
	ByClass = "class"
	// ByDependency finds the claims that wait for a volume, those of other drivers included,
	// by what they need besides their class; see [DependencyKey].
	ByDependency = "dependency"
	// ByProvisioningRecord finds, by the name of the driver, the claims that are kept because it is
	// not known what became of the volume for which that was asked.
	ByProvisioningRecord = "provisioning-record"
	// ByClaim finds the pods that use a claim by its key, directly or as the claim of a
	// generic ephemeral volume.
	ByClaim = "claim"
	// ByNamespace finds the claims, those of other drivers and with a volume included. The
	// informers of client-go have it from the start.
	ByNamespace = cache.NamespaceIndex
)

// Informers watches each kind once, however many loops ask for it. A kind is
// watched from the first call of its method on, once [Informers.Start] is
// called; indexes belong to the kind, so that loops need not agree on who adds
// them. The methods are not safe for use by several goroutines.
type Informers struct {
	*factories
	user string // the loop that asks for kinds
}

// factories is the state that the views of [Informers.For] share.
type factories struct {
	driver   string
	retained *RetainedFields
	typed    informers.SharedInformerFactory
	meta     metadatainformer.SharedInformerFactory
	more     []informers.SharedInformerFactory // for kinds of which only a part is watched
	client   kubernetes.Interface

	mu          sync.Mutex
	informers   map[string]cache.SharedIndexInformer // by the plural name of the kind
	required    map[string]map[string]bool           // by kind and loop that uses it: the loop cannot work without it
	watchErrors map[string]error                     // by the same name; a watch that fails just now
}

// NewInformers makes the informers of a process for driver. Nothing is watched yet.
func NewInformers(client kubernetes.Interface, meta metadata.Interface, driver string) *Informers {
	details := &RetainedFields{}
	trim := trim(driver, details)
	return &Informers{factories: &factories{
		driver:      driver,
		retained:    details,
		client:      client,
		typed:       informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(trim)),
		meta:        metadatainformer.NewSharedInformerFactoryWithOptions(meta, 0, metadatainformer.WithTransform(trim)),
		informers:   map[string]cache.SharedIndexInformer{},
		required:    map[string]map[string]bool{},
		watchErrors: map[string]error{},
	}}
}

// For returns a view of i that records user as the loop that uses the kinds; see [Informers.Synced].
func (i *Informers) For(user string) *Informers { return &Informers{i.factories, user} }

// Retain has more kept of objects than only the names that all loops need. It must be
// called before any kind is asked for.
func (i *Informers) Retain(d RetainedFields) { *i.retained = d }

// Start begins to watch the kinds that were asked for so far, until ctx ends.
func (i *Informers) Start(ctx context.Context) {
	i.typed.StartWithContext(ctx)
	i.meta.Start(ctx.Done())
	for _, factory := range i.more {
		factory.StartWithContext(ctx)
	}
}

// Shutdown waits until all watches have ended, after the context of Start has.
func (i *Informers) Shutdown() {
	i.typed.Shutdown()
	i.meta.Shutdown()
	for _, factory := range i.more {
		factory.Shutdown()
	}
}

// Claims are the PersistentVolumeClaims.
func (i *Informers) Claims() Informer[*corev1.PersistentVolumeClaim] {
	return informerFor[*corev1.PersistentVolumeClaim](i, "persistentvolumeclaims", i.typed.Core().V1().PersistentVolumeClaims().Informer, cache.Indexers{
		ByClass: index(func(pvc *corev1.PersistentVolumeClaim) string {
			if !i.waits(pvc) {
				return ""
			}
			return storagehelpers.GetPersistentVolumeClaimClass(pvc)
		}),
		ByNode: index(func(pvc *corev1.PersistentVolumeClaim) string {
			if !i.waits(pvc) {
				return ""
			}
			return pvc.Annotations[storagehelpers.AnnSelectedNode]
		}),
		BySelectedNode: index(func(pvc *corev1.PersistentVolumeClaim) string { return pvc.Annotations[storagehelpers.AnnSelectedNode] }),
		ByProvisioningRecord: index(func(pvc *corev1.PersistentVolumeClaim) string {
			if !slices.Contains(pvc.Finalizers, ProvisioningFinalizer) || !ClaimHandledBy(i.driver, pvc) {
				return ""
			}
			return i.driver
		}),
		ByDependency: func(obj any) ([]string, error) {
			if pvc, ok := obj.(*corev1.PersistentVolumeClaim); ok && pvc.Spec.VolumeName == "" {
				return dependencies(pvc), nil
			}
			return nil, nil
		},
	})
}

func (i *Informers) waits(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.Spec.VolumeName == "" && ClaimHandledBy(i.driver, pvc)
}

// Volumes are the PersistentVolumes.
func (i *Informers) Volumes() Informer[*corev1.PersistentVolume] {
	return informerFor[*corev1.PersistentVolume](i, "persistentvolumes", i.typed.Core().V1().PersistentVolumes().Informer, nil)
}

// Classes are the StorageClasses.
func (i *Informers) Classes() Informer[*storagev1.StorageClass] {
	return informerFor[*storagev1.StorageClass](i, "storageclasses", i.typed.Storage().V1().StorageClasses().Informer, nil)
}

// CSINodes hold the topology keys and the node ID of the driver on a node.
// Entries of other drivers are trimmed.
func (i *Informers) CSINodes() Informer[*storagev1.CSINode] {
	return informerFor[*storagev1.CSINode](i, "csinodes", i.typed.Storage().V1().CSINodes().Informer, nil)
}

// Drivers are the CSIDrivers.
func (i *Informers) Drivers() Informer[*storagev1.CSIDriver] {
	return informerFor[*storagev1.CSIDriver](i, "csidrivers", i.typed.Storage().V1().CSIDrivers().Informer, nil)
}

// Attachments are the VolumeAttachments.
func (i *Informers) Attachments() Informer[*storagev1.VolumeAttachment] {
	return informerFor[*storagev1.VolumeAttachment](i, "volumeattachments", i.typed.Storage().V1().VolumeAttachments().Informer, cache.Indexers{
		ByVolume: index(func(va *storagev1.VolumeAttachment) string {
			if name := va.Spec.Source.PersistentVolumeName; name != nil {
				return *name
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

// Nodes are what topology needs of the nodes: names, labels and whether they are being
// deleted. They are watched as metadata only, so that a heartbeat of a kubelet costs a
// few hundred bytes, unless [RetainedFields] ask for more.
func (i *Informers) Nodes() Informer[metav1.Object] {
	if i.retained.Nodes {
		return Informer[metav1.Object]{i.FullNodes().informer}
	}
	get := i.meta.ForResource(corev1.SchemeGroupVersion.WithResource("nodes"))
	return informerFor[metav1.Object](i, "nodes", get.Informer, nil)
}

// FullNodes are the nodes with everything that [RetainedFields] name. They can be had only if
// those ask for nodes.
func (i *Informers) FullNodes() Informer[*corev1.Node] {
	if !i.retained.Nodes {
		panic("nodes are watched as metadata only") // a second watch of the kind: a mistake of the caller
	}
	return informerFor[*corev1.Node](i, "nodes", i.typed.Core().V1().Nodes().Informer, nil)
}

// Capacities are the CSIStorageCapacity objects in namespace that have labels. With beta
// the API server is asked for v1beta1 of them. Only one namespace and one set of labels
// can be watched.
func (i *Informers) Capacities(namespace string, labels map[string]string, beta bool) Informer[*storagev1.CSIStorageCapacity] {
	factory := informers.NewSharedInformerFactoryWithOptions(i.client, 0, informers.WithNamespace(namespace), informers.WithTransform(trimCapacity),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: labels})
		}))
	i.more = append(i.more, factory)
	get := factory.Storage().V1().CSIStorageCapacities().Informer
	if beta {
		get = factory.Storage().V1beta1().CSIStorageCapacities().Informer
	}
	return informerFor[*storagev1.CSIStorageCapacity](i, "csistoragecapacities", get, nil)
}

// Pods are all pods of the cluster, with what tells how they use their claims.
func (i *Informers) Pods() Informer[*corev1.Pod] {
	return informerFor[*corev1.Pod](i, "pods", i.typed.Core().V1().Pods().Informer, cache.Indexers{
		ByClaim: func(obj any) ([]string, error) {
			if pod, ok := obj.(*corev1.Pod); ok {
				return ClaimsOfPod(pod), nil
			}
			return nil, nil
		},
	})
}

// ClaimsOfPod is the keys of the claims that pod uses, each once. The claim of a generic
// ephemeral volume is there under its name even where that belongs to somebody else.
func ClaimsOfPod(pod *corev1.Pod) []string {
	var keys []string
	for _, v := range pod.Spec.Volumes {
		var key string
		switch {
		case v.PersistentVolumeClaim != nil:
			key = pod.Namespace + "/" + v.PersistentVolumeClaim.ClaimName
		case v.Ephemeral != nil:
			key = pod.Namespace + "/" + pod.Name + "-" + v.Name
		}
		if key != "" && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// PodsIfAllowed is [Informers.Pods] for who waits for their first list alone, if need be
// until the process has the permission for it.
func (i *Informers) PodsIfAllowed() Informer[*corev1.Pod] { return ifAllowed(i, "pods", i.Pods) }

// AttachmentsIfAllowed is [Informers.Attachments] likewise.
func (i *Informers) AttachmentsIfAllowed() Informer[*storagev1.VolumeAttachment] {
	return ifAllowed(i, "volumeattachments", i.Attachments)
}

// DriversIfAllowed is [Informers.Drivers] likewise.
func (i *Informers) DriversIfAllowed() Informer[*storagev1.CSIDriver] {
	return ifAllowed(i, "csidrivers", i.Drivers)
}

// ifAllowed leaves it to all others whether the process has to have kind.
func ifAllowed[T metav1.Object](i *Informers, kind string, get func() Informer[T]) Informer[T] {
	i.mu.Lock()
	needed := i.required[kind][i.user]
	i.mu.Unlock()
	k := get()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.required[kind][i.user] = needed
	return k
}

// Forbidden is why kinds without which all loops can go on are not watched: the process
// has no permission for them. They are tried again from time to time.
func (i *Informers) Forbidden() map[string]error {
	i.mu.Lock()
	defer i.mu.Unlock()
	forbidden := map[string]error{}
	for kind := range i.informers {
		if i.forbidden(kind) {
			forbidden[kind] = i.watchErrors[kind]
		}
	}
	return forbidden
}

// forbidden reports whether kind is not watched for lack of permission, and none of users requires it; no
// users mean all. The caller holds the lock.
func (i *Informers) forbidden(kind string, users ...string) bool {
	for user, required := range i.required[kind] {
		if required && (len(users) == 0 || slices.Contains(users, user)) {
			return false
		}
	}
	return !i.informers[kind].HasSynced() && apierrors.IsForbidden(i.watchErrors[kind])
}

// used reports whether one of users uses kind; no users mean all. The caller holds the lock.
func (i *Informers) used(kind string, users []string) bool {
	return len(users) == 0 || slices.ContainsFunc(users, func(user string) bool { _, ok := i.required[kind][user]; return ok })
}

// Synced returns nil when every kind that users use has been listed and is watched, except those that they
// do not require and that are [Informers.Forbidden]. Otherwise the error names the missing kinds, with the cause
// if it is known. No users mean all.
func (i *Informers) Synced(users ...string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var missing []string
	for _, kind := range slices.Sorted(maps.Keys(i.informers)) {
		switch err := i.watchErrors[kind]; {
		case !i.used(kind, users), i.informers[kind].HasSynced(), i.forbidden(kind, users...):
		case err != nil:
			missing = append(missing, fmt.Sprintf("%s (%v)", kind, err))
		default:
			missing = append(missing, kind)
		}
	}
	if missing == nil {
		return nil
	}
	return fmt.Errorf("waiting for the first list of %s", strings.Join(missing, ", "))
}

// informerFor is the view on the informer of a kind, set up when it is asked for the first time.
func informerFor[T metav1.Object](i *Informers, kind string, get func() cache.SharedIndexInformer, indexers cache.Indexers) Informer[T] {
	i.mu.Lock() // metrics and probes ask while the loops are built
	defer i.mu.Unlock()
	if i.required[kind] == nil {
		i.required[kind] = map[string]bool{}
	}
	i.required[kind][i.user] = true
	if made, ok := i.informers[kind]; ok {
		return Informer[T]{made}
	}
	informer := get()
	if err := informer.AddIndexers(indexers); err != nil {
		panic(fmt.Sprintf("indexes of %s: %v", kind, err)) // two indexes of one name: a mistake in this file
	}
	if err := informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		i.mu.Lock()
		before := apierrors.IsForbidden(i.watchErrors[kind])
		i.watchErrors[kind] = err
		forbidden := i.forbidden(kind)
		i.mu.Unlock()
		switch {
		case !forbidden:
			cache.DefaultWatchErrorHandler(ctx, r, err)
		case !before: // once, and not at each of many attempts
			klog.FromContext(ctx).Info("No permission to list and watch this kind: what depends on it does not work until there is", "resource", kind, "err", err)
		}
	}); err != nil {
		panic(fmt.Sprintf("error handler of %s: %v", kind, err)) // already started: a mistake of the caller
	}
	i.informers[kind] = informer
	return Informer[T]{informer}
}

// index turns a function that names the one value of an object into a client-go
// index; an object without a value is in none.
func index[T any](value func(T) string) cache.IndexFunc {
	return func(obj any) ([]string, error) {
		if o, ok := obj.(T); ok {
			if v := value(o); v != "" {
				return []string{v}, nil
			}
		}
		return nil, nil
	}
}
