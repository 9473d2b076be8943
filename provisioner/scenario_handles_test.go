// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// lateVolumes has the watch of PersistentVolumes deliver nothing while the returned lock is held.
func (f *fixture) lateVolumes() *sync.Mutex {
	var late sync.Mutex
	f.Watch = kubetest.Proxy(f.T, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.URL.Query().Get("watch") != "" && strings.HasSuffix(r.URL.Path, "/persistentvolumes") {
			w = kubetest.GatedWriter{ResponseWriter: w, Gate: &late}
		}
		pass.ServeHTTP(w, r)
	})
	return &late
}

// second makes a PersistentVolume for the volume of first.
func (f *fixture) second(
	first *corev1.PersistentVolume, phase corev1.PersistentVolumePhase, policy corev1.PersistentVolumeReclaimPolicy,
) *corev1.PersistentVolume {
	return f.volume(first.Name+"-second", phase, func(pv *corev1.PersistentVolume) {
		pv.Spec.CSI.VolumeHandle, pv.Spec.PersistentVolumeReclaimPolicy = first.Spec.CSI.VolumeHandle, policy
	})
}

// held waits until a volume that CreateVolume has returned waits for its PersistentVolume, or no longer does.
func (f *fixture) held(handle string, want bool) {
	f.Helper()
	kubetest.Eventually(f.T, "the volume waits for its PersistentVolume", func(context.Context) error {
		if _, held := f.c.claimLoop.Load().ops.holderOf(handle); held != want {
			return fmt.Errorf("volume %q waits: %t", handle, held)
		}
		return nil
	})
}

