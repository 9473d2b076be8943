package nodecontroller

import (
	"encoding/json"
	"net/http"
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

func nudge(f *claimsFixture) { f.cfg.Workers, f.cfg.ResizeNudge = 1, true }

func TestNodecontrollerScenarioClaimsNudge(t *testing.T) {
	t.Run("062_once_per_transition", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		since := time.Now().Add(-time.Minute)
		f.grow("c", since)
		first := f.nudged("a", since)
		f.patchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.unchanged(first)
		// The clock of who wrote this is ahead of ours.
		later := time.Now().Add(time.Hour)
		f.grow("c", later)
		second := f.nudged("a", later.Truncate(time.Second))
		f.patchClaim("c", `{"metadata":{"labels":{"a":"c"}}}`)
		f.settles()
		f.unchanged(second)
		f.askedExactly("PATCH pods/a", "PATCH pods/a")
		f.nudgesCounted("ok", 4) // with those of settles
	})
	t.Run("062_only_what_is_told_after_the_transition", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		since := time.Now().Add(-time.Minute).Truncate(time.Second)
		told := func(at time.Time) func(*corev1.Pod) {
			return func(p *corev1.Pod) {
				p.Annotations = map[string]string{f.cfg.ResizeAnnotation: at.UTC().Format(time.RFC3339Nano)}
			}
		}
		after := f.pod("after", "c", "n", told(since.Add(time.Nanosecond)))
		f.pod("at", "c", "n", told(since))
		f.pod("before", "c", "n", told(since.Add(-time.Nanosecond)))
		f.grow("c", since)
		f.nudged("at", since)
		f.nudged("before", since)
		f.settles()
		f.unchanged(after)
		f.askedExactly("PATCH pods/at", "PATCH pods/before")
	})
	t.Run("062_status_without_condition", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		status := func(s string) {
			f.patchClaim("c", `{"status":{"allocatedResources":{"storage":"2Gi"},"allocatedResourceStatuses":{"storage":"`+s+`"}}}`, "status")
		}
		status("NodeResizePending")
		first := f.nudged("a", time.Time{})
		f.patchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.unchanged(first)
		status("NodeResizeInProgress")
		f.settles()
		f.unchanged(first)
		at, err := time.Parse(time.RFC3339Nano, first.Annotations[f.cfg.ResizeAnnotation])
		f.must(err)
		status("NodeResizePending")
		f.nudged("a", at)
		f.askedExactly("PATCH pods/a", "PATCH pods/a")
	})
	t.Run("062_the_kubelet_has_begun", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		for name, status := range map[string]string{"c": "NodeResizeInProgress", "d": "NodeResizeInfeasible"} {
			f.bound(name, f.driver)
			f.patchClaim(name, `{"status":{"allocatedResources":{"storage":"2Gi"},"allocatedResourceStatuses":{"storage":"`+status+`"}}}`, "status")
			f.grow(name, time.Now())
		}
		c, d := f.pod("c", "c", "n", nil), f.pod("d", "d", "n", nil)
		f.settles()
		f.unchanged(c, d)
		f.askedExactly()
	})
	t.Run("062_not_again_after_a_restart", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		f.grow("c", time.Now())
		first := f.nudged("a", time.Time{})
		f.stop()
		f.start()
		f.settles()
		f.unchanged(first)
	})
	t.Run("062_through_an_api_server_that_fails", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		var fails atomic.Bool
		fails.Store(true)
		f.on(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "/a") || !fails.Load() {
				return false
			}
			http.Error(w, "refused by the test", http.StatusInternalServerError)
			return true
		})
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		f.pod("b", "c", "n", nil)
		f.grow("c", time.Now())
		b := f.nudged("b", time.Time{}) // which does not wait for the other one
		f.some(f.c.metrics.nudges.WithLabelValues("error"))
		fails.Store(false)
		f.nudged("a", time.Time{})
		f.settles()
		f.unchanged(b)
	})
	t.Run("062_a_pod_that_is_scheduled_later", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		f.pod("a", "c", "", nil)
		f.grow("c", time.Now())
		f.settles()
		f.askedExactly()
		f.must(f.client.CoreV1().Pods(f.ns).Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}, metav1.CreateOptions{}))
		f.nudged("a", time.Time{})
	})
	t.Run("062_a_pod_that_is_gone", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		remove := func(name string) {
			f.must(f.client.CoreV1().Pods(f.ns).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
		}
		var removed, replaced atomic.Bool
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			switch {
			case strings.HasSuffix(r.URL.Path, "/a") && removed.CompareAndSwap(false, true):
				remove("a")
			case strings.HasSuffix(r.URL.Path, "/b") && replaced.CompareAndSwap(false, true):
				remove("b")
				f.pod("b", "c", "", nil)
			}
			return false
		})
		f.pod("a", "c", "n", nil)
		f.pod("b", "c", "n", nil)
		f.grow("c", time.Now())
		f.settles()
		f.askedExactly("PATCH pods/a", "PATCH pods/b")
		f.nudgesCounted("gone", 1)
		f.nudgesCounted("conflict", 1)
		f.nudgesCounted("error", 0)
		if b := f.podNow("b"); b.Annotations[f.cfg.ResizeAnnotation] != "" {
			t.Error("another pod of the name was annotated")
		}
	})
	t.Run("062_once_although_the_cache_is_behind", func(t *testing.T) {
		var behind watchGate
		f := newClaimsFixture(t, func(f *claimsFixture) {
			strip(f) // by which it settles without pods
			nudge(f)
			f.watch = kubetest.Proxy(f.T, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if strings.HasSuffix(r.URL.Path, "/pods") {
					w = gatedWriter{w, &behind}
				}
				pass.ServeHTTP(w, r)
			})
		})
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		f.grow("c", time.Now())
		f.nudged("a", time.Time{})
		open := behind.close()
		defer open()
		later := time.Now().Add(time.Hour)
		f.grow("c", later)
		second := f.nudged("a", later.Truncate(time.Second))
		f.patchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.unchanged(second)
		f.askedExactly("PATCH pods/a", "PATCH pods/a")
	})
	t.Run("062_without_permission", func(t *testing.T) {
		f := newClaimsFixture(t, func(f *claimsFixture) { nudge(f); f.user = f.cp.UserConfig(f.ns) })
		f.claimResizing("c")
		f.pod("a", "c", "n", nil)
		if message := f.event("PersistentVolumeClaim", "c", "NodeCleanupBlocked"); !strings.Contains(message, "permission to patch pods") {
			t.Errorf("the event says %q", message)
		}
		f.some(f.c.metrics.nudges.WithLabelValues("forbidden"))
		f.grant(f.ns, []string{"pods"}, "patch")
		f.nudged("a", time.Time{})
	})
	t.Run("062_ephemeral_volume", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		a := f.pod("a", "", "n", func(pod *corev1.Pod) {
			pod.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: f.claimSpec()}}}
		})
		f.claim("a-v", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Spec.VolumeName = f.ns + "-a-v"
			pvc.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(a, corev1.SchemeGroupVersion.WithKind("Pod"))}
		})
		f.volume("a-v", "a-v", f.driver)
		f.grow("a-v", time.Now())
		f.nudged("a", time.Time{})
	})
	t.Run("063_who_is_nudged", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver) // of a class that does not exist any more
		f.bound("foreign", "other.example.com")
		f.claim("going", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Spec.VolumeName = f.ns + "-going"
			pvc.Finalizers = []string{"x/y"}
		})
		f.volume("going", "going", f.driver)
		f.deleteClaim("going")
		f.pod("garbage", "c", "n", func(p *corev1.Pod) { p.Annotations = map[string]string{f.cfg.ResizeAnnotation: "garbage"} })
		succeeded := f.pod("succeeded", "c", "n", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
		failed := f.pod("failed", "c", "n", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
		unscheduled := f.pod("unscheduled", "c", "", nil)
		foreign := f.pod("foreign", "foreign", "n", nil)
		going := f.pod("going", "going", "n", nil)
		for _, name := range []string{"foreign", "going", "c"} {
			f.grow(name, time.Now())
		}
		f.nudged("garbage", time.Time{})
		f.settles()
		f.unchanged(succeeded, failed, unscheduled, foreign, going)
		f.askedExactly("PATCH pods/garbage")
	})
	t.Run("063_terminating", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		f.pod("a", "c", "n", nil)
		f.must(f.client.CoreV1().Pods(f.ns).Delete(t.Context(), "a", metav1.DeleteOptions{}))
		a := f.podNow("a")
		f.grow("c", time.Now())
		f.settles()
		f.unchanged(a)
		f.askedExactly()
	})
	t.Run("063_volume_not_known_yet", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		unowned := func(name string) {
			f.claim(name, func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.ns + "-" + name })
			f.grow(name, time.Now())
			f.pod(name, name, "n", nil)
		}
		unowned("c")
		f.settles()
		f.askedExactly()
		f.volume("c", "c", f.driver)
		f.nudged("c", time.Time{})
		f.class() // which tells, where the volume is not known
		unowned("d")
		f.nudged("d", time.Time{})
	})
	t.Run("064_a_patch_and_nothing_more", func(t *testing.T) {
		f := newClaimsFixture(t, nudge)
		f.bound("c", f.driver)
		before := f.pod("a", "c", "n", func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
			p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
			p.Finalizers = []string{"x/y"}
		})
		f.grow("c", time.Now())
		after := f.nudged("a", time.Time{})
		f.must(f.client.CoreV1().Pods(f.ns).Delete(t.Context(), "a", metav1.DeleteOptions{}))
		value := after.Annotations[f.cfg.ResizeAnnotation]
		delete(after.Annotations, f.cfg.ResizeAnnotation)
		after.ResourceVersion, after.ManagedFields, before.ManagedFields = before.ResourceVersion, nil, nil
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("more was changed:\n%s", diff)
		}
		// What the body does not have, a field that this library does not know among it, the
		// API server leaves as it is.
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.requests) != 1 || f.requests[0].contentType != "application/merge-patch+json" {
			t.Fatalf("the requests were %+v", f.requests)
		}
		var body map[string]any
		f.must(json.Unmarshal([]byte(f.requests[0].body), &body))
		want := map[string]any{"metadata": map[string]any{"uid": string(before.UID), "annotations": map[string]any{f.cfg.ResizeAnnotation: value}}}
		if diff := cmp.Diff(want, body); diff != "" {
			t.Errorf("the body was otherwise:\n%s", diff)
		}
	})
}

// claimResizing makes a claim of the driver whose file system is to grow.
func (f *claimsFixture) claimResizing(name string) {
	f.Helper()
	f.bound(name, f.driver)
	f.grow(name, time.Now())
}

// watchGate holds back, while it is closed, what is written through it.
type watchGate struct{ mu sync.RWMutex }

// close closes the gate, until open is called.
func (g *watchGate) close() (open func()) {
	g.mu.Lock()
	return g.mu.Unlock
}

type gatedWriter struct {
	http.ResponseWriter
	gate *watchGate
}

func (w gatedWriter) Write(p []byte) (int, error) {
	w.gate.mu.RLock()
	defer w.gate.mu.RUnlock()
	return w.ResponseWriter.Write(p)
}

// Unwrap lets the proxy flush what a watch sends.
func (w gatedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
