package pvcfinalizer

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Deps are the dependencies of the controller. All fields are required.
type Deps struct {
	Client    kubernetes.Interface
	Informers *kube.Informers
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
}

// Controller removes finalizers from claims.
type Controller struct {
	cfg     Config
	deps    Deps
	rules   rules
	actions *prometheus.CounterVec

	claims kube.Informer[*corev1.PersistentVolumeClaim]
	pods   kube.Informer[*corev1.Pod]   // only if rules.needPods
	nodes  kube.Informer[metav1.Object] // only if rules.needNodes
}

// New requests the watches that cfg needs, and no others: a watch of all pods costs memory.
func New(cfg Config, deps Deps) *Controller {
	c := &Controller{cfg: cfg, deps: deps, rules: newRules(cfg), actions: newActions(deps.Registry)}
	if c.rules.idle() {
		return c
	}
	c.claims = deps.Informers.Claims()
	if c.rules.needPods() {
		c.pods = deps.Informers.PodsIfAllowed()
	}
	if c.rules.needNodes() {
		c.nodes = deps.Informers.Nodes()
	}
	return c
}

// NeedsPods reports whether the controller watches pods.
func (c *Controller) NeedsPods() bool { return c.rules.needPods() }

// term holds what lasts from becoming leader until losing the Lease.
type term struct {
	*Controller
	claims *kube.MutationCache[*corev1.PersistentVolumeClaim]
	pods   *kube.ClaimUsers // nil: no pod is ever deleted
	queue  *workloop.Loop[string]
}

// jitter spreads retries after a failure of the API server.
const jitter = 0.2

// Run reconciles claims until ctx ends, and returns after the last worker has stopped. It may be called again.
func (c *Controller) Run(ctx context.Context) (err error) {
	if c.rules.idle() {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &term{Controller: c}
	if t.claims, err = kube.NewMutationCache(c.claims); err != nil {
		return err
	}
	defer t.claims.Close()
	if c.rules.needPods() {
		if t.pods, err = kube.NewClaimUsers(c.pods); err != nil {
			return err
		}
		defer t.pods.Close()
	}
	t.queue = workloop.New(workloop.Config{
		Name: "nodecontroller-pvc-finalizer", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, Jitter: jitter,
		GracePeriod: c.cfg.Timeout,
	}, c.deps.Queues, t.sync)
	defer t.queue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "caches of pvc-finalizer"); err != nil {
		return err
	}
	t.queue.Run(ctx, c.cfg.Workers)
	return context.Cause(ctx)
}

// register registers the event handlers.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	registrations.Add(t.Controller.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{
		Add: t.enqueue, Update: t.claimUpdated, Delete: t.claimDeleted,
	}))
	if t.rules.needPods() {
		registrations.AddUnawaited(t.pods.Handle(t.enqueueKey))
	}
	if t.rules.needNodes() {
		registrations.Add(t.nodes.Handle(kube.Handlers[metav1.Object]{})) // to wait for the first list
	}
	return registrations
}

func (t *term) enqueue(pvc *corev1.PersistentVolumeClaim) {
	if t.rules.concerns(pvc) {
		t.queue.Add(kube.Key(pvc))
	}
}

func (t *term) enqueueKey(key string) {
	if pvc, ok := t.Controller.claims.Get(key); ok {
		t.enqueue(pvc)
	}
}

func (t *term) claimUpdated(old, pvc *corev1.PersistentVolumeClaim) {
	if old.ResourceVersion != pvc.ResourceVersion {
		t.enqueue(pvc)
	}
}

func (t *term) claimDeleted(pvc *corev1.PersistentVolumeClaim) { t.queue.Forget(kube.Key(pvc)) }

// sync reconciles one claim.
func (t *term) sync(ctx context.Context, key string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolumeClaim", key)
	ctx = klog.NewContext(ctx, log)
	s := t.gather(key)
	next := t.rules.decide(s)
	log.V(2).Info("Decided", "reason", next.reason, "pods", len(next.pods))
	return next.again, t.apply(ctx, s.claim, next)
}

// gather reads the caches.
func (t *term) gather(key string) claimState {
	s := claimState{now: time.Now()}
	pvc, ok := t.claims.Get(key)
	if !ok {
		return s
	}
	s.claim = pvc
	if t.pods != nil {
		var known bool
		s.pods, known = t.pods.Of(pvc)
		s.podsUnknown = !known
	}
	if t.rules.needNodes() {
		s.lost = map[string]bool{}
		for _, pod := range s.pods {
			node, exists := t.nodes.Get(pod.Spec.NodeName)
			s.lost[pod.Spec.NodeName] = !exists || node.GetDeletionTimestamp() != nil
		}
	}
	return s
}
