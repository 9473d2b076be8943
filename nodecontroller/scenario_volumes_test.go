package nodecontroller

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

func volumes(f *fixture) { f.cfg.NodeCleanup = CleanupVolumes }

// longRelease is volumes with a grace of released volumes that is over long after that of
// the missing node: both begin at the same time in most scenarios.
func longRelease(f *fixture) {
	volumes(f)
	f.cfg.NodeMissingGrace, f.cfg.PVReleaseGrace = time.Second, 5*time.Second
}

// afterRelease checks that the volume, which was released after begin, had its grace.
func (f *fixture) afterRelease(begin time.Time) {
	f.Helper()
	deletions := f.asked("DELETE persistentvolumes/pv-a")
	if len(deletions) == 0 || deletions[0].Sub(begin) < f.cfg.PVReleaseGrace-time.Second { // the API keeps whole seconds
		f.Errorf("deleted at %v, released after %v, want %v between", deletions, begin, f.cfg.PVReleaseGrace)
	}
}

// released is a volume of a node that is gone, whose claim is gone as well.
func (f *fixture) released(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	pv := f.volume("pv-a", []string{"n"}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: f.ns, Name: "a", UID: "gone"}
		pv.Finalizers = []string{provisionerFinalizer, pvProtection}
		if change != nil {
			change(pv)
		}
	})
	return f.phase(pv, corev1.VolumeReleased)
}

func (f *fixture) patchVolume(name, patch string) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumes().Patch(f.Context(), f.name(name), "application/merge-patch+json", []byte(patch), metav1.PatchOptions{})
	f.must(err)
}

func deletedWith(finalizers ...string) func(*corev1.PersistentVolume) bool {
	return func(pv *corev1.PersistentVolume) bool {
		return pv != nil && pv.DeletionTimestamp != nil && slices.Equal(pv.Finalizers, finalizers)
	}
}

