// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pvcfinalizer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/claimtest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// strip selects the mode strip with two obsolete finalizers, named like those of TopoLVM.
func strip(f *fixture) {
	f.cfg.Mode = ModeStrip
	f.cfg.Obsolete = []string{f.Namespace + ".topolvm.io/pvc", f.Namespace + ".topolvm.cybozu.com/pvc"}
}

func (f *fixture) obsolete(i int) string { return f.cfg.Obsolete[i] }

// enforce selects the mode enforce.
func enforce(f *fixture) {
	f.cfg.Mode, f.cfg.Obsolete = ModeEnforce, []string{f.Namespace + ".topolvm.cybozu.com/pvc"}
}

func TestNodecontrollerScenarioStrip(t *testing.T) {
	t.Run("056_strip", func(t *testing.T) {
		f := newFixture(t, strip)
		f.Claim("c", withFinalizers("dummy/dummy", f.obsolete(1), f.obsolete(0), f.obsolete(0)))
		f.HasFinalizers("c", "dummy/dummy", claimtest.PVCProtection)
		f.settles()
		f.Requested("PATCH persistentvolumeclaims/c")
		f.Counted(f.c.actions.WithLabelValues(actionStrip, "ok"), 2) // with the claim that settles makes
	})
	t.Run("056_strip_at_start_and_of_claims_being_deleted", func(t *testing.T) {
		f := newFixture(t, strip)
		f.Stop()
		f.Claim("stays", withFinalizers(f.obsolete(0)))
		f.Claim("goes", withFinalizers(f.obsolete(1), f.obsolete(0)))
		f.DeleteClaim("goes")
		f.Unprotect("goes")
		f.start()
		f.HasFinalizers("stays", claimtest.PVCProtection)
		f.ClaimGone("goes")
	})
	t.Run("056_strip_again_in_the_next_term", func(t *testing.T) {
		f := newFixture(t, strip)
		f.settles()
		f.Lose()
		f.Claim("c", withFinalizers(f.obsolete(0)))
		f.Lead()
		f.HasFinalizers("c", claimtest.PVCProtection)
	})
	t.Run("056_strip_despite_a_conflict", func(t *testing.T) {
		f := newFixture(t, strip)
		var once sync.Once
		f.On(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/c") {
				once.Do(func() {
					f.PatchClaim("c", fmt.Sprintf(`{"metadata":{"finalizers":["x/y",%q,%q]}}`, f.obsolete(0), claimtest.PVCProtection))
				})
			}
			return false
		})
		f.Claim("c", withFinalizers(f.obsolete(0)))
		f.HasFinalizers("c", "x/y", claimtest.PVCProtection)
		f.settles()
		f.Requested("PATCH persistentvolumeclaims/c", "GET persistentvolumeclaims/c", "PATCH persistentvolumeclaims/c")
	})
	t.Run("056_strip_retried", func(t *testing.T) {
		f := newFixture(t, strip)
		var failures atomic.Int32
		f.On(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPatch || failures.Add(1) > 2 {
				return false
			}
			http.Error(w, "refused by the test", http.StatusInternalServerError)
			return true
		})
		f.Claim("c", withFinalizers(f.obsolete(0)))
		f.HasFinalizers("c", claimtest.PVCProtection)
		f.Counted(f.c.actions.WithLabelValues(actionStrip, "error"), 2)
	})
	t.Run("056_strip_after_a_timeout", func(t *testing.T) {
		f := newFixture(t, func(f *fixture) { strip(f); f.cfg.Timeout = 200 * time.Millisecond })
		var first atomic.Bool
		f.On(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPatch || !first.CompareAndSwap(false, true) {
				return false
			}
			<-r.Context().Done()
			return true
		})
		f.Claim("c", withFinalizers(f.obsolete(0)))
		f.HasFinalizers("c", claimtest.PVCProtection)
	})
	t.Run("056_strip_without_permission", func(t *testing.T) {
		f := newFixture(t, func(f *fixture) { strip(f); f.User = f.ControlPlane.UserConfig(f, f.Namespace) })
		f.Claim("c", withFinalizers(f.obsolete(0)))
		message := f.HasEvent("PersistentVolumeClaim", "c", "NodeCleanupBlocked")
		if !strings.Contains(message, "forbidden") || !strings.Contains(message, "Grant patch on persistentvolumeclaims") {
			t.Errorf("the event says %q", message)
		}
		f.Counted(f.c.actions.WithLabelValues(actionStrip, "forbidden"), 1)
		f.Grant(f.Namespace, []string{"persistentvolumeclaims"}, "patch")
		f.HasFinalizers("c", claimtest.PVCProtection)
	})
	t.Run("057_nothing_to_strip", func(t *testing.T) {
		f := newFixture(t, strip)
		before := f.Claim("c", withFinalizers("dummy/dummy", f.cfg.Finalizer))
		f.PatchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.Requested()
		if now := f.GetClaim("c"); !slices.Equal(now.Finalizers, before.Finalizers) {
			t.Errorf("finalizers %v", now.Finalizers)
		}
	})
	t.Run("057_pods_are_not_watched", func(t *testing.T) {
		var mu sync.Mutex
		var watched []string
		f := newFixture(t, func(f *fixture) {
			strip(f)
			f.Watch = kubetest.Proxy(f.T, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				mu.Lock()
				watched = append(watched, r.URL.Path)
				mu.Unlock()
				pass.ServeHTTP(w, r)
			})
		})
		f.settles()
		mu.Lock()
		defer mu.Unlock()
		slices.Sort(watched)
		if got := slices.Compact(watched); !slices.Equal(got, []string{"/api/v1/persistentvolumeclaims"}) {
			t.Errorf("watched %v", got)
		}
	})
}

