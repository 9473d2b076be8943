// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestPatchKeepsWhatTheCacheDoesNotHave: the cache drops an annotation of kubectl, which a patch must not remove.
func TestPatchKeepsWhatTheCacheDoesNotHave(t *testing.T) {
	before := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv1", UID: "u", ResourceVersion: "7",
		Annotations: map[string]string{annPreResize: "1Gi"}}}
	after := before.DeepCopy()
	removeRecord(after)
	patch, err := patchOf(before, after)
	want := `{"metadata":{"annotations":{"` + annPreResize + `":null},"resourceVersion":"7","uid":"u"}}`
	if err != nil || string(patch) != want {
		t.Errorf("%v: got %s, want %s", err, patch, want)
	}
	if patch, err := patchOf(before, before.DeepCopy()); err != nil || patch != nil {
		t.Errorf("%v: got %s for equal objects", err, patch)
	}
}