func TestNodecontrollerScenarioVolumes(t *testing.T) {
	t.Run("048_force_removal", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		f.released(nil)
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumes/pv-a")
		f.start()
		f.untilVolume("pv-a", "has only its protection", deletedWith(pvProtection))
		f.afterRelease(begin)
		f.event("PersistentVolume", f.name("pv-a"), reasonForceRemoved, f.name("n"))
		f.event("Namespace", f.ns, reasonForceRemoved, f.name("pv-a"))
		f.patchVolume("pv-a", `{"metadata":{"finalizers":null}}`)
		f.untilVolume("pv-a", "is gone", func(pv *corev1.PersistentVolume) bool { return pv == nil })
	})
	t.Run("049_foreign_finalizer", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		f.released(func(pv *corev1.PersistentVolume) { pv.Finalizers = append(pv.Finalizers, "x.example.com/y") })
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumes/pv-a")
		f.start()
		f.untilVolume("pv-a", "has what is not ours", deletedWith(pvProtection, "x.example.com/y"))
		f.afterRelease(begin)
		f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, "x.example.com/y")
	})
	t.Run("050_attached", func(t *testing.T) {
		f := scenario(t, longRelease)
		begin := time.Now()
		pv := f.released(nil)
		va, err := f.client.StorageV1().VolumeAttachments().Create(t.Context(), &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: f.name("va")},
			Spec:       storagev1.VolumeAttachmentSpec{Attacher: f.driver, NodeName: f.name("n"), Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(pv.Name)}},
		}, metav1.CreateOptions{})
		f.must(err)
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumes/pv-a")
		f.start()
		f.event("PersistentVolume", pv.Name, reasonBlocked, va.Name)
		f.looks("pv-a")
		if f.getVolume("pv-a").DeletionTimestamp != nil {
			t.Error("it is deleted")
		}
		f.must(f.client.StorageV1().VolumeAttachments().Delete(t.Context(), va.Name, metav1.DeleteOptions{}))
		f.untilVolume("pv-a", "has only its protection", deletedWith(pvProtection))
		f.afterRelease(begin)
	})
	t.Run("051_claim_first", func(t *testing.T) {
		f := scenario(t, longRelease)
		var mu sync.Mutex
		var deleted []string
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodDelete {
				mu.Lock()
				deleted = append(deleted, r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:])
				mu.Unlock()
			}
			pass.ServeHTTP(w, r)
		})
		f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{provisionerFinalizer} }, nil)
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "DELETE persistentvolumes/pv-a")
		f.start()
		f.claimDeleted("a")
		f.passed(time.Now(), f.cfg.PVReleaseGrace)
		f.looks("pv-a")
		if f.getVolume("pv-a").DeletionTimestamp != nil {
			t.Error("the volume is deleted while its claim is there")
		}
		begin := time.Now()
		f.release("a")
		f.untilVolume("pv-a", "is deleted", func(pv *corev1.PersistentVolume) bool { return pv == nil || pv.DeletionTimestamp != nil })
		f.afterRelease(begin)
		mu.Lock()
		defer mu.Unlock()
		if !slices.Equal(deleted, []string{"a", f.name("pv-a")}) {
			t.Errorf("deleted %v", deleted)
		}
	})
	t.Run("052_static", func(t *testing.T) {
		unprovisioned := func(pv *corev1.PersistentVolume) { delete(pv.Annotations, storagehelpers.AnnDynamicallyProvisioned) }
		t.Run("untouched", func(t *testing.T) {
			f := scenario(t, volumes)
			pv := f.released(unprovisioned)
			f.onlyWrites()
			f.start()
			f.event("PersistentVolume", pv.Name, reasonSkipped, "--node-cleanup-static")
			f.staysFor(shortGrace, "pv-a", placeOrphan, pv)
		})
		t.Run("included", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { volumes(f); f.cfg.NodeCleanupStatic = true })
			f.released(unprovisioned)
			f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumes/pv-a")
			f.start()
			f.untilVolume("pv-a", "has only its protection", deletedWith(pvProtection))
		})
	})
	t.Run("053_node_returns_before_the_call", func(t *testing.T) {
		f := scenario(t, volumes)
		var armed, returned atomic.Bool
		var deletes atomic.Int32
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			switch {
			case r.Method == http.MethodDelete:
				deletes.Add(1)
			case armed.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumes/"+f.name("pv-a")) && returned.CompareAndSwap(false, true):
				f.node("n") // the decision is made, and its live reads begin
			}
			pass.ServeHTTP(w, r)
		})
		f.released(nil)
		f.onlyWrites("PATCH persistentvolumes/pv-a")
		f.start()
		f.untilVolume("pv-a", "is missing its node", f.isMissing)
		armed.Store(true)
		f.untilVolume("pv-a", "has no notes", func(pv *corev1.PersistentVolume) bool { return pv != nil && f.unnoted(pv) })
		if !returned.Load() || deletes.Load() > 0 {
			t.Errorf("the node returned: %t, deletions: %d", returned.Load(), deletes.Load())
		}
	})
	t.Run("054_retain", func(t *testing.T) {
		f := scenario(t, volumes)
		pv := f.released(func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		})
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, reasonSkipped, "Retain")
		f.staysFor(shortGrace, "pv-a", placeOrphan, pv)
	})
	t.Run("055_command", func(t *testing.T) {
		f := scenario(t, nil)
		api := f.recorded()
		f.onlyWrites("DELETE persistentvolumeclaims/a as a trial") // with the node, and for a plan
		request := CleanupRequest{Driver: f.driver, Node: f.name("n"), Volumes: true, Yes: true, Wait: time.Minute}
		f.node("n")
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{provisionerFinalizer, pvProtection} }, nil)
		var out strings.Builder
		if err := Cleanup(t.Context(), f.cfg, api, request, &out); !errors.Is(err, ErrRefused) {
			t.Errorf("with the node: %v", err)
		}
		f.untouched(pv, pvc)
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		if err := Cleanup(t.Context(), f.cfg, api, request, &out); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "CSINode "+f.name("n")) {
			t.Errorf("with the CSINode: %v", err)
		}
		f.untouched(pv, pvc)
		f.must(f.client.StorageV1().CSINodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		plan := request
		plan.Yes = false
		if err := Cleanup(t.Context(), f.cfg, api, plan, &out); !errors.Is(err, ErrRefused) || !strings.Contains(out.String(), "delete claim") {
			t.Errorf("the plan: %v, %q", err, &out)
		}
		plan.DryRun = true
		f.must(Cleanup(t.Context(), f.cfg, api, plan, &out))
		f.untouched(pv, pvc)
		f.checkWrites()
		f.onlyWrites("DELETE persistentvolumeclaims/a as a trial", "PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "DELETE persistentvolumes/pv-a")
		done := make(chan error, 1)
		go func() { done <- Cleanup(t.Context(), f.cfg, api, request, &out) }()
		f.claimDeleted("a")
		f.release("a")
		f.untilVolume("pv-a", "has only its protection", deletedWith(pvProtection))
		if err := <-done; err != nil {
			t.Errorf("%v\n%s", err, &out)
		}
		f.event("PersistentVolume", pv.Name, reasonForceRemoved, f.name("n"))
	})
}