func TestNodecontrollerScenarioEnforce(t *testing.T) {
	t.Run("058_all_pods", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("c", withFinalizers(f.cfg.Finalizer))
		f.Claim("d", withFinalizers(f.cfg.Finalizer))
		f.Pod("a", "c", f.Node("n"), nil)
		b := f.Pod("b", "d", f.Namespace+"-n", nil)
		f.DeleteClaim("c")
		f.PodDeleted("a")
		if a := f.PodNow("a"); a == nil || a.DeletionGracePeriodSeconds == nil || *a.DeletionGracePeriodSeconds != 1 {
			t.Errorf("pod a is %+v", a)
		}
		f.settles()
		f.Unchanged(b)
		f.HasFinalizers("c", f.cfg.Finalizer, claimtest.PVCProtection)
		f.Unprotect("c")
		f.ClaimGone("c")
		f.HasFinalizers("d", f.cfg.Finalizer, claimtest.PVCProtection)
		f.Requested("GET persistentvolumeclaims/c", "GET pods/a", "DELETE pods/a", "PATCH persistentvolumeclaims/c")
		if message := f.HasEvent("Pod", "a", reasonPodDeleted); !strings.Contains(message, "PersistentVolumeClaim c ") {
			t.Errorf("the event says %q", message)
		}
	})
	t.Run("058_a_claim_without_the_finalizer", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("c", nil)
		a := f.Pod("a", "c", "n", nil)
		f.DeleteClaim("c")
		f.settles()
		f.Unchanged(a)
		f.Requested()
	})
	t.Run("058_a_pod_that_comes_later", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("c", withFinalizers(f.cfg.Finalizer))
		f.DeleteClaim("c")
		f.settles()
		f.Pod("a", "c", "n", nil)
		f.PodDeleted("a")
	})
	t.Run("058_another_claim_of_the_name", func(t *testing.T) {
		f := newFixture(t, enforce)
		// After the claim was cached, it is deleted by force and recreated.
		var once sync.Once
		f.On(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/c") {
				once.Do(func() {
					f.PatchClaim("c", `{"metadata":{"finalizers":null}}`)
					f.Claim("c", withFinalizers(f.cfg.Finalizer))
				})
			}
			return false
		})
		f.Claim("c", withFinalizers(f.cfg.Finalizer))
		a := f.Pod("a", "c", "n", nil)
		f.DeleteClaim("c")
		kubetest.Eventually(t, "the claim is read", func(context.Context) error {
			if len(f.Requests()) == 0 {
				return errors.New("it is not")
			}
			return nil
		})
		f.settles()
		f.Unchanged(a)
		f.Requested("GET persistentvolumeclaims/c")
		if f.GetClaim("c").DeletionTimestamp != nil {
			t.Error("the new claim is being deleted")
		}
	})
	t.Run("058_another_pod_of_the_name", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("d", nil)
		var once sync.Once
		f.On(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodDelete {
				once.Do(func() {
					f.Must(f.Client.CoreV1().Pods(f.Namespace).Delete(t.Context(), "a",
						metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
					f.Pod("a", "d", "n", nil)
				})
			}
			return false
		})
		f.Claim("c", withFinalizers(f.cfg.Finalizer))
		f.Pod("a", "c", "n", nil)
		f.DeleteClaim("c")
		f.Counted(f.c.actions.WithLabelValues(actionDeletePod, "conflict"), 1)
		f.settles()
		if a := f.PodNow("a"); a == nil || a.DeletionTimestamp != nil {
			t.Errorf("pod a is %+v", a)
		}
	})
	t.Run("058_without_permission", func(t *testing.T) {
		f := newFixture(t, func(f *fixture) {
			enforce(f)
			f.User = f.ControlPlane.UserConfig(f, f.Namespace)
			f.Grant(f.Namespace, []string{"persistentvolumeclaims", "pods"}, "get", "patch")
		})
		f.Claim("c", withFinalizers(f.cfg.Finalizer))
		a := f.Pod("a", "c", "n", nil)
		f.DeleteClaim("c")
		if message := f.HasEvent("PersistentVolumeClaim", "c", "NodeCleanupBlocked"); !strings.Contains(message, "forbidden") ||
			!strings.Contains(message, f.Namespace+"/a") {
			t.Errorf("the event says %q", message)
		}
		f.Unchanged(a)
		f.Grant(f.Namespace+"-more", []string{"pods"}, "delete")
		f.PodDeleted("a")
	})
	t.Run("060_finalizer_twice", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("c", withFinalizers(f.cfg.Finalizer, f.cfg.Finalizer))
		f.Unprotect("c")
		f.DeleteClaim("c")
		f.ClaimGone("c")
		f.settles()
		f.Requested("PATCH persistentvolumeclaims/c")
	})
	t.Run("060_with_an_obsolete_one", func(t *testing.T) {
		f := newFixture(t, enforce)
		f.Claim("c", withFinalizers(f.cfg.Finalizer, f.obsolete(0), f.cfg.Finalizer))
		f.HasFinalizers("c", f.cfg.Finalizer, f.cfg.Finalizer, claimtest.PVCProtection)
		f.DeleteClaim("c")
		f.Unprotect("c")
		f.ClaimGone("c")
	})
	t.Run("061_ephemeral_volume", func(t *testing.T) {
		f := newFixture(t, enforce)
		ephemeral := func(pod *corev1.Pod) {
			pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: f.ClaimSpec()},
			}}}}
		}
		mine := f.Pod("mine", "", "n", ephemeral)
		other := f.Pod("other", "", "n", ephemeral)
		f.Claim("mine-v", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Finalizers = []string{f.cfg.Finalizer}
			pvc.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(mine, corev1.SchemeGroupVersion.WithKind("Pod"))}
		})
		f.Claim("other-v", withFinalizers(f.cfg.Finalizer)) // not controlled by the pod
		f.DeleteClaim("other-v")
		f.DeleteClaim("mine-v")
		f.PodDeleted("mine")
		f.settles()
		f.Unchanged(other)
	})
}
