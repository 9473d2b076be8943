// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

const volumeA = "persistentvolumes/pv-a"

func volumes(f *fixture) { f.cfg.NodeCleanup = ModeVolumes }

// longRelease sets mode volumes and a grace of released volumes that ends long after the other one: both
// begin at the same time in most scenarios.
func longRelease(f *fixture) {
	volumes(f)
	f.cfg.NodeMissingGrace, f.cfg.PVReleaseGrace = time.Second, 5*time.Second
}

// afterRelease checks that the volume, which was released after begin, had its grace.
func (f *fixture) afterRelease(begin time.Time) {
	f.Helper()
	deletions := f.asked("DELETE " + volumeA)
	if len(deletions) == 0 || deletions[0].Sub(begin) < f.cfg.PVReleaseGrace-time.Second { // the API stores whole seconds
		f.Errorf("deleted at %v, released after %v, want %v between", deletions, begin, f.cfg.PVReleaseGrace)
	}
}

// deletedWith accepts a volume that is being deleted and has exactly these finalizers.
func deletedWith(finalizers ...string) func(*corev1.PersistentVolume) bool {
	return func(pv *corev1.PersistentVolume) bool {
		return pv != nil && pv.DeletionTimestamp != nil && slices.Equal(pv.Finalizers, finalizers)
	}
}

func unprovisioned(pv *corev1.PersistentVolume) {
	delete(pv.Annotations, storagehelpers.AnnDynamicallyProvisioned)
}

// attach creates a VolumeAttachment of volume a to node n.
func (f *fixture) attach() *storagev1.VolumeAttachment {
	f.Helper()
	va, err := f.client.StorageV1().VolumeAttachments().Create(f.Context(), &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: f.name("va")},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: f.driver, NodeName: f.name("n"),
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.name("pv-a"))},
		},
	}, metav1.CreateOptions{})
	f.must(err)
	return va
}

