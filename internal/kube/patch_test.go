// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestIsPatchTestFailed distinguishes a failed test operation from an invalid object, as the API
// server reports both.
func TestIsPatchTestFailed(t *testing.T) {
	cp := kubetest.Get(t, kubetest.WithAudit()) // with the options of the other tests, which share it
	maps := cp.Client().CoreV1().ConfigMaps(kubetest.Namespace(t, cp))
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "m"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for patch, want := range map[string]bool{
		`[{"op":"test","path":"/metadata/name","value":"other"}]`:                   true,
		`[{"op":"test","path":"/data/none","value":"v"}]`:                           true,
		`[{"op":"add","path":"/metadata/labels","value":{"a":"no value of such"}}]`: false,
		`[{"op":"test","path":"/metadata/name","value":"m"}]`:                       false,
	} {
		_, err := maps.Patch(t.Context(), "m", types.JSONPatchType, []byte(patch), metav1.PatchOptions{})
		if got := IsPatchTestFailed(err); got != want {
			t.Errorf("%s: %t for %v", patch, got, err)
		}
		if wrapped := fmt.Errorf("patching: %w", err); err != nil && IsPatchTestFailed(wrapped) != want {
			t.Errorf("%s: another result for a wrapped error", patch)
		}
	}
}
