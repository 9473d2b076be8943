// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Resizer declares the RPCs of the driver that the resizer calls.
type Resizer interface {
	ControllerExpandVolume(context.Context, *csi.ControllerExpandVolumeRequest, ...grpc.CallOption) (
		*csi.ControllerExpandVolumeResponse, error)
	ControllerModifyVolume(context.Context, *csi.ControllerModifyVolumeRequest, ...grpc.CallOption) (
		*csi.ControllerModifyVolumeResponse, error)
}

// Deps holds the dependencies of a [Controller]. All fields but Locks are required.
type Deps struct {
	Driver   csiclient.Driver
	Client   kubernetes.Interface // of this role: see kube.ForRole
	Metadata metadata.Interface   // for a watch of VolumeAttributesClasses
	// Informers must retain [kube.RetainedFields] with Resize.
	Informers *kube.Informers
	CSI       Resizer
	// Ready blocks until the driver can be called.
	Ready    func(context.Context) error
	Events   record.EventRecorder
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Locks keeps the node controller from deleting a PersistentVolume during a CSI call for its volume.
	Locks *keylock.Locks[string]
}

// Controller expands and modifies the volumes of a driver.
type Controller struct {
	cfg     Config
	deps    Deps
	driver  driver
	metrics *metricSet

	claims  kube.Informer[*corev1.PersistentVolumeClaim]
	volumes kube.Informer[*corev1.PersistentVolume]

	users        atomic.Pointer[users] // nil: they are not watched yet
	usersWatched sync.Once

	term      atomic.Pointer[term]  // nil without the Lease
	noClasses atomic.Pointer[error] // why VolumeAttributesClasses cannot be listed; nil: they can
	spread    func(key) float64     // from 0 to 1
}

// New validates cfg and requests the informers that the controller needs. It starts nothing; see
// [Controller.Run]. A driver that neither expands nor modifies volumes is an error.
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := newDriver(cfg, deps.Driver)
	if d.expansion == expandsNone && !d.modifies {
		return nil, unsupported(deps.Driver)
	}
	c := &Controller{
		cfg: cfg, deps: deps, driver: d, claims: deps.Informers.Claims(), volumes: deps.Informers.Volumes(), spread: workloop.Spread[key],
	}
	c.metrics = newMetrics(deps.Registry, c.waiting)
	return c, nil
}

func newDriver(cfg Config, d csiclient.Driver) driver {
	driver := driver{
		Config: cfg, name: d.Name, inTree: migration.PluginOf(d.Name), modifies: d.Controller.ModifyVolume && cfg.VolumeAttributesClass,
		publishes: d.Controller.PublishUnpublishVolume, singleNodeMultiWriter: d.Controller.SingleNodeMultiWriter,
	}
	switch {
	case d.Controller.ExpandVolume:
		driver.expansion = expandsController
	case d.Node.ExpandVolume:
		driver.expansion = expandsNode
	}
	switch {
	case !cfg.HandleVolumeInUseError || d.Plugin.ExpandOnline || driver.expansion != expandsController:
	case d.Plugin.ExpandOffline:
		driver.inUse = inUseAlways
	default:
		driver.inUse = inUseAfterError
	}
	return driver
}

// Supported returns an error unless d expands or modifies volumes.
func Supported(d csiclient.Driver) error {
	if d.Controller.ExpandVolume || d.Node.ExpandVolume || d.Controller.ModifyVolume {
		return nil
	}
	return unsupported(d)
}

func unsupported(d csiclient.Driver) error {
	if d.Controller.ModifyVolume {
		return fmt.Errorf("driver %q does not support expansion of volumes, and they are not modified: the feature gate "+
			"VolumeAttributesClass is off, or the API server does not serve VolumeAttributesClasses", d.Name)
	}
	return fmt.Errorf("driver %q supports neither expansion nor modification of volumes: it reports EXPAND_VOLUME neither for the "+
		"controller nor for the node, and not MODIFY_VOLUME", d.Name)
}

// LeaseName returns the name of the Lease of csi-resizer for driver.
func LeaseName(driver string) string { return election.LeaseName("external-resizer-" + driver) }

// EventSource returns the component in the source of events about volumes of driver.
func EventSource(driver string) string { return "external-resizer " + driver }

// waiting returns the number of operations whose last decision had this reason.
func (c *Controller) waiting(reason string) float64 {
	if t := c.term.Load(); t != nil {
		return float64(len(t.inStage(reason)))
	}
	return 0
}

