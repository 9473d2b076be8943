// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"math/rand/v2"
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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Volumes is the part of the CSI controller service that the provisioner calls.
type Volumes interface {
	CreateVolume(context.Context, *csi.CreateVolumeRequest, ...grpc.CallOption) (*csi.CreateVolumeResponse, error)
	DeleteVolume(context.Context, *csi.DeleteVolumeRequest, ...grpc.CallOption) (*csi.DeleteVolumeResponse, error)
	GetCapacity(context.Context, *csi.GetCapacityRequest, ...grpc.CallOption) (*csi.GetCapacityResponse, error)
}

// Deps is what the program hands to the controller. All fields but Segments,
// VolumeFinalizers, RemovableFinalizers, VolumeObserver and Locks are required.
type Deps struct {
	Driver csiclient.Driver
	Client kubernetes.Interface // of this role: see kube.ForRole
	// UnthrottledClient has no rate limit, for what must be written before the process exits.
	UnthrottledClient kubernetes.Interface
	Snapshots         snapshotclient.SnapshotV1Interface // likewise
	Metadata          metadata.Interface                 // for watches of kinds that may not exist
	Informers         *kube.Informers
	CSI               Volumes
	// Ready returns once the driver can be called.
	Ready    func(context.Context) error
	Events   record.EventRecorder
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Segments is the topology of this node in distributed provisioning (CSI spec,
	// "NodeGetInfo"); nil without topology.
	Segments map[string]string
	// VolumeFinalizers returns the finalizers of other controllers of this process that a
	// PersistentVolume is created with, which saves each of them a write. Nil: none.
	VolumeFinalizers func() []string
	// RemovableFinalizers returns the finalizers of other controllers of this process that may
	// be removed once the volume is deleted, which saves each of them a write. Nil: none.
	RemovableFinalizers func(*corev1.PersistentVolume) []string
	// VolumeObserver is notified of the outcome of calls; nil: none.
	VolumeObserver VolumeObserver
	// LateAfter is the time from the beginning of a term within which CreateVolume calls of earlier processes take effect, if they do:
	// until then, no error of a repeated call is final. Zero: the driver knows of them.
	LateAfter time.Duration
	// Locks keeps the node controller from deleting a PersistentVolume during a CSI call for its volume.
	Locks *keylock.Locks[string]
}

// VolumeObserver is notified of what has changed at the driver, from any goroutine. It must
// not block.
type VolumeObserver interface {
	VolumeProvisioned(pv *corev1.PersistentVolume)
	// VolumeNotProvisioned is called for each CreateVolume that fails, or whose volume
	// cannot be used.
	VolumeNotProvisioned(class string)
	VolumeDeleted(pv *corev1.PersistentVolume)
}

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

	requests atomic.Uint64 // the number of CreateVolume requests that were prepared

	claimLoop atomic.Pointer[claimLoop] // nil while this replica does not lead
}

// New checks cfg and requests the watches that the controller needs. Nothing runs before
// [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := deps.Driver
	c := &Controller{
		cfg: cfg, deps: deps,
		driver: driver{
			Config: cfg, name: d.Name, caps: d.Controller, topology: d.Plugin.VolumeAccessibilityConstraints && cfg.Topology,
			identity: fmt.Sprintf("%d-%d-%s", time.Now().UnixMilli(), rand.IntN(10000), d.Name),
			inTree:   migration.PluginOf(d.Name), segments: deps.Segments,
		},
		claims: deps.Informers.Claims(), volumes: deps.Informers.Volumes(), classes: deps.Informers.Classes(),
	}
	c.metrics = newMetrics(deps.Registry, c.classExists, c.unresolved)
	if cfg.NodeDeployment {
		c.driver.identity += "-" + cfg.NodeName
	}
	if c.watchesNodes() {
		c.nodes, c.csiNodes = deps.Informers.Nodes(), deps.Informers.CSINodes()
	}
	if c.driver.caps.PublishUnpublishVolume {
		c.attachments = deps.Informers.Attachments()
	}
	return c, nil
}

// watchesNodes reports whether topology comes from the cluster. In distributed provisioning it
// is that of this node.
func (c *Controller) watchesNodes() bool { return c.driver.topology && !c.cfg.NodeDeployment }

// unresolved returns how many claims have a CreateVolume whose outcome is unknown, and how many
// volumes have no PersistentVolume yet.
func (c *Controller) unresolved() (indeterminateClaims, unsaved float64) {
	claims := map[types.UID]struct{}{}
	for _, claim := range c.claims.ByIndex(kube.ByProvisioningRecord, c.driver.name) {
		claims[claim.UID] = struct{}{}
	}
	if l := c.claimLoop.Load(); l != nil {
		unsaved = float64(l.ops.unresolved(claims))
	}
	return float64(len(claims)), unsaved
}

func (c *Controller) classExists(name string) bool {
	_, exists := c.classes.Get(name)
	return exists
}

// event sends an event about a claim or a PersistentVolume.
func (c *Controller) event(obj runtime.Object, e event) {
	c.deps.Events.Event(obj, e.kind, e.reason, e.message)
}

// claimFailed counts a failure and sends its event.
func (c *Controller) claimFailed(claim *corev1.PersistentVolumeClaim, e event) {
	c.metrics.claimFailed(claim)
	c.event(claim, e)
}

// Retry enqueues a claim and ends its back-off, if this replica leads: the driver has a result for its CreateVolume now. The claim is
// NAMESPACE/NAME, and need not exist.
func (c *Controller) Retry(claim string) {
	pvc, exists := c.claims.Get(claim)
	if l := c.claimLoop.Load(); l != nil && exists {
		l.claimChanged(pvc)
	}
}

func (c *Controller) loopConfig(name string) workloop.Config {
	return workloop.Config{
		Name: name, RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + workloop.APIGrace,
	}
}

// Run works until ctx ends and returns after the last worker has stopped. It may be called
// again then. Nothing that the loops keep outlives it: another replica may lead meanwhile.
func (c *Controller) Run(ctx context.Context) error {
	if n := c.cfg.VolumeNameUUIDLength; n >= 0 && n < 16 {
		klog.FromContext(ctx).Info("Volume names may collide. Increase --volume-name-uuid-length", "volumeNameUUIDLength", n)
	}
	claimLoop := newClaimLoop(c)
	volumeLoop := newVolumeLoop(c, claimLoop.users, claimLoop.volumeDeleted)
	defer claimLoop.queue.Stop()
	defer volumeLoop.queue.Stop()
	defer claimLoop.sources.stop()
	registrations := &kube.Registrations{}
	defer registrations.Remove()
	claimLoop.register(registrations)
	volumeLoop.register(registrations)
	if err := registrations.Wait(ctx, "provisioner caches"); err != nil {
		return err
	}
	claimLoop.begin(ctx)
	c.claimLoop.Store(claimLoop)
	defer c.claimLoop.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { claimLoop.queue.Run(ctx, int(c.cfg.WorkerThreads)) })
	wg.Go(func() { volumeLoop.queue.Run(ctx, int(c.cfg.WorkerThreads)) })
	claimLoop.watchOptional(ctx, &wg)
	claimLoop.sources.run(ctx, &wg)
	wg.Wait()
	claimLoop.saveAll(ctx)
	claimLoop.logUnrecorded(ctx)
	return context.Cause(ctx)
}
