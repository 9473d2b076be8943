package attacher

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Publisher is what is called of the driver.
type Publisher interface {
	ControllerPublishVolume(context.Context, *csi.ControllerPublishVolumeRequest, ...grpc.CallOption) (*csi.ControllerPublishVolumeResponse, error)
	ControllerUnpublishVolume(context.Context, *csi.ControllerUnpublishVolumeRequest, ...grpc.CallOption) (*csi.ControllerUnpublishVolumeResponse, error)
	ListVolumes(context.Context, *csi.ListVolumesRequest, ...grpc.CallOption) (*csi.ListVolumesResponse, error)
}

// Deps is what the program hands to the controller. All fields but Locks are required.
type Deps struct {
	Driver    csiclient.Driver
	Client    kubernetes.Interface // of this role: see kube.ForRole
	Informers *kube.Informers
	CSI       Publisher
	// Ready returns when the driver can be called.
	Ready    func(context.Context) error
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Locks keeps others from taking a volume away while the driver attaches or detaches it.
	Locks *volumelock.Locks
}

// apiGrace is what a drain allows for the writes after the last call.
const apiGrace = 10 * time.Second

// Controller attaches and detaches the volumes of a driver.
type Controller struct {
	cfg     Config
	deps    Deps
	driver  driver
	metrics *metrics

	attachments kube.Informer[*storagev1.VolumeAttachment]
	volumes     kube.Informer[*corev1.PersistentVolume]
	nodes       kube.Informer[*storagev1.CSINode] // only if the driver publishes

	current atomic.Pointer[term] // nil between terms
}

// New checks cfg and asks for the watches that the controller needs. Nothing runs
// before [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	caps := deps.Driver.Controller
	c := &Controller{
		cfg: cfg, deps: deps, metrics: newMetrics(deps.Registry),
		driver: driver{
			name: deps.Driver.Name, finalizer: Finalizer(deps.Driver.Name), defaultFSType: cfg.DefaultFSType,
			publishes: caps.PublishUnpublishVolume, publishReadonly: caps.PublishReadonly, singleNodeMultiWriter: caps.SingleNodeMultiWriter,
		},
		attachments: deps.Informers.Attachments(), volumes: deps.Informers.Volumes(),
	}
	if c.driver.publishes {
		c.nodes = deps.Informers.CSINodes()
	}
	return c, nil
}

// term is the work between winning a Lease and losing it. Nothing that it
// remembers outlives it: another replica may have worked meanwhile.
type term struct {
	c           *Controller
	attachments *kube.MutationCache[*storagev1.VolumeAttachment]
	volumes     *kube.MutationCache[*corev1.PersistentVolume]
	vaQueue     *workloop.Loop[attachmentKey]
	pvQueue     *workloop.Loop[string]
	// protecting is held while the finalizer of a volume is written, so that two
	// attachments of one volume do not write it twice.
	protecting [64]sync.Mutex
	marks      marks
	// confirmed is the UIDs of attachments that the API server has told of in this term.
	confirmed sync.Map
}