// term holds the state between acquiring and releasing the Lease. It is discarded afterwards, because
// another replica may have changed the objects in between.
type term struct {
	c       *Controller
	ctx     context.Context // ends with the term
	claims  *kube.TermCache[*corev1.PersistentVolumeClaim]
	volumes *kube.TermCache[*corev1.PersistentVolume]
	queue   *workloop.Loop[key]
	ledger  *intent.Ledger[key, operationMemory]
	// locks are held by the UID of a claim during decisions about both of its operations and writes, and released during calls to
	// the driver.
	locks          keylock.Locks[types.UID]
	registrations  kube.Registrations
	background     sync.WaitGroup
	classesWatched sync.Once
	usersHandled   sync.Once
	// restarted limits how many operations that were infeasible for an earlier process are retried at the same time.
	restarted *rate.Limiter
}

// Run reconciles until ctx ends and returns after the last worker has stopped. It may be called again afterwards.
func (c *Controller) Run(ctx context.Context) error {
	background, cancel := context.WithCancel(ctx)
	t := &term{
		c: c, ctx: background, ledger: newLedger(),
		claims: kube.NewTermCache(c.claims), volumes: kube.NewTermCache(c.volumes),
		restarted: rate.NewLimiter(5, 5),
	}
	defer t.background.Wait()
	defer cancel()
	t.queue = workloop.New(workloop.Config{
		Name: c.driver.name + "-pvc", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.LongestTimeout() + workloop.APIGrace,
	}, c.deps.Queues, t.sync)
	t.queue.ShowStage(func(k key) string { return t.ledger.Get(k).Payload.stage })
	defer t.queue.Stop()
	t.register()
	defer t.registrations.Remove()
	// With an incomplete cache, a claim would wait for a PersistentVolume that was not listed yet.
	if err := t.registrations.Wait(ctx, "resizer caches"); err != nil {
		return err
	}
	if c.driver.modifies && t.listClasses(ctx) != nil {
		t.background.Go(func() { t.awaitClasses(background) })
	}
	defer c.noClasses.Store(nil)
	c.term.Store(t)
	defer c.term.Store(nil)
	t.background.Go(func() {
		workloop.Every(background, c.cfg.ResyncPeriod, func() { t.enqueueAll(t.queue.Resync) })
	})
	t.queue.Run(ctx, c.cfg.Workers)
	return context.Cause(ctx)
}

const (
	// maxSteps bounds the steps of one sync. A modification with a secret takes up to eight.
	maxSteps = 25
	// maxConflicts bounds the writes of a sync that fail because other clients have changed the object.
	maxConflicts = 3
)

// sync runs the steps that [driver.decide] returns until the operation of k has to wait.
func (t *term) sync(ctx context.Context, k key) (next time.Time, err error) {
	log := klog.FromContext(ctx).WithValues("pvc", klog.KRef(k.Namespace, k.Name), "operation", k.Operation.String())
	ctx = tracing.WithOperation(klog.NewContext(ctx, log), "Resize", k.UID)
	a, deleted := &attempt{t: t, key: k}, false
	a.lock()
	defer func() {
		t.release(k, deleted)
		a.unlock()
	}()
	for range maxSteps {
		s := t.gather(k, a.reads)
		deleted = s.claim == nil
		step := t.c.driver.decide(k.Operation, s)
		a.remember(0, func(m *operationMemory) { m.stage = step.reason })
		log.V(2).Info("Decided", "action", step.action.String(), "reason", step.reason)
		switch step.action {
		case doNothing:
			if step.reason == stageUnknown {
				log.Info("Expansion skipped: unknown status.allocatedResourceStatuses. Remove the entry to expand the volume",
					"allocatedResourceStatus", resizeStatus(s.claim))
			}
			return time.Time{}, nil
		case doWait:
			return step.until, workloop.Waiting{}
		case doWaitUnused:
			if a.isInUse(s) {
				return step.until, nil
			}
			continue
		}
		traced, end := tracing.StartSpan(ctx, step.action.String())
		err := a.apply(traced, s, step)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("reconciling PVC %s: not finished after %d steps", k, maxSteps)
}

// event sends an event about claim.
func (t *term) event(claim *corev1.PersistentVolumeClaim, events ...event) {
	for _, e := range events {
		t.c.deps.Events.Event(claim, e.kind, e.reason, kube.Message(e.message))
	}
}
