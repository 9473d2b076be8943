// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// TestDeletionOfALockedVolumeEndsWithTheTerm: at the end of the term DeleteVolume does not wait for the node controller, and
// the end is no failure of the driver. There is no driver and no API server: every use of them panics.
func TestDeletionOfALockedVolumeEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keylock.Locks[string]
		if _, ok := locks.TryExclusive("h"); !ok {
			t.Fatal("the volume is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		csiSource := &corev1.CSIPersistentVolumeSource{VolumeHandle: "h"}
		c := &Controller{deps: Deps{Locks: &locks}, classes: kube.NewInformers(nil, nil, "d").Classes()}
		a := &claimLoop{c: c}
		if _, err := a.deleteRejected(ctx, claimKey{}, operation{handle: "h"}); !errors.Is(err, ended) {
			t.Errorf("deleteRejected returned %v", err)
		}
		pv := &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: "pv", UID: "u"},
			Spec:       corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: csiSource}},
		}
		l := &volumeLoop{c: c, removals: map[types.UID]*removal{}}
		if err := l.deleteVolume(ctx, pv); !errors.Is(err, ended) {
			t.Errorf("deleteVolume returned %v", err)
		}
	})
}