// Run works until ctx ends, and returns after the last worker has stopped. It may
// be called again then.
func (c *Controller) Run(ctx context.Context) (err error) {
	t := &term{c: c}
	if t.attachments, err = kube.NewMutationCache(c.attachments); err != nil {
		return err
	}
	defer t.attachments.Close()
	if t.volumes, err = kube.NewMutationCache(c.volumes); err != nil {
		return err
	}
	defer t.volumes.Close()
	loop := workloop.Config{
		RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax,
		WaitReady: c.deps.Ready, GracePeriod: c.cfg.Timeout + apiGrace,
	}
	loop.Name = "csi-attacher-va"
	t.vaQueue = workloop.New(loop, c.deps.Queues, t.sync)
	loop.Name = "csi-attacher-pv"
	t.pvQueue = workloop.New(loop, c.deps.Queues, t.syncVolume)
	defer t.vaQueue.Stop()
	defer t.pvQueue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	// Without all caches an attachment would fail for a CSINode that is merely late.
	if err := registrations.Wait(ctx, "attacher caches"); err != nil {
		return err
	}
	c.current.Store(t)
	defer c.current.Store(nil)
	var wg sync.WaitGroup
	wg.Go(func() { t.vaQueue.Run(ctx, c.cfg.WorkerThreads) })
	wg.Go(func() { t.pvQueue.Run(ctx, c.cfg.WorkerThreads) })
	wg.Go(func() { t.resync(ctx) })
	if caps := c.deps.Driver.Controller; caps.PublishUnpublishVolume && caps.ListVolumes && caps.ListVolumesPublishedNodes && c.cfg.ReconcileSync > 0 {
		wg.Go(func() { t.compareForever(ctx) })
	}
	wg.Wait()
	return context.Cause(ctx)
}

// register has the events of all watches fill the queues.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	add(t.c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Add: t.attachmentAdded, Update: t.attachmentUpdated, Delete: t.attachmentDeleted}))
	add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{Add: t.volumeAdded, Update: t.volumeUpdated, Delete: func(pv *corev1.PersistentVolume) { t.pvQueue.Forget(pv.Name) }}))
	if !t.c.driver.publishes {
		return registrations
	}
	add(t.c.nodes.Handle(kube.Handlers[*storagev1.CSINode]{Add: t.nodeChanged, Update: func(old, node *storagev1.CSINode) {
		if !slices.EqualFunc(old.Spec.Drivers, node.Spec.Drivers, func(a, b storagev1.CSINodeDriver) bool { return a.NodeID == b.NodeID }) {
			t.nodeChanged(node)
		}
	}}))
	return registrations
}

// unfinished tells whether there is something to do for an attachment.
func (t *term) unfinished(va *storagev1.VolumeAttachment) bool {
	if va.Spec.Attacher != t.c.driver.name {
		return false
	}
	if va.DeletionTimestamp != nil {
		return slices.Contains(va.Finalizers, t.c.driver.finalizer) || t.c.driver.publishes && detachedStatus(va) != nil
	}
	return !va.Status.Attached
}

func (t *term) attachmentAdded(va *storagev1.VolumeAttachment) {
	t.marks.noteChange(va.UID)
	if t.unfinished(va) {
		t.vaQueue.Add(keyOf(va))
	}
}

func (t *term) attachmentUpdated(old, va *storagev1.VolumeAttachment) {
	t.marks.noteChange(va.UID)
	if old.UID != va.UID { // deleted and created again while the watch was interrupted
		t.attachmentDeleted(old)
	}
	if t.unfinished(va) && !t.c.driver.onlyOwnChanges(old, va) {
		t.vaQueue.Add(keyOf(va))
	}
}

func (t *term) attachmentDeleted(va *storagev1.VolumeAttachment) {
	t.vaQueue.Forget(keyOf(va))
	t.confirmed.Delete(va.UID)
	t.marks.noteChange(va.UID)
	t.marks.drop(va.UID)
	if name := va.Spec.Source.PersistentVolumeName; name != nil {
		if pv, ok := t.c.volumes.Get(*name); ok {
			t.volumeChanged(pv)
		}
	}
}

// volumeAdded wakes the attachments that failed because their volume was not there.
func (t *term) volumeAdded(pv *corev1.PersistentVolume) {
	for _, va := range t.c.attachments.ByIndex(kube.ByVolume, pv.Name) {
		t.attachmentAdded(va)
	}
	t.volumeChanged(pv)
}

// volumeUpdated looks for what an attachment may have waited for: the access modes are all
// that can be mended of a volume.
func (t *term) volumeUpdated(old, pv *corev1.PersistentVolume) {
	if old.UID != pv.UID || !slices.Equal(old.Spec.AccessModes, pv.Spec.AccessModes) {
		t.volumeAdded(pv)
		return
	}
	t.volumeChanged(pv)
}

