// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Warning, Pod: the pod was deleted because its PVC is being deleted (--pvc-finalizer-mode=enforce)
const reasonPodDeleted = "ClaimBeingDeleted"

// podGrace is the termination grace period of deleted pods in seconds, as in topolvm-controller.
const podGrace int64 = 1

// attempt executes one step for a claim.
type attempt struct {
	*Controller
	term *claimloop.Term
	pvc  *corev1.PersistentVolumeClaim
}

// apply executes next. After an error, the claim is retried with back-off.
func (a attempt) apply(ctx context.Context, next step) error {
	if next.strip {
		return a.removeFinalizers(ctx, actionStrip, a.rules.obsolete...)
	}
	if len(next.pods) > 0 {
		if exists, err := a.confirm(ctx); err != nil || !exists {
			return err
		}
	}
	var errs []error
	for _, pod := range next.pods {
		errs = append(errs, a.deletePod(ctx, pod))
	}
	if err := errors.Join(errs...); err != nil || !next.release {
		return err
	}
	return a.removeFinalizers(ctx, actionRelease, a.rules.finalizer)
}

// removeFinalizers removes finalizers from the claim in one write.
func (a attempt) removeFinalizers(ctx context.Context, action string, finalizers ...string) error {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	client := a.deps.Client.CoreV1().PersistentVolumeClaims(a.pvc.Namespace)
	_, err := a.term.Claims.Patch(ctx, client, a.pvc, kube.MetadataPatch{RemoveFinalizers: finalizers})
	a.actions.WithLabelValues(action, kube.WriteResult(err)).Inc()
	if err != nil {
		return a.term.Failed(a.pvc, "patch on persistentvolumeclaims",
			fmt.Errorf("removing finalizers %q: claim %s: %w", finalizers, kube.Key(a.pvc), err))
	}
	klog.FromContext(ctx).Info("Finalizers removed from claim", "action", action, "finalizers", finalizers)
	return nil
}

// confirm reads the claim from the API server and reports whether it still exists.
func (a attempt) confirm(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	live, err := a.deps.Client.CoreV1().PersistentVolumeClaims(a.pvc.Namespace).Get(ctx, a.pvc.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != a.pvc.UID:
		a.term.Claims.MarkDeleted(a.pvc)
		return false, nil
	case err != nil:
		return false, a.term.Failed(a.pvc, "get on persistentvolumeclaims",
			fmt.Errorf("reading the claim before its pods are deleted: claim %s: %w", kube.Key(a.pvc), err))
	}
	a.term.Claims.Observe(live)
	return true, nil
}

// deletePod deletes one pod of the claim if the API server confirms that it must be deleted.
func (a attempt) deletePod(ctx context.Context, pod *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	deleted, err := a.deleteConfirmed(ctx, pod)
	if deleted || err != nil {
		a.actions.WithLabelValues(actionDeletePod, kube.WriteResult(err)).Inc()
	}
	if err != nil {
		return a.term.Failed(a.pvc, "get and delete on pods",
			fmt.Errorf("deleting a pod of claim %s, which is being deleted: pod %s: %w", a.pvc.Name, kube.Key(pod), err))
	}
	if deleted {
		klog.FromContext(ctx).Info("Pod of deleted claim deleted", "pod", klog.KObj(pod))
		a.deps.Events.Eventf(pod, corev1.EventTypeWarning, reasonPodDeleted,
			"Deleted because PersistentVolumeClaim %s is being deleted (--pvc-finalizer-mode=%s)", a.pvc.Name, ModeEnforce)
	}
	return nil
}

// deleteConfirmed reads pod from the API server and reports whether it deleted the pod.
func (a attempt) deleteConfirmed(ctx context.Context, pod *corev1.Pod) (bool, error) {
	client := a.deps.Client.CoreV1().Pods(pod.Namespace)
	read := election.Now()
	live, err := client.Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != pod.UID:
		a.term.Pods.MarkDeleted(pod)
		return false, nil // the creation of a new pod of the name is an event of its own
	case err != nil:
		return false, err
	}
	a.term.Pods.Observe(live)
	if !kube.UsesClaim(live, a.pvc) || live.DeletionTimestamp != nil {
		return false, nil
	}
	if err := election.MayCallNow(ctx, read); err != nil {
		return false, err
	}
	err = client.Delete(ctx, live.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &live.UID}, GracePeriodSeconds: new(podGrace)})
	if kube.IsNotFound(err) {
		a.term.Pods.MarkDeleted(live)
		return false, nil
	}
	return err == nil, err
}
