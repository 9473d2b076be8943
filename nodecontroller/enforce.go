package nodecontroller

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// reasonPodDeleted is the reason of the event about a pod that was deleted for the sake of
// its claim.
const reasonPodDeleted = "ClaimBeingDeleted"

// enforced tells whether pvc is being deleted and waits for us. A claim of the driver that
// does not have the finalizer is nobody's business here.
func (r claimRules) enforced(pvc *corev1.PersistentVolumeClaim) bool {
	return r.finalizer != "" && pvc.DeletionTimestamp != nil && slices.Contains(pvc.Finalizers, r.finalizer)
}

// decideEnforced is for a claim that is being deleted and has the finalizer.
//
// The pods come first, and the finalizer goes only when no other is left: until then pods
// may come back and use the claim again, which nobody would notice without it.
func (r claimRules) decideEnforced(s claimSnapshot) claimStep {
	var evict []*corev1.Pod
	for _, pod := range s.users {
		if r.pods.covers(pod, s.lost[pod.Spec.NodeName]) && !s.handled[pod.UID] {
			evict = append(evict, pod)
		}
	}
	switch {
	case len(evict) > 0 && !s.confirmed:
		// The claim may be gone and another one have its name, whose pods these are.
		return claimStep{action: claimConfirm, reason: "PodsToDelete"}
	case len(evict) > 0:
		return claimStep{action: claimEvict, reason: "UsedByPods", pods: evict}
	case slices.ContainsFunc(s.claim.Finalizers, func(f string) bool { return f != r.finalizer }):
		return claimStep{reason: "OtherFinalizers", again: s.now.Add(enforceRecheck)}
	}
	return claimStep{action: claimRelease, reason: "LastFinalizer"}
}

// covers tells whether pod, which uses a claim that is being deleted, is to be deleted.
// lost tells whether the node of pod is gone or being deleted.
func (p PodDeletionPolicy) covers(pod *corev1.Pod, lost bool) bool {
	if pod.DeletionTimestamp != nil {
		return false
	}
	switch p {
	case PodsPending:
		return pod.Spec.NodeName == ""
	case PodsOrphaned:
		return pod.Spec.NodeName == "" || lost
	case PodsAll:
		return true
	}
	return false
}

// confirm reads pvc from the API server, before anything is done to pods because of it.
func (t *claimsTerm) confirm(ctx context.Context, pvc *corev1.PersistentVolumeClaim, progress *claimProgress) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	live, err := t.c.deps.Client.CoreV1().PersistentVolumeClaims(pvc.Namespace).Get(ctx, pvc.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pvc.UID:
		t.claims.MarkDeleted(pvc)
		return nil
	case err != nil:
		err = fmt.Errorf("reading claim %q before its pods are deleted: %w", kube.Key(pvc), err)
		t.tellBlocked(pvc, err)
		return err
	}
	t.claims.Observe(live)
	progress.confirmed = live.UID
	return nil
}

// evict deletes one pod of pvc, if the API server says that it is still one to be deleted.
func (t *claimsTerm) evict(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	deleted, err := t.evictConfirmed(ctx, pvc, pod)
	if err != nil {
		t.c.metrics.finalizer(actionDeletePod, err)
		err = fmt.Errorf("deleting pod %q, which uses claim %q that is being deleted (the permission to get and delete pods is needed): %w", kube.Key(pod), pvc.Name, err)
		t.tellBlocked(pvc, err)
		return err
	}
	if deleted {
		t.c.metrics.finalizer(actionDeletePod, nil)
		klog.FromContext(ctx).Info("Pod deleted because of its claim", "pod", klog.KObj(pod), "policy", t.c.rules.pods)
		t.c.deps.Events.Eventf(pod, corev1.EventTypeWarning, reasonPodDeleted, "Deleted because claim %s is being deleted (--pvc-pod-deletion=%s)", pvc.Name, t.c.rules.pods)
	}
	return nil
}

func (t *claimsTerm) evictConfirmed(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod) (deleted bool, err error) {
	pods := t.c.deps.Client.CoreV1().Pods(pod.Namespace)
	live, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pod.UID:
		t.pods.MarkDeleted(pod)
		return false, nil // a new pod of its name is an event of its own
	case err != nil:
		return false, err
	}
	t.pods.Observe(live)
	lost := false
	if t.c.rules.needNodes() && live.Spec.NodeName != "" {
		if lost, err = t.isLost(ctx, live.Spec.NodeName); err != nil {
			return false, err
		}
	}
	if !usesClaim(live, pvc) || !t.c.rules.pods.covers(live, lost) {
		return false, nil
	}
	err = pods.Delete(ctx, live.Name, t.c.deletion(live))
	if kube.IsNotFound(err) {
		t.pods.MarkDeleted(live)
		return false, nil
	}
	return err == nil, err
}

// isLost asks the API server whether a node is gone, or being deleted. That the cache does
// not have it is not enough: it may be late.
func (t *claimsTerm) isLost(ctx context.Context, name string) (bool, error) {
	node, err := t.c.deps.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading node %q: %w", name, err)
	}
	return node.DeletionTimestamp != nil, nil
}

// deletion is how pod is deleted. Where its node matters, the pod must be as it was read:
// it may have been scheduled meanwhile.
func (c *claims) deletion(pod *corev1.Pod) metav1.DeleteOptions {
	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}
	if c.rules.pods != PodsAll {
		options.Preconditions.ResourceVersion = &pod.ResourceVersion
	}
	if grace := c.cfg.PVCPodDeletionGrace; grace >= 0 {
		seconds := int64((grace + time.Second - 1) / time.Second)
		options.GracePeriodSeconds = &seconds
	}
	return options
}

// release removes the finalizer of pvc, and with it pvc: it was the last one.
func (t *claimsTerm) release(ctx context.Context, pvc *corev1.PersistentVolumeClaim) error {
	err := t.changeClaim(ctx, pvc, kube.MetadataPatch{RemoveFinalizers: []string{t.c.rules.finalizer}})
	t.c.metrics.finalizer(actionRelease, err)
	if err != nil {
		err = fmt.Errorf("removing finalizer %q of claim %q (the permission to patch persistentvolumeclaims is needed): %w", t.c.rules.finalizer, kube.Key(pvc), err)
		t.tellBlocked(pvc, err)
		return err
	}
	klog.FromContext(ctx).Info("Claim released", "finalizer", t.c.rules.finalizer)
	return nil
}
