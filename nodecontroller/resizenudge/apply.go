package resizenudge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// reasonBlocked is the reason of the event about a missing permission.
const reasonBlocked = "NodeCleanupBlocked"

// sync reconciles one claim.
func (t *term) sync(ctx context.Context, key string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolumeClaim", key)
	ctx = klog.NewContext(ctx, log)
	s := t.gather(key)
	next := decide(s, t.cfg.Annotation)
	log.V(2).Info("Decided", "reason", next.reason, "pods", len(next.pods))
	var errs []error
	for _, pod := range next.pods {
		errs = append(errs, t.update(ctx, s.claim, pod, s.since))
	}
	return next.again, errors.Join(errs...)
}

// gather reads the caches.
func (t *term) gather(key string) claimState {
	s := claimState{now: time.Now()}
	pvc, ok := t.claims.Get(key)
	if !ok {
		return s
	}
	var known bool
	s.claim, s.ours = pvc, t.isOurs(pvc)
	s.pods, known = t.pods.Of(pvc)
	s.podsUnknown = !known
	if s.since = lastTransition(pvc); s.since.IsZero() && concerns(pvc) {
		s.since = t.seenSince(pvc.UID, s.now)
	}
	return s
}

// isOurs reports whether the volume of pvc belongs to the driver. The StorageClass decides only if the
// volume is not known: the class may have been deleted.
func (t *term) isOurs(pvc *corev1.PersistentVolumeClaim) bool {
	if pv, known := t.volumes.Get(pvc.Spec.VolumeName); known {
		return pv.Spec.CSI != nil && pv.Spec.CSI.Driver == t.cfg.Driver
	}
	class, known := t.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(pvc))
	return known && class.Provisioner == t.cfg.Driver
}

// update sets the annotation of pod. The UID in the patch makes it fail for another pod of the name.
func (t *term) update(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod, since time.Time) error {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "annotations": map[string]string{t.cfg.Annotation: annotationValue(time.Now(), since)},
	}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	patched, err := t.deps.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if isOtherObject(err) {
		err = apierrors.NewConflict(corev1.Resource("pods"), pod.Name, err)
	}
	t.nudges.WithLabelValues(kube.WriteResult(err)).Inc()
	switch {
	case kube.IsNotFound(err):
		t.pods.MarkDeleted(pod)
		return nil
	case apierrors.IsConflict(err):
		return nil // the creation of the new pod is an event of its own
	case err != nil:
		return t.failed(pvc, fmt.Errorf("annotating pod for the file system expansion of claim %s: pod %s: %w", pvc.Name, kube.Key(pod),
			err))
	}
	t.pods.Observe(patched)
	klog.FromContext(ctx).Info("Pod annotated for file system expansion", "pod", klog.KObj(pod))
	return nil
}

// isOtherObject reports whether err means that the UID in a patch was that of another object. The
// API server treats it as an invalid change of the UID.
func isOtherObject(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// failed completes err if the permission to patch pods is missing, and emits an event about it.
func (t *term) failed(pvc *corev1.PersistentVolumeClaim, err error) error {
	if apierrors.IsForbidden(err) {
		err = fmt.Errorf("%w. Grant the permission to patch pods", err)
		t.deps.Events.Event(pvc, corev1.EventTypeWarning, reasonBlocked, err.Error())
	}
	return err
}
