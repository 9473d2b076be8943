// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizenudge

import (
	"encoding/json"
	"net/http"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestNodecontrollerScenarioNudge(t *testing.T) {
	t.Run("062_once_per_transition", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		since := time.Now().Add(-time.Minute)
		f.Grow("c", since)
		first := f.nudged("a", since)
		f.PatchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.Unchanged(first)
		// The clock of the writer is ahead of ours.
		later := time.Now().Add(time.Hour)
		f.Grow("c", later)
		second := f.nudged("a", later.Truncate(time.Second))
		f.PatchClaim("c", `{"metadata":{"labels":{"a":"c"}}}`)
		f.settles()
		f.Unchanged(second)
		f.Requested("PATCH pods/a", "PATCH pods/a")
		f.Counted(f.c.nudges.WithLabelValues("ok"), 4) // with those of settles
	})
	t.Run("062_only_what_is_told_after_the_transition", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		since := time.Now().Add(-time.Minute).Truncate(time.Second)
		told := func(at time.Time) func(*corev1.Pod) {
			return func(p *corev1.Pod) {
				p.Annotations = map[string]string{f.cfg.Annotation: at.UTC().Format(time.RFC3339Nano)}
			}
		}
		after := f.Pod("after", "c", "n", told(since.Add(time.Nanosecond)))
		f.Pod("at", "c", "n", told(since))
		f.Pod("before", "c", "n", told(since.Add(-time.Nanosecond)))
		f.Grow("c", since)
		f.nudged("at", since)
		f.nudged("before", since)
		f.settles()
		f.Unchanged(after)
		f.Requested("PATCH pods/at", "PATCH pods/before")
	})
	t.Run("062_status_without_condition", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		status := func(s string) {
			f.PatchClaim("c", `{"status":{"allocatedResources":{"storage":"2Gi"},"allocatedResourceStatuses":{"storage":"`+s+`"}}}`,
				"status")
		}
		status("NodeResizePending")
		first := f.nudged("a", time.Time{})
		f.PatchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.Unchanged(first)
		status("NodeResizeInProgress")
		f.settles()
		f.Unchanged(first)
		at, err := time.Parse(time.RFC3339Nano, first.Annotations[f.cfg.Annotation])
		f.Must(err)
		status("NodeResizePending")
		f.nudged("a", at)
		f.Requested("PATCH pods/a", "PATCH pods/a")
	})
	t.Run("062_the_kubelet_has_begun", func(t *testing.T) {
		f := newFixture(t, nil)
		for name, status := range map[string]string{"c": "NodeResizeInProgress", "d": "NodeResizeInfeasible"} {
			f.Bound(name, f.Driver)
			f.PatchClaim(name, `{"status":{"allocatedResources":{"storage":"2Gi"},"allocatedResourceStatuses":{"storage":"`+status+`"}}}`,
				"status")
			f.Grow(name, time.Now())
		}
		c, d := f.Pod("c", "c", "n", nil), f.Pod("d", "d", "n", nil)
		f.settles()
		f.Unchanged(c, d)
		f.Requested()
	})
	t.Run("062_not_again_after_a_restart", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		f.Grow("c", time.Now())
		first := f.nudged("a", time.Time{})
		f.Stop()
		f.start()
		f.settles()
		f.Unchanged(first)
	})
	t.Run("062_retried", func(t *testing.T) {
		f := newFixture(t, nil)
		var fails atomic.Bool
		fails.Store(true)
		f.On(func(w http.ResponseWriter, r *http.Request) bool {
			code := map[string]int{"a": http.StatusInternalServerError, "d": http.StatusConflict}[path.Base(r.URL.Path)]
			if code == 0 || !fails.Load() {
				return false
			}
			http.Error(w, "refused by the test", code)
			return true
		})
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		f.Bound("d", f.Driver)
		f.Pod("d", "d", "n", nil)
		f.Grow("d", time.Now())
		f.Pod("b", "c", "n", nil)
		f.Grow("c", time.Now())
		b := f.nudged("b", time.Time{}) // although a fails
		f.Counted(f.c.nudges.WithLabelValues("error"), 1)
		f.Counted(f.c.nudges.WithLabelValues("conflict"), 1)
		fails.Store(false)
		f.nudged("a", time.Time{})
		f.nudged("d", time.Time{})
		f.settles()
		f.Unchanged(b)
	})
	t.Run("062_a_pod_that_is_scheduled_later", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "", nil)
		f.Grow("c", time.Now())
		f.settles()
		f.Requested()
		f.Must(f.Client.CoreV1().Pods(f.Namespace).Bind(t.Context(),
			&corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n"}},
			metav1.CreateOptions{}))
		f.nudged("a", time.Time{})
	})
	t.Run("062_a_pod_that_was_deleted", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		remove := func(name string) {
			f.Must(f.Client.CoreV1().Pods(f.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
		}
		var removed, replaced atomic.Bool
		f.On(func(_ http.ResponseWriter, r *http.Request) bool {
			switch {
			case strings.HasSuffix(r.URL.Path, "/a") && removed.CompareAndSwap(false, true):
				remove("a")
			case strings.HasSuffix(r.URL.Path, "/b") && replaced.CompareAndSwap(false, true):
				remove("b")
				f.Pod("b", "c", "", nil)
			}
			return false
		})
		f.Pod("a", "c", "n", nil)
		f.Pod("b", "c", "n", nil)
		f.Grow("c", time.Now())
		f.Counted(f.c.nudges.WithLabelValues("gone"), 1)
		f.Counted(f.c.nudges.WithLabelValues("conflict"), 1)
		f.settles()
		f.Requested("PATCH pods/a", "PATCH pods/b")
		f.Counted(f.c.nudges.WithLabelValues("error"), 0)
		if b := f.PodNow("b"); b.Annotations[f.cfg.Annotation] != "" {
			t.Error("another pod of the name was annotated")
		}
	})
	t.Run("062_once_although_the_cache_is_behind", func(t *testing.T) {
		var behind sync.RWMutex
		f := newFixture(t, func(f *fixture) {
			f.Watch = kubetest.Proxy(f.T, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if strings.HasSuffix(r.URL.Path, "/pods") {
					w = kubetest.GatedWriter{ResponseWriter: w, Gate: behind.RLocker()}
				}
				pass.ServeHTTP(w, r)
			})
		})
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		f.Grow("c", time.Now())
		f.nudged("a", time.Time{})
		f.Bound("last-z", f.Driver)
		f.Pod("last-z", "last-z", "n", nil)
		f.Grow("last-z", time.Now())
		f.nudged("last-z", time.Time{})
		behind.Lock()
		defer behind.Unlock()
		later := time.Now().Add(time.Hour)
		f.Grow("c", later)
		second := f.nudged("a", later.Truncate(time.Second))
		f.PatchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.Grow("last-z", later)
		f.nudged("last-z", later.Truncate(time.Second)) // after c
		f.Unchanged(second)
		f.Requested("PATCH pods/a", "PATCH pods/a")
	})
	t.Run("062_without_permission", func(t *testing.T) {
		f := newFixture(t, func(f *fixture) { f.User = f.ControlPlane.UserConfig(f, f.Namespace) })
		f.Bound("c", f.Driver)
		f.Grow("c", time.Now())
		f.Pod("a", "c", "n", nil)
		if message := f.HasEvent("PersistentVolumeClaim", "c", "NodeCleanupBlocked"); !strings.Contains(message,
			"Grant patch on pods") {
			t.Errorf("the event says %q", message)
		}
		f.Counted(f.c.nudges.WithLabelValues("forbidden"), 1)
		f.Grant(f.Namespace, []string{"pods"}, "patch")
		f.nudged("a", time.Time{})
	})
	t.Run("062_ephemeral_volume", func(t *testing.T) {
		f := newFixture(t, nil)
		a := f.Pod("a", "", "n", func(pod *corev1.Pod) {
			pod.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: f.ClaimSpec()}}}
		})
		f.Claim("a-v", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Spec.VolumeName = f.Namespace + "-a-v"
			pvc.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(a, corev1.SchemeGroupVersion.WithKind("Pod"))}
		})
		f.Volume("a-v", "a-v", f.Driver)
		f.Grow("a-v", time.Now())
		f.nudged("a", time.Time{})
	})
	t.Run("063_who_is_nudged", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver) // of a class that does not exist
		f.Bound("foreign", "other.example.com")
		f.Claim("going", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Spec.VolumeName = f.Namespace + "-going"
			pvc.Finalizers = []string{"x/y"}
		})
		f.Volume("going", "going", f.Driver)
		f.DeleteClaim("going")
		f.Pod("garbage", "c", "n", func(p *corev1.Pod) { p.Annotations = map[string]string{f.cfg.Annotation: "garbage"} })
		succeeded := f.Pod("succeeded", "c", "n", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
		failed := f.Pod("failed", "c", "n", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
		unscheduled := f.Pod("unscheduled", "c", "", nil)
		foreign := f.Pod("foreign", "foreign", "n", nil)
		going := f.Pod("going", "going", "n", nil)
		for _, name := range []string{"foreign", "going", "c"} {
			f.Grow(name, time.Now())
		}
		f.nudged("garbage", time.Time{})
		f.settles()
		f.Unchanged(succeeded, failed, unscheduled, foreign, going)
		f.Requested("PATCH pods/garbage")
	})
	t.Run("063_terminating", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		f.Pod("a", "c", "n", nil)
		f.Must(f.Client.CoreV1().Pods(f.Namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}))
		a := f.PodNow("a")
		f.settles() // the watch has delivered the deletion
		f.Grow("c", time.Now())
		f.settles()
		f.Unchanged(a)
		f.Requested()
	})
	t.Run("063_volume_not_known_yet", func(t *testing.T) {
		f := newFixture(t, nil)
		unowned := func(name string) {
			f.Claim(name, func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.Namespace + "-" + name })
			f.Grow(name, time.Now())
			f.Pod(name, name, "n", nil)
		}
		unowned("c")
		f.settles()
		f.Requested()
		f.Volume("c", "c", f.Driver)
		f.nudged("c", time.Time{})
		f.Class() // decides if the volume is not known
		unowned("d")
		f.nudged("d", time.Time{})
	})
	t.Run("064_a_patch_and_nothing_more", func(t *testing.T) {
		f := newFixture(t, nil)
		f.Bound("c", f.Driver)
		before := f.Pod("a", "c", "n", func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
			p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
			p.Finalizers = []string{"x/y"}
		})
		f.Grow("c", time.Now())
		after := f.nudged("a", time.Time{})
		f.Must(f.Client.CoreV1().Pods(f.Namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}))
		value := after.Annotations[f.cfg.Annotation]
		delete(after.Annotations, f.cfg.Annotation)
		after.ResourceVersion, after.ManagedFields, before.ManagedFields = before.ResourceVersion, nil, nil
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("more was changed:\n%s", diff)
		}
		// The API server keeps fields that the body does not have, also those unknown to this library.
		requests := f.Requests()
		if len(requests) != 1 || requests[0].ContentType != "application/merge-patch+json" {
			t.Fatalf("the requests were %+v", requests)
		}
		var body map[string]any
		f.Must(json.Unmarshal([]byte(requests[0].Body), &body))
		want := map[string]any{"metadata": map[string]any{"uid": string(before.UID),
			"annotations": map[string]any{f.cfg.Annotation: value}}}
		if diff := cmp.Diff(want, body); diff != "" {
			t.Errorf("the body was otherwise:\n%s", diff)
		}
	})
}
