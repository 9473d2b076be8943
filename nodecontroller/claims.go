package nodecontroller

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// claims helps claims over what Kubernetes leaves undone: it removes finalizers that
// nobody looks after any more, deletes pods that keep a claim from being deleted, and has
// the kubelet notice that a file system is to grow.
type claims struct {
	cfg     Config
	deps    Deps
	rules   claimRules
	metrics *claimMetrics

	claims  kube.Informer[*corev1.PersistentVolumeClaim]
	volumes kube.Informer[*corev1.PersistentVolume]
	classes kube.Informer[*storagev1.StorageClass]
	pods    kube.Informer[*corev1.Pod]   // only if rules.needPods
	nodes   kube.Informer[metav1.Object] // only if rules.needNodes
}

// newClaims asks for the watches that cfg needs, and for no other: that of all pods of a
// cluster is not cheap. Nothing runs before [claims.run].
func newClaims(cfg Config, deps Deps) *claims {
	c := &claims{cfg: cfg, deps: deps, rules: newClaimRules(cfg, deps.Driver), metrics: newClaimMetrics(deps.Registry)}
	if c.rules.idle() {
		return c
	}
	c.claims = deps.Informers.Claims()
	if c.rules.nudge {
		c.volumes, c.classes = deps.Informers.Volumes(), deps.Informers.Classes()
	}
	if c.rules.needPods() {
		c.pods = deps.Informers.PodsIfAllowed()
	}
	if c.rules.needNodes() {
		c.nodes = deps.Informers.Nodes()
	}
	return c
}

// claimsTerm is the work between winning a Lease and losing it.
type claimsTerm struct {
	c      *claims
	claims *kube.MutationCache[*corev1.PersistentVolumeClaim]
	pods   *kube.MutationCache[*corev1.Pod] // nil without a watch of pods
	// podsListed is closed when all pods are known; nil without a watch of them.
	podsListed <-chan struct{}
	queue      *workloop.Loop[string] // of namespace/name

	mu sync.Mutex
	// noticed is when a claim, by its UID, was first seen to wait for its file system to
	// grow, where the claim itself does not tell since when.
	noticed map[types.UID]time.Time
}

// run works until ctx ends, and returns after the last worker has stopped. It may be
// called again then.
func (c *claims) run(ctx context.Context) (err error) {
	if c.rules.idle() {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := &claimsTerm{c: c, noticed: map[types.UID]time.Time{}}
	if t.claims, err = kube.NewMutationCache(c.claims); err != nil {
		return err
	}
	defer t.claims.Close()
	if c.rules.needPods() {
		if t.pods, err = kube.NewMutationCache(c.pods); err != nil {
			return err
		}
		defer t.pods.Close()
	}
	t.queue = workloop.New(workloop.Config{
		Name: "nodecontroller-claims", RetryStart: c.cfg.RetryIntervalStart, RetryMax: c.cfg.RetryIntervalMax, Jitter: jitter, GracePeriod: c.cfg.Timeout,
	}, c.deps.Queues, t.sync)
	defer t.queue.Stop()
	registrations := t.register()
	defer registrations.Remove()
	if err := registrations.Wait(ctx, "claims caches"); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { t.awaitPods(ctx) })
	t.queue.Run(ctx, c.cfg.Workers)
	return context.Cause(ctx)
}

// awaitPods has the claims looked at that wait until all pods are known. That may never
// be, where the process has no permission for them; whatever does not need them goes on.
func (t *claimsTerm) awaitPods(ctx context.Context) {
	if t.podsListed == nil {
		return
	}
	select {
	case <-ctx.Done():
	case <-t.podsListed:
		for _, pvc := range t.c.claims.List() {
			t.claimAdded(pvc)
		}
	}
}

// blind tells whether there may be pods that are not known yet.
func (t *claimsTerm) blind() bool {
	if t.podsListed == nil {
		return false
	}
	select {
	case <-t.podsListed:
		return false
	default:
		return true
	}
}

// register has the events of all watches fill the queue. A watch from which nothing is
// to be learned by an event is registered all the same, so that its first list is waited for.
func (t *claimsTerm) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	add(t.c.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{Add: t.claimAdded, Update: t.claimUpdated, Delete: t.claimDeleted}))
	if t.c.rules.nudge {
		add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{Add: t.volumeAdded}))
		add(t.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{}))
	}
	if t.c.rules.needPods() {
		r, e := t.c.pods.Handle(kube.Handlers[*corev1.Pod]{Add: t.podAdded, Update: t.podUpdated})
		registrations.AddUnawaited(r, e) // see awaitPods
		if e == nil {
			t.podsListed = r.Synced.Done()
		}
	}
	if t.c.rules.needNodes() {
		add(t.c.nodes.Handle(kube.Handlers[metav1.Object]{}))
	}
	return registrations
}

func (t *claimsTerm) claimAdded(pvc *corev1.PersistentVolumeClaim) {
	if t.c.rules.concern(pvc) {
		t.queue.Add(kube.Key(pvc))
	}
}

func (t *claimsTerm) claimUpdated(old, pvc *corev1.PersistentVolumeClaim) {
	if old.UID != pvc.UID { // deleted and created again while the watch was interrupted
		t.claimDeleted(old)
	}
	if !resizePending(pvc) {
		t.forgetNoticed(pvc.UID)
	}
	if old.ResourceVersion != pvc.ResourceVersion {
		t.claimAdded(pvc)
	}
}

func (t *claimsTerm) claimDeleted(pvc *corev1.PersistentVolumeClaim) {
	t.forgetNoticed(pvc.UID)
	t.queue.Forget(kube.Key(pvc))
}

// volumeAdded wakes the claim of which it was not known whose volume it has.
func (t *claimsTerm) volumeAdded(pv *corev1.PersistentVolume) {
	if ref := pv.Spec.ClaimRef; ref != nil {
		t.wake(ref.Namespace + "/" + ref.Name)
	}
}

// podAdded wakes the claims of a pod that came after them.
func (t *claimsTerm) podAdded(pod *corev1.Pod) {
	for _, key := range kube.ClaimsOfPod(pod) {
		t.wake(key)
	}
}

// podUpdated looks only for what changes the part that a pod plays; a pod that runs is
// written often.
func (t *claimsTerm) podUpdated(old, pod *corev1.Pod) {
	if old.UID != pod.UID || old.Spec.NodeName != pod.Spec.NodeName {
		t.podAdded(pod)
	}
}

func (t *claimsTerm) wake(key string) {
	if pvc, ok := t.c.claims.Get(key); ok {
		t.claimAdded(pvc)
	}
}

// noticedAt is since when it is known that the file system of a claim is to grow; from
// now on, if it was not known before.
func (t *claimsTerm) noticedAt(uid types.UID, now time.Time) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at, known := t.noticed[uid]; known {
		return at
	}
	t.noticed[uid] = now
	return now
}

func (t *claimsTerm) forgetNoticed(uid types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.noticed, uid)
}

// usersOf is the pods that use pvc as far as the caches, and the own writes that those
// have not seen yet, can tell.
func (t *claimsTerm) usersOf(pvc *corev1.PersistentVolumeClaim) []*corev1.Pod {
	if t.pods == nil {
		return nil
	}
	var users []*corev1.Pod
	for _, cached := range t.c.pods.ByIndex(kube.ByClaim, kube.Key(pvc)) {
		if pod, ok := t.pods.Get(kube.Key(cached)); ok && usesClaim(pod, pvc) {
			users = append(users, pod)
		}
	}
	slices.SortFunc(users, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return users
}
