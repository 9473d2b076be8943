// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClaimUsers finds the pods that use a claim, with the writes of this process that the watch has not
// observed yet. The watch of pods may be forbidden: it comes from [Informers.IfAllowed].
type ClaimUsers struct {
	*MutationCache[*corev1.Pod]
}

// NewClaimUsers returns the overlay for the informer of pods.
func NewClaimUsers(pods Informer[*corev1.Pod]) *ClaimUsers {
	return &ClaimUsers{NewMutationCache(pods)}
}

// Of returns the pods that use pvc by name, or false if pods that are not known yet may use it.
func (u *ClaimUsers) Of(pvc *corev1.PersistentVolumeClaim) ([]*corev1.Pod, bool) {
	if !u.informer.Synced() {
		return nil, false
	}
	var users []*corev1.Pod
	for _, cached := range u.informer.ByIndex(ByClaim, Key(pvc)) {
		if pod, ok := u.Get(Key(cached)); ok && UsesClaim(pod, pvc) {
			users = append(users, pod)
		}
	}
	slices.SortFunc(users, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return users, true
}

// Handle calls enqueue with the key of each claim of a pod that was created, replaced or scheduled.
func (u *ClaimUsers) Handle(enqueue func(claim string)) (Registration, error) {
	each := func(pod *corev1.Pod) {
		for _, key := range ClaimsOfPod(pod) {
			enqueue(key)
		}
	}
	return u.informer.Handle(Handlers[*corev1.Pod]{Add: each, Update: func(old, pod *corev1.Pod) {
		if old.UID != pod.UID || old.Spec.NodeName != pod.Spec.NodeName {
			each(pod)
		}
	}})
}

// UsesClaim reports whether pod uses pvc. The claim of a generic ephemeral volume must be controlled
// by pod: Kubernetes does not start a pod whose claim belongs to another owner.
func UsesClaim(pod *corev1.Pod, pvc *corev1.PersistentVolumeClaim) bool {
	return pod.Namespace == pvc.Namespace && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		switch {
		case v.PersistentVolumeClaim != nil:
			return v.PersistentVolumeClaim.ClaimName == pvc.Name
		case v.Ephemeral != nil:
			return pod.Name+"-"+v.Name == pvc.Name && metav1.IsControlledBy(pvc, pod)
		}
		return false
	})
}

// WriteResult returns the value of the metric label "result" for the error of a write.
func WriteResult(err error) string {
	switch {
	case err == nil:
		return "ok"
	case apierrors.IsForbidden(err):
		return "forbidden"
	case IsNotFound(err):
		return "gone"
	case apierrors.IsConflict(err), IsPatchTestFailed(err):
		return "conflict"
	}
	return "error"
}
