package nodecontroller

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
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// resizePending tells whether the file system of pvc is to grow and nobody has begun with
// it. Once the kubelet has, or has found that it cannot, touching pods is of no use.
func resizePending(pvc *corev1.PersistentVolumeClaim) bool {
	switch pvc.Status.AllocatedResourceStatuses[corev1.ResourceStorage] {
	case corev1.PersistentVolumeClaimNodeResizePending:
		return true
	case corev1.PersistentVolumeClaimNodeResizeInProgress, corev1.PersistentVolumeClaimNodeResizeInfeasible:
		return false
	}
	for _, c := range pvc.Status.Conditions {
		if isResizeCondition(c) {
			return true
		}
	}
	return false
}

func isResizeCondition(c corev1.PersistentVolumeClaimCondition) bool {
	return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
}

// lastTransition is since when the file system of pvc is to grow; zero when pvc does not
// tell.
func lastTransition(pvc *corev1.PersistentVolumeClaim) (latest time.Time) {
	for _, c := range pvc.Status.Conditions {
		if isResizeCondition(c) && c.LastTransitionTime.After(latest) {
			latest = c.LastTransitionTime.Time
		}
	}
	return latest
}

// decideNudge is for a claim that is not being deleted.
func (r claimRules) decideNudge(s claimSnapshot) claimStep {
	switch {
	case !r.nudge || !resizePending(s.claim):
		return claimStep{reason: "NothingToDo"}
	case !s.ours:
		return claimStep{reason: "OfAnotherDriver"}
	}
	var pods []*corev1.Pod
	for _, pod := range s.users {
		if r.nudgeable(pod, s.since) && !s.handled[pod.UID] {
			pods = append(pods, pod)
		}
	}
	if len(pods) == 0 {
		return claimStep{reason: "Nudged"}
	}
	return claimStep{action: claimNudge, reason: "FileSystemResizePending", pods: pods}
}

// nudgeable tells whether a kubelet runs pod and has not been told of what is to be done
// since then. What the annotation says and is no time says nothing.
func (r claimRules) nudgeable(pod *corev1.Pod, since time.Time) bool {
	switch {
	case pod.DeletionTimestamp != nil, pod.Spec.NodeName == "",
		pod.Status.Phase == corev1.PodSucceeded, pod.Status.Phase == corev1.PodFailed:
		return false
	}
	told, err := time.Parse(time.RFC3339Nano, pod.Annotations[r.annotation])
	return err != nil || !told.After(since)
}

// nudgeTime is what the annotation is to say: a time after since, even where the clock of
// this machine is behind, or the same pod would be written again and again.
func nudgeTime(now, since time.Time) string {
	if at := since.Add(time.Nanosecond); now.Before(at) {
		now = at
	}
	return now.UTC().Format(time.RFC3339Nano)
}

// nudgePatch is a merge patch of one annotation that applies to pod only, and not to
// another one of its name.
func nudgePatch(pod *corev1.Pod, annotation, value string) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "annotations": map[string]string{annotation: value},
	}})
}

// isOtherObject tells whether err says that a patch was for another object of the same
// name. A merge patch with an outdated UID is an attempt to change that, which is invalid.
func isOtherObject(err error) bool {
	if !apierrors.IsInvalid(err) {
		return false
	}
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Details != nil &&
		slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// nudge changes an annotation of pod: the kubelet looks at a pod that has changed at once,
// and grows its file systems.
func (t *claimsTerm) nudge(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod, since time.Time) error {
	data, err := nudgePatch(pod, t.c.rules.annotation, nudgeTime(time.Now(), since))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	patched, err := t.c.deps.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if isOtherObject(err) {
		err = apierrors.NewConflict(corev1.Resource("pods"), pod.Name, err)
	}
	t.c.metrics.nudged(err)
	switch {
	case kube.IsNotFound(err):
		t.pods.MarkDeleted(pod)
		return nil
	case apierrors.IsConflict(err):
		return nil // another pod of its name, which is an event of its own
	case err != nil:
		err = fmt.Errorf("annotating pod %q, so that the file system of claim %q grows (the permission to patch pods is needed): %w", kube.Key(pod), pvc.Name, err)
		t.tellBlocked(pvc, err)
		return err
	}
	t.pods.Observe(patched)
	klog.FromContext(ctx).Info("Pod told that a file system is to grow", "pod", klog.KObj(pod))
	return nil
}
