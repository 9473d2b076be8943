// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"net/http"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func readsVolume(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/persistentvolumes/")
}

// TestSuspendedProcessDeletesNothing: the process is suspended while the response to the read before a deletion is on its way, and
// continues after its Lease has expired.
func TestSuspendedProcessDeletesNothing(t *testing.T) {
	t.Run("released volume", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, oneWorker)
		f.ExpireAfter(readsVolume)
		pv := f.volume(f.Unique("pv"), corev1.VolumeReleased, nil)
		f.start()
		f.Refuses(remove)
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(f.Context(), pv.Name, types.MergePatchType,
			[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{})
		f.Must(err)
		f.start() // another leads
		f.volumesSettle()
		if calls := f.deletions(pv); len(calls) != 0 {
			t.Errorf("calls of DeleteVolume: %v", calls)
		}
	})
	t.Run("unusable volume", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, nil)
		f.ExpireAfter(readsVolume)
		f.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 }))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.start()
		f.Refuses(remove)
		f.start()
		f.saved(claim)
	})
}