func TestNodecontrollerScenarioVolumes(t *testing.T) {
	t.Parallel()
	t.Run("048_force_removal", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		f.released("a", "n", nil)
		f.onlyWrites("PATCH "+volumeA, "DELETE "+volumeA)
		f.start()
		f.untilVolume("pv-a", "has only its protection", deletedWith(protectionOfVolumes))
		f.afterRelease(begin)
		f.event("PersistentVolume", f.name("pv-a"), "NodeVolumeForceRemoved", f.name("n"))
		f.event("Namespace", f.ns, "NodeVolumeForceRemoved", f.name("pv-a"))
		_, err := f.client.CoreV1().PersistentVolumes().Patch(t.Context(), f.name("pv-a"), types.MergePatchType,
			[]byte(noFinalizers), metav1.PatchOptions{})
		f.must(err)
		f.untilVolume("pv-a", "is deleted", func(pv *corev1.PersistentVolume) bool { return pv == nil })
	})
	t.Run("049_foreign_finalizer", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		f.released("a", "n", func(pv *corev1.PersistentVolume) { pv.Finalizers = append(pv.Finalizers, "x.example.com/y") })
		f.onlyWrites("PATCH "+volumeA, "DELETE "+volumeA)
		f.start()
		f.untilVolume("pv-a", "keeps foreign finalizers", deletedWith(protectionOfVolumes, "x.example.com/y"))
		f.afterRelease(begin)
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupBlocked", "x.example.com/y")
	})
	t.Run("050_attached", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		pv := f.released("a", "n", nil)
		va := f.attach()
		f.onlyWrites("PATCH "+volumeA, "DELETE "+volumeA)
		f.start()
		f.event("PersistentVolume", pv.Name, "NodeCleanupBlocked", va.Name)
		f.stays(shortGrace, pv)
		f.must(f.client.StorageV1().VolumeAttachments().Delete(t.Context(), va.Name, metav1.DeleteOptions{}))
		f.untilVolume("pv-a", "has only its protection", deletedWith(protectionOfVolumes))
		f.afterRelease(begin)
	})
	t.Run("051_claim_first", func(t *testing.T) {
		f := scenario(t, longRelease)
		pv, _ := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{provisionerFinalizer} }, nil)
		f.onlyWrites("PATCH "+volumeA, "DELETE "+claimA, "DELETE "+volumeA)
		f.start()
		f.claimDeleted("a")
		f.stays(f.cfg.PVReleaseGrace, pv)
		begin := time.Now()
		f.release("a")
		f.untilVolume("pv-a", "is deleted", func(pv *corev1.PersistentVolume) bool { return pv == nil || pv.DeletionTimestamp != nil })
		f.afterRelease(begin)
		if claim, volume := f.asked("DELETE "+claimA), f.asked("DELETE "+volumeA); len(claim) != 1 || !claim[0].Before(volume[0]) {
			t.Errorf("the claim was deleted at %v, the volume at %v", claim, volume)
		}
	})
	t.Run("052_static", func(t *testing.T) {
		f := scenario(t, volumes)
		pv := f.released("a", "n", unprovisioned)
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, "NodeCleanupSkipped", "has not provisioned it")
		f.stays(2*shortGrace, pv)
	})
	t.Run("053_node_returns_before_the_call", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { volumes(f); f.cfg.PVReleaseGrace = 3 * shortGrace })
		// The node returns with the last live read of the volume, whenever that is: the deletion must follow a
		// later read of the nodes. The API server has the last word on the volume, not on the node.
		var armed, returned atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if armed.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/"+f.name("pv-a")) &&
				returned.CompareAndSwap(false, true) {
				f.node("n")
			}
			pass.ServeHTTP(w, r)
		})
		pv := f.released("a", "n", nil)
		f.onlyWrites()
		f.start()
		f.missing("n")
		armed.Store(true)
		f.noRecord("n")
		f.stays(shortGrace, pv)
		if !returned.Load() {
			t.Error("the volume was not read before the decision")
		}
	})
	t.Run("054_retain", func(t *testing.T) {
		f := scenario(t, volumes)
		pv := f.released("a", "n", retained)
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, "NodeCleanupSkipped", "Retain")
		f.stays(2*shortGrace, pv)
	})
	t.Run("055_approve_all", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { volumes(f); f.cfg.NodeCleanupScope, f.cfg.NodeMissingGrace = ScopeOptIn, time.Hour })
		f.bound("a", "n")
		kept, claim := f.boundTo("b", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.optOut] = disabled })
		shared, both := f.boundTo("c", []string{"n", "m"}, nil, nil)
		optedOut, ofOptedOut := f.boundTo("d", []string{"o"}, nil, nil)
		pv := f.getVolume("pv-a")
		f.onlyWrites("PATCH "+volumeA, "DELETE "+claimA, "DELETE "+volumeA)
		f.start()
		f.missing("n")
		f.missing("m")
		f.missing("o")
		f.changeRecords(func(cm *corev1.ConfigMap) { // by a person
			cm.Data[f.name("o")] = `{"optedOut":true,` + strings.TrimPrefix(cm.Data[f.name("o")], "{")
		})
		f.approve("n") // does not agree
		f.event("PersistentVolume", pv.Name, "NodeCleanupSkipped", "neither its StorageClass nor its claim")
		request := ApproveRequest{Driver: f.driver, Namespace: f.ns, Nodes: []string{f.name("n"), f.name("o")}, All: true}
		var plan strings.Builder
		f.must(Approve(t.Context(), f.cfg, f.client, request, &plan))
		if text := plan.String(); !strings.Contains(text, "claim "+f.ns+"/a\n") || strings.Count(text, "claim ") != 1 {
			t.Errorf("the plan is %s", text)
		}
		f.untouched(pv, kept, claim, shared, both, optedOut, ofOptedOut)
		request.Yes = true
		f.must(retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller may write its records
			return Approve(t.Context(), f.cfg, f.client, request, &strings.Builder{})
		}))
		f.claimDeleted("a")
		f.release("a")
		f.untilVolume("pv-a", "is deleted", func(pv *corev1.PersistentVolume) bool { return pv == nil || pv.DeletionTimestamp != nil })
		f.stays(shortGrace, kept, claim, shared, both, optedOut, ofOptedOut)
		f.node("n")
		f.untilRecord("n", "does not agree to the next loss", func(n *LostNode) bool { return n == nil || !n.ApprovedAll })
	})
}
