package nodecontroller

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
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// strip has two finalizers removed, called like those of TopoLVM.
func strip(f *claimsFixture) {
	f.cfg.Workers, f.cfg.PVCFinalizerMode = 1, ClaimStrip
	f.cfg.PVCObsoleteFinalizers = []string{f.ns + ".topolvm.io/pvc", f.ns + ".topolvm.cybozu.com/pvc"}
}

func (f *claimsFixture) obsolete(i int) string { return f.cfg.PVCObsoleteFinalizers[i] }

// enforce has the pods of claims that are being deleted deleted.
func enforce(policy PodDeletionPolicy, grace time.Duration) func(*claimsFixture) {
	return func(f *claimsFixture) {
		f.cfg.Workers, f.cfg.PVCFinalizerMode, f.cfg.PVCPodDeletion, f.cfg.PVCPodDeletionGrace = 1, ClaimEnforce, policy, grace
		f.cfg.PVCObsoleteFinalizers = []string{f.ns + ".topolvm.cybozu.com/pvc"}
	}
}

func TestNodecontrollerScenarioClaimsStrip(t *testing.T) {
	t.Run("056_strip", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		f.claim("c", withFinalizers("dummy/dummy", f.obsolete(1), f.obsolete(0), f.obsolete(0)))
		f.stripped("c", "dummy/dummy", pvcProtection)
		f.settles()
		f.askedExactly("PATCH persistentvolumeclaims/c")
		f.counted(actionStrip, "ok", 2) // with the claim that settles makes
	})
	t.Run("056_strip_at_start_and_of_claims_being_deleted", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		f.stop()
		f.claim("stays", withFinalizers(f.obsolete(0)))
		f.claim("goes", withFinalizers(f.obsolete(1), f.obsolete(0)))
		f.deleteClaim("goes")
		f.unprotect("goes")
		f.start()
		f.stripped("stays", pvcProtection)
		f.claimGone("goes")
	})
	t.Run("056_strip_again_in_the_next_term", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		f.settles()
		f.lose()
		f.claim("c", withFinalizers(f.obsolete(0)))
		f.lead()
		f.stripped("c", pvcProtection)
	})
	t.Run("056_strip_while_somebody_else_writes", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		var once sync.Once
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/c") {
				once.Do(func() {
					f.patchClaim("c", fmt.Sprintf(`{"metadata":{"finalizers":["x/y",%q,%q]}}`, f.obsolete(0), pvcProtection))
				})
			}
			return false
		})
		f.claim("c", withFinalizers(f.obsolete(0)))
		f.stripped("c", "x/y", pvcProtection)
		f.settles()
		f.askedExactly("PATCH persistentvolumeclaims/c", "GET persistentvolumeclaims/c", "PATCH persistentvolumeclaims/c")
	})
	t.Run("056_strip_through_an_api_server_that_fails", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		var failures atomic.Int32
		f.on(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPatch || failures.Add(1) > 2 {
				return false
			}
			http.Error(w, "refused by the test", http.StatusInternalServerError)
			return true
		})
		f.claim("c", withFinalizers(f.obsolete(0)))
		f.stripped("c", pvcProtection)
		f.counted(actionStrip, "error", 2)
	})
	t.Run("056_strip_does_not_wait_for_ever", func(t *testing.T) {
		f := newClaimsFixture(t, func(f *claimsFixture) { strip(f); f.cfg.Timeout = 200 * time.Millisecond })
		var first atomic.Bool
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPatch || !first.CompareAndSwap(false, true) {
				return false
			}
			<-r.Context().Done()
			return true
		})
		f.claim("c", withFinalizers(f.obsolete(0)))
		f.stripped("c", pvcProtection)
	})
	t.Run("056_strip_without_permission", func(t *testing.T) {
		f := newClaimsFixture(t, func(f *claimsFixture) { strip(f); f.user = f.cp.UserConfig(f.ns) })
		f.claim("c", withFinalizers(f.obsolete(0)))
		message := f.event("PersistentVolumeClaim", "c", "NodeCleanupBlocked")
		if !strings.Contains(message, "forbidden") || !strings.Contains(message, "permission to patch persistentvolumeclaims") {
			t.Errorf("the event says %q", message)
		}
		f.some(f.c.metrics.finalizers.WithLabelValues(actionStrip, "forbidden"))
		f.grant(f.ns, []string{"persistentvolumeclaims"}, "patch")
		f.stripped("c", pvcProtection)
	})
	t.Run("057_nothing_to_strip", func(t *testing.T) {
		f := newClaimsFixture(t, strip)
		before := f.claim("c", withFinalizers("dummy/dummy", f.cfg.PVCFinalizer))
		f.patchClaim("c", `{"metadata":{"labels":{"a":"b"}}}`)
		f.settles()
		f.askedExactly()
		if now := f.getClaim("c"); !slices.Equal(now.Finalizers, before.Finalizers) {
			t.Errorf("finalizers %v", now.Finalizers)
		}
	})
	t.Run("057_pods_are_not_watched", func(t *testing.T) {
		var mu sync.Mutex
		var watched []string
		f := newClaimsFixture(t, func(f *claimsFixture) {
			strip(f)
			f.watch = kubetest.Proxy(f.T, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
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

func TestNodecontrollerScenarioClaimsEnforce(t *testing.T) {
	t.Run("058_all_pods", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, time.Second))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		f.claim("d", withFinalizers(f.cfg.PVCFinalizer))
		f.pod("a", "c", f.node("n"), nil)
		b := f.pod("b", "d", f.ns+"-n", nil)
		f.deleteClaim("c")
		f.podDeleted("a")
		if a := f.podNow("a"); a == nil || a.DeletionGracePeriodSeconds == nil || *a.DeletionGracePeriodSeconds != 1 {
			t.Errorf("pod a is %+v", a)
		}
		f.settles()
		f.unchanged(b)
		f.stripped("c", f.cfg.PVCFinalizer, pvcProtection)
		f.unprotect("c")
		f.claimGone("c")
		f.stripped("d", f.cfg.PVCFinalizer, pvcProtection)
		f.askedExactly("GET persistentvolumeclaims/c", "GET pods/a", "DELETE pods/a", "PATCH persistentvolumeclaims/c")
		if message := f.event("Pod", "a", reasonPodDeleted); !strings.Contains(message, "claim c") {
			t.Errorf("the event says %q", message)
		}
	})
	t.Run("058_the_grace_of_the_pod", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, -1))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		f.pod("a", "c", "n", func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = new(int64(77)) })
		f.deleteClaim("c")
		f.podDeleted("a")
		if a := f.podNow("a"); a == nil || a.DeletionGracePeriodSeconds == nil || *a.DeletionGracePeriodSeconds != 77 {
			t.Errorf("pod a is %+v", a)
		}
	})
	t.Run("058_a_claim_without_the_finalizer", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, 0))
		f.claim("c", nil)
		a := f.pod("a", "c", "n", nil)
		f.deleteClaim("c")
		f.settles()
		f.unchanged(a)
		f.askedExactly()
	})
	t.Run("058_a_pod_that_comes_later", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, 0))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		f.deleteClaim("c")
		f.settles()
		f.pod("a", "c", "n", nil)
		f.podDeleted("a")
	})
	t.Run("058_another_claim_of_the_name", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, 0))
		// Between the cache and the call the claim goes by force, and comes anew.
		var once sync.Once
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/c") {
				once.Do(func() {
					f.patchClaim("c", `{"metadata":{"finalizers":null}}`)
					f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
				})
			}
			return false
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		a := f.pod("a", "c", "n", nil)
		f.deleteClaim("c")
		kubetest.Eventually(t, "the claim is read", func(context.Context) error {
			if len(f.asked()) == 0 {
				return errors.New("it is not")
			}
			return nil
		})
		f.settles()
		f.unchanged(a)
		f.askedExactly("GET persistentvolumeclaims/c")
		if f.getClaim("c").DeletionTimestamp != nil {
			t.Error("the new claim is being deleted")
		}
	})
	t.Run("058_another_pod_of_the_name", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, 0))
		f.claim("d", nil)
		var once sync.Once
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodDelete {
				once.Do(func() {
					f.must(f.client.CoreV1().Pods(f.ns).Delete(t.Context(), "a", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
					f.pod("a", "d", "n", nil)
				})
			}
			return false
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		f.pod("a", "c", "n", nil)
		f.deleteClaim("c")
		f.some(f.c.metrics.finalizers.WithLabelValues(actionDeletePod, "conflict"))
		f.settles()
		if a := f.podNow("a"); a == nil || a.DeletionTimestamp != nil {
			t.Errorf("pod a is %+v", a)
		}
	})
	t.Run("058_without_permission", func(t *testing.T) {
		f := newClaimsFixture(t, func(f *claimsFixture) {
			enforce(PodsAll, 0)(f)
			f.user = f.cp.UserConfig(f.ns)
			f.grant(f.ns, []string{"persistentvolumeclaims", "pods"}, "get", "patch")
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		a := f.pod("a", "c", "n", nil)
		f.deleteClaim("c")
		if message := f.event("PersistentVolumeClaim", "c", "NodeCleanupBlocked"); !strings.Contains(message, "forbidden") || !strings.Contains(message, f.ns+"/a") {
			t.Errorf("the event says %q", message)
		}
		f.unchanged(a)
		f.grant(f.ns+"-more", []string{"pods"}, "delete")
		f.podDeleted("a")
	})
	t.Run("059_orphaned_pods", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsOrphaned, -1))
		live, leaving := f.node("live"), f.node("leaving")
		f.leave(leaving)
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		running := f.pod("running", "c", live, nil)
		f.pod("pending", "c", "", nil)
		f.pod("absent", "c", f.ns+"-absent", nil)
		f.pod("leaving", "c", leaving, nil)
		f.deleteClaim("c")
		for _, name := range []string{"pending", "absent", "leaving"} {
			f.podDeleted(name)
		}
		f.settles()
		f.unchanged(running)
		f.stripped("c", f.cfg.PVCFinalizer, pvcProtection)
	})
	t.Run("059_pending_pods", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsPending, -1))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		absent := f.pod("absent", "c", f.ns+"-absent", nil)
		f.pod("pending", "c", "", nil)
		f.deleteClaim("c")
		f.podDeleted("pending")
		f.settles()
		f.unchanged(absent)
	})
	t.Run("059_no_pods", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsNone, -1))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		pending := f.pod("pending", "c", "", nil)
		f.deleteClaim("c")
		f.unprotect("c")
		f.claimGone("c")
		f.unchanged(pending)
	})
	t.Run("059_a_pod_that_is_scheduled_meanwhile", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsOrphaned, -1))
		live := f.node("live")
		var once sync.Once
		f.on(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodDelete {
				once.Do(func() {
					f.must(f.client.CoreV1().Pods(f.ns).Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Target: corev1.ObjectReference{Kind: "Node", Name: live}}, metav1.CreateOptions{}))
				})
			}
			return false
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		f.pod("a", "c", "", nil)
		f.deleteClaim("c")
		f.some(f.c.metrics.finalizers.WithLabelValues(actionDeletePod, "conflict"))
		f.settles()
		if a := f.podNow("a"); a == nil || a.DeletionTimestamp != nil || a.Spec.NodeName != live {
			t.Errorf("pod a is %+v", a)
		}
	})
	t.Run("059_a_node_that_cannot_be_read", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsOrphaned, -1))
		var failing atomic.Bool
		var asked atomic.Int32
		failing.Store(true)
		f.on(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/nodes/") || !failing.Load() {
				return false
			}
			asked.Add(1)
			http.Error(w, "refused by the test", http.StatusInternalServerError)
			return true
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		a := f.pod("a", "c", f.ns+"-absent", nil)
		f.deleteClaim("c")
		kubetest.Eventually(t, "the node is asked for twice", func(context.Context) error {
			if asked.Load() < 2 {
				return errors.New("it is not")
			}
			return nil
		})
		f.unchanged(a)
		failing.Store(false)
		f.podDeleted("a")
	})
	t.Run("059_a_node_that_is_new_to_the_cache", func(t *testing.T) {
		// The cache never hears of the node; the API server knows it.
		f := newClaimsFixture(t, func(f *claimsFixture) {
			enforce(PodsOrphaned, -1)(f)
			f.watch = kubetest.Proxy(f.T, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if strings.HasSuffix(r.URL.Path, "/nodes") {
					q := r.URL.Query()
					q.Set("fieldSelector", "metadata.name=nobody")
					r.URL.RawQuery = q.Encode()
				}
				pass.ServeHTTP(w, r)
			})
		})
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer))
		a := f.pod("a", "c", f.node("live"), nil)
		f.deleteClaim("c")
		f.settles()
		f.unchanged(a)
		f.askedExactly("GET persistentvolumeclaims/c", "GET pods/a", "GET nodes/"+f.ns+"-live")
	})
	t.Run("060_finalizer_twice", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsOrphaned, -1))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer, f.cfg.PVCFinalizer))
		f.unprotect("c")
		f.deleteClaim("c")
		f.claimGone("c")
		f.settles()
		f.askedExactly("PATCH persistentvolumeclaims/c")
	})
	t.Run("060_with_an_obsolete_one", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsOrphaned, -1))
		f.claim("c", withFinalizers(f.cfg.PVCFinalizer, f.obsolete(0), f.cfg.PVCFinalizer))
		f.stripped("c", f.cfg.PVCFinalizer, f.cfg.PVCFinalizer, pvcProtection)
		f.deleteClaim("c")
		f.unprotect("c")
		f.claimGone("c")
	})
	t.Run("061_ephemeral_volume", func(t *testing.T) {
		f := newClaimsFixture(t, enforce(PodsAll, 0))
		ephemeral := func(pod *corev1.Pod) {
			pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: f.claimSpec()},
			}}}}
		}
		mine := f.pod("mine", "", "n", ephemeral)
		other := f.pod("other", "", "n", ephemeral)
		f.claim("mine-v", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Finalizers = []string{f.cfg.PVCFinalizer}
			pvc.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(mine, corev1.SchemeGroupVersion.WithKind("Pod"))}
		})
		f.claim("other-v", withFinalizers(f.cfg.PVCFinalizer)) // which only has the name
		f.deleteClaim("other-v")
		f.deleteClaim("mine-v")
		f.podDeleted("mine")
		f.settles()
		f.unchanged(other)
	})
}

// grant lets the user called like the namespace do something there.
func (f *claimsFixture) grant(name string, resources []string, verbs ...string) {
	f.Helper()
	rbac := f.client.RbacV1()
	_, err := rbac.Roles(f.ns).Create(f.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, Verbs: verbs}}}, metav1.CreateOptions{})
	f.must(err)
	_, err = rbac.RoleBindings(f.ns).Create(f.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: f.ns}},
	}, metav1.CreateOptions{})
	f.must(err)
}

// leave has a node be deleted, which somebody holds until the end of the test.
func (f *claimsFixture) leave(node string) {
	f.Helper()
	nodes := f.client.CoreV1().Nodes()
	patch := func(finalizers string) {
		_, err := nodes.Patch(context.WithoutCancel(f.Context()), node, types.MergePatchType, []byte(`{"metadata":{"finalizers":`+finalizers+`}}`), metav1.PatchOptions{})
		if err != nil && !kube.IsNotFound(err) {
			f.Errorf("changing the finalizers of the node: %v", err)
		}
	}
	patch(`["test/hold"]`)
	f.must(nodes.Delete(f.Context(), node, metav1.DeleteOptions{}))
	f.Cleanup(func() { patch("null") })
}