// provisionerScenarioHandles: the data of an object is not deleted with another object that names the same volume.
func provisionerScenarioHandles(t *testing.T) {
	for name, tt := range map[string]struct {
		saved, restart bool
		bound          bool // and the watch of PersistentVolumes is late
		rejected       bool // and not returned as it is
		owner          string
	}{
		"cleaned_up_saved_by_this_process":    {rejected: true, saved: true, owner: "claim "},
		"cleaned_up_saved_and_bound":          {rejected: true, saved: true, bound: true, owner: "PersistentVolume "},
		"cleaned_up_saved_by_an_earlier_one":  {rejected: true, saved: true, restart: true, owner: "PersistentVolume "},
		"cleaned_up_that_cannot_be_saved_yet": {rejected: true, owner: "claim "},
		"used_saved_by_this_process":          {saved: true, owner: "PersistentVolume "},
		"used_saved_and_bound":                {saved: true, bound: true, owner: "PersistentVolume "},
		"used_saved_by_an_earlier_one":        {saved: true, restart: true, owner: "PersistentVolume "},
		"used_that_cannot_be_saved_yet":       {owner: "claim "},
	} {
		t.Run("volume_of_another_claim_is_not_"+name, func(t *testing.T) {
			f := newFixture(t, csitest.Config{}, nil)
			late := f.lateVolumes()
			f.start()
			f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodPost && r.URL.Path == "/api/v1/persistentvolumes" && !tt.saved {
					http.Error(w, "no", http.StatusInternalServerError)
					return
				}
				pass.ServeHTTP(w, r)
			})
			f.makeClass(nil)
			gate := make(chan struct{})
			f.Plugin.Next(create, heldUntil(gate, csitest.Default()))
			first := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = "first" })
			if f.Wait(create, 1); tt.bound {
				late.Lock()
				defer late.Unlock()
			}
			close(gate)
			if tt.saved {
				f.saved(first)
			} else {
				f.held("vol-000001", true)
			}
			if tt.bound {
				_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(t.Context(), first.Name, types.MergePatchType,
					[]byte(`{"spec":{"volumeName":"pvc-`+string(first.UID)+`"}}`), metav1.PatchOptions{})
				f.Must(err)
				f.forgotten(first)
			}
			if tt.restart {
				f.Crash()
				f.start()
			}
			belongs := "which belongs to "
			if tt.rejected {
				belongs = "not deleted, because it belongs to "
			}
			f.Plugin.Always(create, csitest.Alter(func(r *csi.CreateVolumeResponse) {
				r.Volume.VolumeId = "vol-000001"
				if tt.rejected {
					r.Volume.CapacityBytes = 1
				}
			}))
			claim := f.claim(nil)
			f.event("ProvisioningFailed", belongs+tt.owner)
			f.Wait(create, 3) // it is tried again
			name := "pvc-" + string(claim.UID)
			if _, err := f.Client.CoreV1().PersistentVolumes().Get(t.Context(), name, metav1.GetOptions{}); err == nil {
				t.Errorf("PersistentVolume %q has the volume of another claim", name)
			}
			f.Calls(remove, 0)
		})
	}
	t.Run("volume_of_two_claims_at_once", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		gate := make(chan struct{})
		f.Plugin.Always(create, heldUntil(gate, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.VolumeId = "vol-000001" })))
		f.makeClass(nil)
		for _, name := range []string{"one", "two"} {
			f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = name })
		}
		f.Wait(create, 2)
		close(gate)
		f.event("ProvisioningFailed", `CreateVolume returned volume "vol-000001", which belongs to `, "the volume is not deleted")
		f.Wait(create, 4)
		volumes, err := f.Client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		f.Must(err)
		n := 0
		for _, pv := range volumes.Items {
			if pv.Spec.StorageClassName == f.class {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d PersistentVolumes", n)
		}
		f.Calls(remove, 0)
	})
	for name, tt := range map[string]struct {
		phase  corev1.PersistentVolumePhase
		policy corev1.PersistentVolumeReclaimPolicy
	}{
		"bound":     {corev1.VolumeBound, corev1.PersistentVolumeReclaimRetain},
		"bound_too": {corev1.VolumeBound, corev1.PersistentVolumeReclaimDelete},
		"available": {corev1.VolumeAvailable, corev1.PersistentVolumeReclaimDelete},
		"retained":  {corev1.VolumeReleased, corev1.PersistentVolumeReclaimRetain},
	} {
		t.Run("volume_that_another_PersistentVolume_names_is_not_deleted_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, patient)
			pv := f.volume(f.Namespace+"-a", corev1.VolumeBound, nil)
			other := f.second(pv, tt.phase, tt.policy)
			kubetest.Eventually(t, "the other volume is in the cache", func(context.Context) error {
				if cached, ok := f.c.volumes.Get(other.Name); !ok || cached.Status.Phase != tt.phase {
					return errors.New("it is not")
				}
				return nil
			})
			f.phase(pv, corev1.VolumeReleased)
			f.event("VolumeFailedDelete",
				fmt.Sprintf("PersistentVolume %q (%s, %s) names the same volume", other.Name, tt.phase, tt.policy),
				fmt.Sprintf("set the reclaim policy of PersistentVolume %q to Retain", pv.Name), "delete the other object first")
			f.Calls(remove, 0)
			f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), other.Name, metav1.DeleteOptions{}))
			f.patchVolume(other, `{"metadata":{"finalizers":null}}`)
			f.gone(pv) // without waiting for the back-off
			f.Calls(remove, 1)
		})
	}
	t.Run("volume_of_two_released_PersistentVolumes_is_deleted", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		pv := f.attachedVolume("attached")
		other := f.second(pv, corev1.VolumeBound, corev1.PersistentVolumeReclaimDelete)
		f.phase(pv, corev1.VolumeReleased)
		f.event("VolumeFailedDelete", "names the same volume")
		f.phase(other, corev1.VolumeReleased)
		f.volumesSettle()
		if n := len(f.deletions(pv)); n != 0 {
			t.Errorf("%d calls while the volume is attached", n)
		}
		f.Must(f.Client.StorageV1().VolumeAttachments().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		f.gone(pv)
		f.gone(other)
	})
	t.Run("volume_of_a_PersistentVolume_that_is_bound_again_is_not_deleted", func(t *testing.T) {
		f := newFixture(t, csitest.Config{}, oneWorker)
		late := f.lateVolumes()
		f.start()
		pv := f.attachedVolume("attached")
		other := f.volume(pv.Name+"-second", corev1.VolumeReleased, func(other *corev1.PersistentVolume) {
			other.Spec.CSI.VolumeHandle = pv.Spec.CSI.VolumeHandle
			other.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: "other.example.com"} // it is not reclaimed here
		})
		f.phase(pv, corev1.VolumeReleased)
		f.volumesSettle()
		late.Lock()
		defer late.Unlock()
		f.phase(other, corev1.VolumeBound)
		f.Must(f.Client.StorageV1().VolumeAttachments().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		f.event("VolumeFailedDelete", fmt.Sprintf("PersistentVolume %q (Bound, Delete) names the same volume", other.Name))
		if n := len(f.deletions(pv)); n != 0 {
			t.Errorf("%d calls", n)
		}
	})
}
