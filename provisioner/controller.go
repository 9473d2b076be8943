package provisioner

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/keymutex"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Volumes is what is called of the driver.
type Volumes interface {
	CreateVolume(context.Context, *csi.CreateVolumeRequest, ...grpc.CallOption) (*csi.CreateVolumeResponse, error)
	DeleteVolume(context.Context, *csi.DeleteVolumeRequest, ...grpc.CallOption) (*csi.DeleteVolumeResponse, error)
	GetCapacity(context.Context, *csi.GetCapacityRequest, ...grpc.CallOption) (*csi.GetCapacityResponse, error)
}

// Deps is what the program hands to the controller. All fields but Segments,
// Releasable, Outcomes and Locks are required.
type Deps struct {
	Driver csiclient.Driver
	Client kubernetes.Interface // of this role: see kube.ForRole
	// UnthrottledClient is one without a rate limit, for what must be written before this process ends.
	UnthrottledClient kubernetes.Interface
	Snapshots         snapshotclient.SnapshotV1Interface // likewise
	Metadata          metadata.Interface                 // for watches of kinds that may not exist
	Informers         *kube.Informers
	CSI               Volumes
	// Ready returns when the driver can be called.
	Ready    func(context.Context) error
	Events   record.EventRecorder
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Segments is where this node is, in a node deployment (CSI spec,
	// "NodeGetInfo"); nil without topology.
	Segments map[string]string
	// RemovableFinalizers is the finalizers of other controllers of this process on a volume
	// that may be removed once the volume is deleted; nil means none ever. It saves
	// each of them a write.
	RemovableFinalizers func(*corev1.PersistentVolume) []string
	// VolumeObserver is told what became of volumes; nil: nobody wants to know.
	VolumeObserver Outcomes
	// Locks keeps others from taking a volume away while the driver deletes it.
	Locks *volumelock.Locks
}

// Outcomes takes what has changed at the driver, from any goroutine, and does not block.
type Outcomes interface {
	VolumeProvisioned(pv *corev1.PersistentVolume)
	// VolumeNotProvisioned is called for each CreateVolume that fails, or whose volume
	// cannot be used.
	VolumeNotProvisioned(class string)
	VolumeDeleted(pv *corev1.PersistentVolume)
}

// apiGrace is what a drain allows for the writes after the last call.
const apiGrace = 10 * time.Second

// Controller provisions and deletes the volumes of a driver.
type Controller struct {
	cfg     Config
	deps    Deps
	driver  driver
	metrics *metrics

	claims      kube.Informer[*corev1.PersistentVolumeClaim]
	volumes     kube.Informer[*corev1.PersistentVolume]
	classes     kube.Informer[*storagev1.StorageClass]
	nodes       kube.Informer[metav1.Object]               // only with topology
	csiNodes    kube.Informer[*storagev1.CSINode]          // only with topology
	attachments kube.Informer[*storagev1.VolumeAttachment] // only if the driver publishes

	term atomic.Pointer[term] // nil between terms
}

// New checks cfg and asks for the watches that the controller needs. Nothing runs
// before [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := deps.Driver
	c := &Controller{
		cfg: cfg, deps: deps,
		driver: driver{
			Config: cfg, name: d.Name, controllerService: d.Plugin.ControllerService, createsVolumes: d.Controller.CreateDeleteVolume,
			publishes: d.Controller.PublishUnpublishVolume, singleNodeMultiWriter: d.Controller.SingleNodeMultiWriter,
			restores: d.Controller.CreateDeleteSnapshot, clones: d.Controller.CloneVolume, modifies: d.Controller.ModifyVolume,
			getsCapacity: d.Controller.GetCapacity, topology: d.Plugin.VolumeAccessibilityConstraints && cfg.Topology,
			identity: fmt.Sprintf("%d-%d-%s", time.Now().UnixMilli(), rand.IntN(10000), d.Name),
			inTree:   migration.PluginOf(d.Name), segments: deps.Segments,
		},
		claims: deps.Informers.Claims(), volumes: deps.Informers.Volumes(), classes: deps.Informers.Classes(),
	}
	c.metrics = newMetrics(deps.Registry, c.doubts)
	if cfg.NodeDeployment {
		c.driver.identity += "-" + cfg.NodeName
	}
	if c.watchesNodes() {
		c.nodes, c.csiNodes = deps.Informers.Nodes(), deps.Informers.CSINodes()
	}
	if c.driver.publishes {
		c.attachments = deps.Informers.Attachments()
	}
	return c, nil
}