func (t *term) volumeChanged(pv *corev1.PersistentVolume) {
	if t.c.driver.leaving(pv) {
		t.pvQueue.Add(pv.Name)
	}
}

// nodeChanged wakes the attachments that failed because the driver was not on their node.
func (t *term) nodeChanged(node *storagev1.CSINode) {
	for _, va := range t.c.attachments.ByIndex(kube.ByNode, node.Name) {
		t.attachmentAdded(va)
	}
}

// resync looks at everything that is not done from time to time, for the case that
// an event was not enough.
func (t *term) resync(ctx context.Context) {
	if t.c.cfg.Resync == 0 {
		return
	}
	tick := time.NewTicker(t.c.cfg.Resync)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, va := range t.c.attachments.List() {
			if t.unfinished(va) {
				t.vaQueue.Resync(keyOf(va))
			}
		}
		for _, pv := range t.c.volumes.List() {
			if t.c.driver.leaving(pv) {
				t.pvQueue.Resync(pv.Name)
			}
		}
	}
}

// maxRounds bounds the steps of one sync. An attach takes five.
const maxRounds = 10

// sync brings one attachment as far as it goes.
func (t *term) sync(ctx context.Context, key attachmentKey) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("volumeAttachment", key.Name)
	ctx = klog.NewContext(ctx, log)
	var secrets map[string]string
	secretsRead, confirmed := false, false
	for range maxRounds {
		s := t.gather(key, secrets, secretsRead)
		if _, ok := t.confirmed.Load(key.UID); confirmed || ok && !s.forced {
			s.unconfirmed = false
		}
		step := t.c.driver.decide(s)
		log.V(2).Info("Decided", "action", step.action.String(), "reason", step.reason)
		switch step.action {
		case doNothing:
			return time.Time{}, nil
		case doReadSecrets:
			var err error
			if secrets, err = kube.ReadSecret(ctx, t.c.deps.Client, step.source.secrets); err != nil {
				return time.Time{}, t.report(ctx, s, fmt.Errorf("failed to load %w", err))
			}
			secretsRead = true
			continue
		case doConfirm:
			if err := t.confirm(ctx, s.attachment); err != nil {
				return time.Time{}, err
			}
			confirmed = true
			continue
		}
		traced, end := tracing.StartSpan(tracing.WithOperation(ctx, operation(s.attachment), key.UID), step.action.String())
		err := t.apply(traced, s, step)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("VolumeAttachment %q is not settled after %d steps", key.Name, maxRounds)
}

// operation is what is done for va, as the name of a trace.
func operation(va *storagev1.VolumeAttachment) string {
	if va.DeletionTimestamp != nil {
		return "Detach"
	}
	return "Attach"
}

// syncVolume removes the finalizer of a volume that nothing attaches any more.
func (t *term) syncVolume(ctx context.Context, name string) (time.Time, error) {
	pv, ok := t.volumes.Get(name)
	if !ok || !t.c.driver.releasable(pv, len(t.c.attachments.ByIndex(kube.ByVolume, name))) {
		return time.Time{}, nil // the end of an attachment brings it here again
	}
	return time.Time{}, t.changeVolume(ctx, pv, kube.MetadataPatch{RemoveFinalizers: []string{t.c.driver.finalizer}})
}

// RemovableFinalizers is the finalizers of this controller on pv that have no purpose any
// more once the volume is deleted at the driver: somebody who writes pv for that
// reason may remove them in the same write. Nil when something attaches the
// volume, and while this process does not attach volumes.
func (c *Controller) RemovableFinalizers(pv *corev1.PersistentVolume) []string {
	if c.current.Load() == nil || !slices.Contains(pv.Finalizers, c.driver.finalizer) || len(c.attachments.ByIndex(kube.ByVolume, pv.Name)) > 0 {
		return nil
	}
	return []string{c.driver.finalizer}
}
