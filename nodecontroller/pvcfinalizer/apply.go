package pvcfinalizer

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// The reasons of events.
const (
	reasonPodDeleted = "ClaimBeingDeleted"
	reasonBlocked    = "NodeCleanupBlocked"
)

// apply executes next for pvc. After an error, pvc is retried with back-off.
func (t *term) apply(ctx context.Context, pvc *corev1.PersistentVolumeClaim, next step) error {
	if next.strip {
		return t.removeFinalizers(ctx, pvc, actionStrip, t.rules.obsolete...)
	}
	if len(next.pods) > 0 {
		if unchanged, err := t.confirm(ctx, pvc); err != nil || !unchanged {
			return err
		}
	}
	var errs []error
	for _, pod := range next.pods {
		errs = append(errs, t.deletePod(ctx, pvc, pod))
	}
	if err := errors.Join(errs...); err != nil || !next.release {
		return err
	}
	return t.removeFinalizers(ctx, pvc, actionRelease, t.rules.finalizer)
}

// removeFinalizers removes finalizers from pvc in one write.
func (t *term) removeFinalizers(ctx context.Context, pvc *corev1.PersistentVolumeClaim, action string, finalizers ...string) error {
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	client := t.deps.Client.CoreV1().PersistentVolumeClaims(pvc.Namespace)
	_, err := t.claims.Patch(ctx, client, pvc, kube.MetadataPatch{RemoveFinalizers: finalizers})
	t.count(action, err)
	if err != nil {
		return t.failed(pvc, "patch persistentvolumeclaims",
			fmt.Errorf("removing finalizers %q: claim %s: %w", finalizers, kube.Key(pvc), err))
	}
	klog.FromContext(ctx).Info("Finalizers removed from claim", "action", action, "finalizers", finalizers)
	return nil
}

// confirm reads pvc from the API server and reports whether it still exists.
func (t *term) confirm(ctx context.Context, pvc *corev1.PersistentVolumeClaim) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	live, err := t.deps.Client.CoreV1().PersistentVolumeClaims(pvc.Namespace).Get(ctx, pvc.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pvc.UID:
		t.claims.MarkDeleted(pvc)
		return false, nil
	case err != nil:
		return false, t.failed(pvc, "get persistentvolumeclaims",
			fmt.Errorf("reading claim before its pods are deleted: claim %s: %w", kube.Key(pvc), err))
	}
	t.claims.Observe(live)
	return true, nil
}

// deletePod deletes one pod of pvc if the API server confirms that it must be deleted.
func (t *term) deletePod(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	deleted, err := t.deleteConfirmed(ctx, pvc, pod)
	if err != nil {
		t.count(actionDeletePod, err)
		return t.failed(pvc, "get and delete pods",
			fmt.Errorf("deleting pod of claim %s that is being deleted: pod %s: %w", pvc.Name, kube.Key(pod), err))
	}
	if deleted {
		t.count(actionDeletePod, nil)
		klog.FromContext(ctx).Info("Pod of deleted claim deleted", "pod", klog.KObj(pod), "policy", t.rules.pods)
		t.deps.Events.Eventf(pod, corev1.EventTypeWarning, reasonPodDeleted,
			"Deleted because PersistentVolumeClaim %s is being deleted (--pvc-pod-deletion=%s)", pvc.Name, t.rules.pods)
	}
	return nil
}

// deleteConfirmed reads pod and its node from the API server and reports whether it deleted the pod.
func (t *term) deleteConfirmed(ctx context.Context, pvc *corev1.PersistentVolumeClaim, pod *corev1.Pod) (bool, error) {
	client := t.deps.Client.CoreV1().Pods(pod.Namespace)
	live, err := client.Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pod.UID:
		t.pods.MarkDeleted(pod)
		return false, nil // the creation of a new pod of the name is an event of its own
	case err != nil:
		return false, err
	}
	t.pods.Observe(live)
	lost := false
	if t.rules.needNodes() && live.Spec.NodeName != "" {
		if lost, err = t.nodeLost(ctx, live.Spec.NodeName); err != nil {
			return false, err
		}
	}
	if !kube.UsesClaim(live, pvc) || !t.rules.deletes(live, lost) {
		return false, nil
	}
	err = client.Delete(ctx, live.Name, t.deleteOptions(live))
	if kube.IsNotFound(err) {
		t.pods.MarkDeleted(live)
		return false, nil
	}
	return err == nil, err
}

// nodeLost asks the API server whether a Node does not exist or is being deleted.
func (t *term) nodeLost(ctx context.Context, name string) (bool, error) {
	node, err := t.deps.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading node %q: %w", name, err)
	}
	return node.DeletionTimestamp != nil, nil
}

// deleteOptions returns the options for deleting pod. If its node matters, the resourceVersion is a
// precondition: the pod may have been scheduled after it was read.
func (c *Controller) deleteOptions(pod *corev1.Pod) metav1.DeleteOptions {
	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}
	if c.rules.pods != PodsAll {
		options.Preconditions.ResourceVersion = &pod.ResourceVersion
	}
	if grace := c.cfg.PodDeletionGrace; grace >= 0 {
		seconds := int64((grace + time.Second - 1) / time.Second)
		options.GracePeriodSeconds = &seconds
	}
	return options
}

// failed completes err if the permission to do something is missing, and emits an event about it.
func (t *term) failed(pvc *corev1.PersistentVolumeClaim, permission string, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	err = fmt.Errorf("%w. Grant the permission to %s", err, permission)
	t.deps.Events.Event(pvc, corev1.EventTypeWarning, reasonBlocked, err.Error())
	return err
}