// watchesNodes tells whether topology comes from the cluster. In a node deployment it
// is that of the one node.
func (c *Controller) watchesNodes() bool { return c.driver.topology && !c.cfg.NodeDeployment }

// term is the work between winning a Lease and losing it. Nothing that it
// remembers outlives it: another replica may have worked meanwhile.
type term struct {
	c             *Controller
	claims        *kube.MutationCache[*corev1.PersistentVolumeClaim]
	volumes       *kube.MutationCache[*corev1.PersistentVolume]
	claimQueue    *workloop.Loop[claimKey]
	pvQueue       *workloop.Loop[string]
	cloneQueue    *workloop.Loop[sourceKey] // sources to release
	snapshotQueue *workloop.Loop[sourceKey]
	sourceLocks   keymutex.KeyMutex // serialize adding and removing the finalizer of a source
	snapshots     kube.OptionalInformer
	topologies    *topology.Aggregate

	mu            sync.Mutex
	claimProgress map[types.UID]*progress // by claim
	removals      map[types.UID]*removal  // by PersistentVolume
	placeless     map[claimKey]struct{}   // claims that failed for lack of topology
	copies        map[sourceKey]int       // attempts by what they copy
	turns         turns                   // at owning claims, in a node deployment
}

// Run works until ctx ends, and returns after the last worker has stopped. It may
// be called again then.
func (c *Controller) Run(ctx context.Context) (err error) {
	t := &term{
		c: c, topologies: topology.NewAggregate(), claimProgress: map[types.UID]*progress{},
		removals: map[types.UID]*removal{}, placeless: map[claimKey]struct{}{}, copies: map[sourceKey]int{}, sourceLocks: keymutex.NewHashed(64),
	}
	if c.cfg.NodeDeployment {
		t.topologies.SetNode(c.cfg.NodeName, c.driver.segments, true)
		t.topologies.SetKeys(c.cfg.NodeName, slices.Collect(maps.Keys(c.driver.segments)), true)
	}
	c.term.Store(t)
	defer c.term.Store(nil)
	if n := c.cfg.VolumeNameUUIDLength; n >= 0 && n < 16 {
		klog.FromContext(ctx).Info("Names of volumes with so few characters may be the same for two claims, of which one then gets no volume", "volumeNameUUIDLength", n)
	}
	if t.claims, err = kube.NewMutationCache(c.claims); err != nil {
		return err
	}
	defer t.claims.Close()
	if t.volumes, err = kube.NewMutationCache(c.volumes); err != nil {
		return err
	}
	defer t.volumes.Close()
	loop := workloop.Config{
		RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + apiGrace,
	}
	loop.Name = "claims"
	t.claimQueue = workloop.New(loop, c.deps.Queues, t.syncClaim)
	loop.Name = "volumes"
	t.pvQueue = workloop.New(loop, c.deps.Queues, t.syncVolume)
	loop.Name, loop.WaitReady = "clone-protection", nil // nothing is asked of the driver there
	t.cloneQueue = workloop.New(loop, c.deps.Queues, t.syncSource)
	loop.Name = "snapshot-protection"
	t.snapshotQueue = workloop.New(loop, c.deps.Queues, t.syncSource)
	defer t.claimQueue.Stop()
	defer t.pvQueue.Stop()
	defer t.cloneQueue.Stop()
	defer t.snapshotQueue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "provisioner caches"); err != nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { t.claimQueue.Run(ctx, c.cfg.WorkerThreads) })
	wg.Go(func() { t.pvQueue.Run(ctx, c.cfg.WorkerThreads) })
	wg.Go(func() { t.cloneQueue.Run(ctx, c.cfg.CloningProtectionThreads) })
	wg.Go(func() { t.snapshotQueue.Run(ctx, c.cfg.CloningProtectionThreads) })
	t.watchOptional(ctx, &wg)
	wg.Wait()
	t.saveAll(ctx)
	return context.Cause(ctx)
}
