package resizenudge

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config holds the settings.
type Config struct {
	Enabled    bool
	Driver     string
	Annotation string // of pods

	Workers                              int
	Timeout                              time.Duration // of each request
	RetryIntervalStart, RetryIntervalMax time.Duration
}

// Deps are the dependencies of the controller. All fields are required.
type Deps struct {
	Client    kubernetes.Interface
	Informers *kube.Informers
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
}

// Controller updates pods whose file systems must grow.
type Controller struct {
	cfg    Config
	deps   Deps
	nudges *prometheus.CounterVec

	claims  kube.Informer[*corev1.PersistentVolumeClaim]
	volumes kube.Informer[*corev1.PersistentVolume]
	classes kube.Informer[*storagev1.StorageClass]
	pods    kube.Informer[*corev1.Pod]
}

// New requests the watches, if the controller is enabled.
func New(cfg Config, deps Deps) *Controller {
	c := &Controller{cfg: cfg, deps: deps, nudges: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_resize_nudges_total",
		Help: "Pods annotated so that the kubelet grows a file system, by result: ok, gone, conflict, forbidden or error.",
	}, []string{"result"})}
	deps.Registry.MustRegister(c.nudges)
	if cfg.Enabled {
		c.claims, c.volumes = deps.Informers.Claims(), deps.Informers.Volumes()
		c.classes, c.pods = deps.Informers.Classes(), deps.Informers.PodsIfAllowed()
	}
	return c
}

// NeedsPods reports whether the controller watches pods.
func (c *Controller) NeedsPods() bool { return c.cfg.Enabled }

// term holds what lasts from becoming leader until losing the Lease.
type term struct {
	*Controller
	pods  *kube.ClaimUsers
	queue *workloop.Loop[string]

	mu sync.Mutex
	// firstSeen is when a claim, by UID, was first seen waiting, if its conditions do not say since when.
	firstSeen map[types.UID]time.Time
}

// jitter spreads retries after a failure of the API server.
const jitter = 0.2

// Run updates pods until ctx ends, and returns after the last worker has stopped. It may be called again.
func (c *Controller) Run(ctx context.Context) (err error) {
	if !c.cfg.Enabled {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &term{Controller: c, firstSeen: map[types.UID]time.Time{}}
	if t.pods, err = kube.NewClaimUsers(c.pods); err != nil {
		return err
	}
	defer t.pods.Close()
	t.queue = workloop.New(workloop.Config{
		Name: "nodecontroller-resize-nudge", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, Jitter: jitter,
		GracePeriod: c.cfg.Timeout,
	}, c.deps.Queues, t.sync)
	defer t.queue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "caches of resize-nudge"); err != nil {
		return err
	}
	t.queue.Run(ctx, c.cfg.Workers)
	return context.Cause(ctx)
}

// register registers the event handlers.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	registrations.Add(t.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{
		Add: t.enqueue, Update: t.claimUpdated, Delete: t.claimDeleted,
	}))
	registrations.Add(t.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{Add: t.volumeAdded}))
	registrations.Add(t.classes.Handle(kube.Handlers[*storagev1.StorageClass]{})) // to wait for the first list
	registrations.AddUnawaited(t.pods.Handle(t.enqueueKey))
	return registrations
}

func (t *term) enqueue(pvc *corev1.PersistentVolumeClaim) {
	if concerns(pvc) {
		t.queue.Add(kube.Key(pvc))
	}
}

func (t *term) enqueueKey(key string) {
	if pvc, ok := t.claims.Get(key); ok {
		t.enqueue(pvc)
	}
}

func (t *term) claimUpdated(old, pvc *corev1.PersistentVolumeClaim) {
	if old.UID != pvc.UID { // recreated while the watch was interrupted
		t.claimDeleted(old)
	}
	if !resizePending(pvc) {
		t.forget(pvc.UID)
	}
	if old.ResourceVersion != pvc.ResourceVersion {
		t.enqueue(pvc)
	}
}

func (t *term) claimDeleted(pvc *corev1.PersistentVolumeClaim) {
	t.forget(pvc.UID)
	t.queue.Forget(kube.Key(pvc))
}

// volumeAdded enqueues the claim of a volume that the watch observed after its claim.
func (t *term) volumeAdded(pv *corev1.PersistentVolume) {
	if ref := pv.Spec.ClaimRef; ref != nil {
		t.enqueueKey(ref.Namespace + "/" + ref.Name)
	}
}

// seenSince returns when a claim was first seen waiting: now, if this is the first time.
func (t *term) seenSince(uid types.UID, now time.Time) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, seen := t.firstSeen[uid]; !seen {
		t.firstSeen[uid] = now
	}
	return t.firstSeen[uid]
}

func (t *term) forget(uid types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.firstSeen, uid)
}
