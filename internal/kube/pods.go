// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// ClaimsOfPod returns the keys of the claims that pod uses, without duplicates. It does not check
// the owner of the claim of a generic ephemeral volume.
func ClaimsOfPod(pod *corev1.Pod) []string {
	var keys []string
	seen := sets.New[string]()
	for _, v := range pod.Spec.Volumes {
		var key string
		switch {
		case v.PersistentVolumeClaim != nil:
			key = pod.Namespace + "/" + v.PersistentVolumeClaim.ClaimName
		case v.Ephemeral != nil:
			key = pod.Namespace + "/" + pod.Name + "-" + v.Name
		}
		if key != "" && !seen.Has(key) {
			seen.Insert(key)
			keys = append(keys, key)
		}
	}
	return keys
}
