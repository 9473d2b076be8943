package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// reasonClaimBlocked is the reason of the event that tells of a missing permission.
const reasonClaimBlocked = "NodeCleanupBlocked"

// maxClaimRounds bounds the steps of one sync. At most one of each kind is needed.
const maxClaimRounds = 8

// claimProgress is what one sync has found out besides what is in the caches.
type claimProgress struct {
	confirmed types.UID // the claim of which the API server has told
	handled   map[types.UID]bool
}

// sync brings one claim as far as it goes.
func (t *claimsTerm) sync(ctx context.Context, key string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolumeClaim", key)
	ctx = klog.NewContext(ctx, log)
	progress := &claimProgress{handled: map[types.UID]bool{}}
	for range maxClaimRounds {
		s := t.gather(key, progress)
		step := t.c.rules.decide(s)
		log.V(2).Info("Decided", "action", step.action.String(), "reason", step.reason)
		if step.action == claimNothing {
			return step.again, nil
		}
		if err := t.apply(ctx, s, step, progress); err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("claim %q is not settled after %d steps", key, maxClaimRounds)
}

// gather reads the caches, and the own writes that they have not seen yet.
func (t *claimsTerm) gather(key string, progress *claimProgress) claimSnapshot {
	s := claimSnapshot{handled: progress.handled, now: time.Now()}
	pvc, ok := t.claims.Get(key)
	if !ok {
		return s
	}
	s.claim, s.confirmed, s.blind = pvc, pvc.UID == progress.confirmed, t.blind()
	s.users = t.usersOf(pvc)
	if t.c.rules.needNodes() {
		s.lost = map[string]bool{}
		for _, pod := range s.users {
			node, exists := t.c.nodes.Get(pod.Spec.NodeName)
			s.lost[pod.Spec.NodeName] = !exists || node.GetDeletionTimestamp() != nil
		}
	}
	if t.c.rules.nudge && resizePending(pvc) {
		s.ours = t.isOurs(pvc)
		if s.since = lastTransition(pvc); s.since.IsZero() {
			s.since = t.noticedAt(pvc.UID, s.now)
		}
	}
	return s
}

// isOurs tells whether the volume of pvc is one of the driver. A class that was deleted
// since does not matter, unless nothing else tells.
func (t *claimsTerm) isOurs(pvc *corev1.PersistentVolumeClaim) bool {
	if pv, known := t.c.volumes.Get(pvc.Spec.VolumeName); known {
		return pv.Spec.CSI != nil && pv.Spec.CSI.Driver == t.c.rules.driver
	}
	class, known := t.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(pvc))
	return known && class.Provisioner == t.c.rules.driver
}

// apply does what decide chose. An error means that the claim is tried again after its
// back-off.
func (t *claimsTerm) apply(ctx context.Context, s claimSnapshot, step claimStep, progress *claimProgress) error {
	switch step.action {
	case claimStrip:
		return t.strip(ctx, s.claim)
	case claimConfirm:
		return t.confirm(ctx, s.claim, progress)
	case claimEvict:
		return eachPod(step.pods, progress, func(pod *corev1.Pod) error { return t.evict(ctx, s.claim, pod) })
	case claimRelease:
		return t.release(ctx, s.claim)
	case claimNudge:
		return eachPod(step.pods, progress, func(pod *corev1.Pod) error { return t.nudge(ctx, s.claim, pod, s.since) })
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

// eachPod works on every pod, also after one has failed. Those that have not are handled.
func eachPod(pods []*corev1.Pod, progress *claimProgress, work func(*corev1.Pod) error) error {
	var errs []error
	for _, pod := range pods {
		if err := work(pod); err != nil {
			errs = append(errs, err)
			continue
		}
		progress.handled[pod.UID] = true
	}
	return errors.Join(errs...)
}

// changeClaim writes the metadata of a claim.
func (t *claimsTerm) changeClaim(ctx context.Context, pvc *corev1.PersistentVolumeClaim, change kube.MetadataPatch) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	_, err := t.claims.Patch(ctx, t.c.deps.Client.CoreV1().PersistentVolumeClaims(pvc.Namespace), pvc, change)
	return err
}

// tellBlocked says at the claim that a permission is missing; about other errors there is
// nothing that its owner could do.
func (t *claimsTerm) tellBlocked(pvc *corev1.PersistentVolumeClaim, err error) {
	if apierrors.IsForbidden(err) {
		t.c.deps.Events.Event(pvc, corev1.EventTypeWarning, reasonClaimBlocked, err.Error())
	}
}
