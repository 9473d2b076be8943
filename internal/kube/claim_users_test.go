// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestUsesClaim(t *testing.T) {
	direct := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "p-v"}}
	ephemeral := corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
	owned := func(uid types.UID, controller bool) []metav1.OwnerReference {
		return []metav1.OwnerReference{{Kind: "Pod", Name: "p", UID: uid, Controller: &controller}}
	}
	tests := map[string]struct {
		source corev1.VolumeSource
		claim  metav1.ObjectMeta
		want   bool
	}{
		"direct":          {direct, metav1.ObjectMeta{Namespace: "ns", Name: "p-v"}, true},
		"other claim":     {direct, metav1.ObjectMeta{Namespace: "ns", Name: "d"}, false},
		"other namespace": {direct, metav1.ObjectMeta{Namespace: "other", Name: "p-v"}, false},
		"ephemeral": {ephemeral, metav1.ObjectMeta{Namespace: "ns", Name: "p-v", OwnerReferences: owned("u1", true)},
			true},
		"ephemeral of an earlier pod": {ephemeral, metav1.ObjectMeta{Namespace: "ns", Name: "p-v", OwnerReferences: owned("u0", true)},
			false},
		"owned but not controlled": {ephemeral, metav1.ObjectMeta{Namespace: "ns", Name: "p-v", OwnerReferences: owned("u1", false)},
			false},
		"same name without owner": {ephemeral, metav1.ObjectMeta{Namespace: "ns", Name: "p-v"}, false},
		"other volume":            {corev1.VolumeSource{}, metav1.ObjectMeta{Namespace: "ns", Name: "p-v"}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}}
			pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: tt.source}}
			if got := UsesClaim(pod, &corev1.PersistentVolumeClaim{ObjectMeta: tt.claim}); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}
