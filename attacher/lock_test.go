// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/keylock"
)

// TestCallOfALockedVolumeEndsWithTheTerm: at the end of the term a call does not wait for the node controller, and the end is
// no error of the volume. There is no driver and no API server: every use of them panics.
func TestCallOfALockedVolumeEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keylock.Locks[string]
		if _, ok := locks.TryExclusive("h"); !ok {
			t.Fatal("the volume is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		term := &term{c: &Controller{deps: Deps{Locks: &locks}}}
		step := step{source: source{handle: "h", spec: &corev1.PersistentVolumeSpec{
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{VolumeHandle: "h"}},
		}}}
		s := attachmentState{attachment: testAttachment()}
		if err := term.publish(ctx, s, step); !errors.Is(err, ended) {
			t.Errorf("publish returned %v", err)
		}
		if err := term.unpublish(ctx, s, step, &liveReads{}); !errors.Is(err, ended) {
			t.Errorf("unpublish returned %v", err)
		}
	})
}
