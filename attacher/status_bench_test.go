// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BenchmarkOnlyOwnChanges compares the versions of a VolumeAttachment before and after a write of the
// attacher, and before and after one of another component. The event handler does this for every
// update of an attachment that is not finished.
func BenchmarkOnlyOwnChanges(b *testing.B) {
	d := testDriver(nil)
	old := testAttachment(func(va *storagev1.VolumeAttachment) {
		va.UID, va.ResourceVersion, va.CreationTimestamp = "u", "1", metav1.NewTime(time.Unix(1, 0))
		va.Annotations = map[string]string{"example.com/a": "1"}
	})
	change := func(changes ...func(*storagev1.VolumeAttachment)) *storagev1.VolumeAttachment {
		va := old.DeepCopy()
		va.ResourceVersion = "2"
		for _, c := range changes {
			c(va)
		}
		return va
	}
	for name, va := range map[string]*storagev1.VolumeAttachment{
		"finalizer_and_annotations": change(protected, func(va *storagev1.VolumeAttachment) {
			va.Annotations = map[string]string{"example.com/a": "1", annNodeID: "n", annVolumeHandle: "v"}
		}),
		"error": change(func(va *storagev1.VolumeAttachment) {
			va.Status.AttachError = &storagev1.VolumeError{Message: "rpc error: code = Internal desc = x"}
		}),
		"deletion": change(deleting),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			want := name != "deletion"
			for b.Loop() {
				if d.onlyOwnChanges(old, va) != want {
					b.Fatalf("got %t", !want)
				}
			}
		})
	}
}
