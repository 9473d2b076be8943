package nodecontroller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// ten is nine nodes of the driver beside keep, of which n1 and n2 have a bound pair each.
func ten(f *fixture) (claims []*corev1.PersistentVolumeClaim) {
	f.Helper()
	for i := 1; i < 10; i++ {
		f.node(fmt.Sprintf("n%d", i))
	}
	for i := 1; i <= 2; i++ {
		_, pvc := f.bound(fmt.Sprintf("c%d", i), fmt.Sprintf("n%d", i))
		claims = append(claims, pvc)
	}
	return claims
}

func (f *fixture) held(name string, want bool) {
	f.Helper()
	f.untilVolume("pv-"+name, fmt.Sprintf("is held: %t", want), func(pv *corev1.PersistentVolume) bool {
		return pv != nil && (pv.Annotations[f.ann.hold] == heldByBreak) == want
	})
}

const claimA = "persistentvolumeclaims/a"

const breakerOpen = "storage_controller_breaker_open"

func TestNodecontrollerScenarioBreaker(t *testing.T) {
	t.Run("042_044_two_nodes_of_ten", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupWindow = shortGrace })
		claims := ten(f)
		f.onlyWrites("PATCH persistentvolumes/pv-c1", "DELETE persistentvolumeclaims/c1", "PATCH persistentvolumes/pv-c2")
		f.start()
		f.seen("pv-c2", placeHealthy)
		f.deleteNode("n1")
		f.deleteNode("n2")
		f.held("c1", true)
		f.held("c2", true)
		f.gauge(breakerOpen, 1)
		f.event("CSIDriver", f.driver, reasonBreakerOpen, "2 of 10")
		f.passed(time.Now(), 2*shortGrace)
		f.looks("pv-c1")
		f.looks("pv-c2")
		f.untouched(claims[0], claims[1])
		if n := f.told("CSIDriver", f.driver, reasonBreakerOpen); n != 1 {
			t.Errorf("%d times it was told that the breaker is open", n)
		}
		f.stop() // 044
		f.start()
		f.gauge(breakerOpen, 1)
		f.seen("pv-c1", placeOrphan)
		f.looks("pv-c1")
		f.looks("pv-c2")
		f.untouched(claims[0], claims[1])
		f.approve(f.name("n1"), "")
		f.claimDeleted("c1")
		f.held("c1", false)
		f.looks("pv-c2")
		f.untouched(claims[1])
		f.held("c2", true)
		f.node("n2")
		f.untilVolume("pv-c2", "has no notes", f.unnoted)
		f.gauge(breakerOpen, 0)
		f.event("CSIDriver", f.driver, reasonBreakerClosed, "")
		f.untouched(claims[1])
	})
	t.Run("043_approve_all", func(t *testing.T) {
		f := scenario(t, nil)
		claims := ten(f)
		f.onlyWrites("PATCH persistentvolumes/pv-c1", "DELETE persistentvolumeclaims/c1", "PATCH persistentvolumes/pv-c2", "DELETE persistentvolumeclaims/c2")
		f.start()
		f.seen("pv-c2", placeHealthy)
		f.deleteNode("n1")
		f.deleteNode("n2")
		f.held("c1", true)
		f.held("c2", true)
		f.approve("*", "")
		f.event("CSIDriver", f.driver, reasonSkipped, f.ann.until)
		f.approve("*", time.Now().Add(-time.Minute).UTC().Format(time.RFC3339))
		f.event("CSIDriver", f.driver, reasonSkipped, "has passed")
		f.passed(time.Now(), shortGrace)
		f.looks("pv-c1")
		f.looks("pv-c2")
		f.untouched(claims[0], claims[1])
		f.approve("*", time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
		f.claimDeleted("c1")
		f.claimDeleted("c2")
	})
	t.Run("045_no_node_is_left", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMaxFraction, f.cfg.TopologyNodeKey = 1, f.key })
		f.node("n")
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("keep")
		f.deleteNode("n")
		f.event("PersistentVolume", f.name("pv-a"), reasonSkipped, "NoReadyNode")
		f.looks("pv-a")
		f.untouched(pvc)
	})
	t.Run("045_no_node_is_ready", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMaxFraction, f.cfg.TopologyNodeKey = 1, f.key })
		_, pvc := f.bound("a", "n")
		f.patchNode("keep", `{"status":{"conditions":[{"type":"Ready","status":"Unknown","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
		f.onlyWrites("PATCH persistentvolumes/pv-a")
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), reasonSkipped, "NoReadyNode")
		f.looks("pv-a")
		f.untouched(pvc)
	})
	t.Run("046_rate", func(t *testing.T) {
		f := scenario(t, nil)
		var may []string
		for i := range 30 {
			f.bound(fmt.Sprintf("c%d", i), "n")
			may = append(may, fmt.Sprintf("PATCH persistentvolumes/pv-c%d", i), fmt.Sprintf("DELETE persistentvolumeclaims/c%d", i))
		}
		f.onlyWrites(may...)
		left := func() int {
			list, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).List(t.Context(), metav1.ListOptions{})
			f.must(err)
			n := 0
			for _, pvc := range list.Items {
				if pvc.DeletionTimestamp == nil {
					n++
				}
			}
			return n
		}
		f.start()
		kubetest.Eventually(t, "the first claim is deleted", func(context.Context) error {
			if left() == 30 {
				return errors.New("none is")
			}
			return nil
		})
		// None is due before its clock says so, and the limit counts from the first that is.
		due := time.Now().Add(time.Hour)
		for i := range 30 {
			since, err := time.Parse(time.RFC3339, f.getVolume(fmt.Sprintf("pv-c%d", i)).Annotations[f.ann.missing])
			if since = since.Add(f.cfg.NodeMissingGrace); err == nil && since.Before(due) { // one without a clock yet is due later
				due = since
			}
		}
		f.passed(due, 20*time.Second)
		if n := 30 - left(); n < 15 {
			t.Errorf("%d claims after 20s", n)
		}
		f.stop()
		var deletions []time.Time
		for i := range 30 {
			deletions = append(deletions, f.asked(fmt.Sprintf("DELETE persistentvolumeclaims/c%d", i))...)
		}
		slices.SortFunc(deletions, time.Time.Compare)
		for i, at := range deletions {
			if d := at.Sub(due); float64(i+1) > 10+0.5*d.Seconds() {
				t.Errorf("deletion %d came %v after the first claim was due, want no more than 10 and one per 2s", i+1, d)
			}
		}
	})
	t.Run("029_out_of_service", func(t *testing.T) {
		fenced := func(f *fixture, lost bool) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
			f.node("n")
			f.patchNode("n", `{"status":{"conditions":[{"type":"Ready","status":"False","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
			f.patchNode("n", `{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","value":"x","effect":"NoSchedule"}]}}`)
			if lost {
				f.patchNode("n", string(annotationsPatch(map[string]any{f.ann.localData: dataLost})))
			}
			return f.bound("a", "n")
		}
		t.Run("not_asked_for", func(t *testing.T) {
			f := scenario(t, nil)
			pv, pvc := fenced(f, true)
			f.onlyWrites()
			f.start()
			f.staysFor(shortGrace, "pv-a", placeFenced, pv, pvc)
			f.silent()
		})
		t.Run("data_not_lost", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupOutOfService, f.cfg.NodeOutOfServiceGrace = true, 0 })
			pv, pvc := fenced(f, false)
			f.onlyWrites()
			f.start()
			f.staysFor(shortGrace, "pv-a", placeHealthy, pv, pvc)
			f.silent()
		})
		t.Run("ready", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupOutOfService, f.cfg.NodeOutOfServiceGrace = true, 0 })
			pv, pvc := fenced(f, true)
			f.patchNode("n", `{"status":{"conditions":[{"type":"Ready","status":"True","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
			f.onlyWrites()
			f.start()
			f.staysFor(shortGrace, "pv-a", placeHealthy, pv, pvc)
			f.silent()
		})
		t.Run("fenced_just_now", func(t *testing.T) { // and not ready for years
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupOutOfService = true })
			pv, pvc := fenced(f, true)
			f.patchNode("n", fmt.Sprintf(`{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","value":"x","effect":"NoSchedule","timeAdded":%q}]}}`, time.Now().UTC().Format(time.RFC3339)))
			f.onlyWrites()
			f.start()
			f.staysFor(shortGrace, "pv-a", placeFenced, pv, pvc)
			f.silent()
		})
		t.Run("grace_not_over", func(t *testing.T) {
			f := scenario(t, func(f *fixture) {
				f.cfg.NodeCleanupOutOfService, f.cfg.NodeOutOfServiceGrace = true, 50*365*24*time.Hour
			})
			pv, pvc := fenced(f, true)
			f.onlyWrites()
			f.start()
			f.staysFor(shortGrace, "pv-a", placeFenced, pv, pvc)
			f.silent()
		})
		t.Run("all", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupOutOfService = true })
			pv, _ := fenced(f, true)
			pod := f.pod("p", "a", f.name("n"))
			f.onlyWrites("DELETE persistentvolumeclaims/a")
			f.start()
			f.claimDeleted("a")
			f.untouched(pv, pod)
		})
	})
	t.Run("035_claim_of_another_uid", func(t *testing.T) {
		f := scenario(t, nil)
		stale := make(chan struct{})
		f.watch = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.URL.Query().Get("watch") != "" && strings.Contains(r.URL.Path, "persistentvolumeclaims") {
				if r.URL.Query().Get("sendInitialEvents") != "" { // which has the informer list instead
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(http.StatusUnprocessableEntity)
					_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
					return
				}
				select {
				case <-stale: // nothing of what happens to claims is told
				case <-r.Context().Done():
				}
				return
			}
			pass.ServeHTTP(w, r)
		})
		defer close(stale)
		_, old := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a")
		f.start()
		f.untilVolume("pv-a", "is missing its node", f.isMissing)
		_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(t.Context(), "a", "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		f.must(err)
		f.must(f.client.CoreV1().PersistentVolumeClaims(f.ns).Delete(t.Context(), "a", metav1.DeleteOptions{}))
		recreated := f.claim("a", func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.name("pv-a") })
		if recreated.UID == old.UID {
			t.Fatal("it is the same claim")
		}
		before := len(f.asked("GET " + claimA))
		f.passed(time.Now(), 10*time.Second)
		attempts := f.asked("GET " + claimA) // each begins with a look at the claim itself
		if n := len(attempts) - before; n < 1 || n > 3 {
			t.Errorf("%d attempts within 10s, want 1 to 3", n)
		}
		f.looks("pv-a")
		f.untouched(recreated)
		if n := len(f.asked("DELETE " + claimA)); n > 0 {
			t.Errorf("%d deletions were sent", n)
		}
	})
	t.Run("035_claim_that_changes_before_the_call", func(t *testing.T) {
		for name, change := range map[string]func(f *fixture) *corev1.PersistentVolumeClaim{
			"another_uid": func(f *fixture) *corev1.PersistentVolumeClaim {
				f.must(f.client.CoreV1().PersistentVolumeClaims(f.ns).Delete(f.Context(), "a", metav1.DeleteOptions{}))
				_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), "a", "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
				f.must(err)
				return f.claim("a", func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.name("pv-a") })
			},
			"opted_out": func(f *fixture) *corev1.PersistentVolumeClaim {
				pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), "a", "application/merge-patch+json", annotationsPatch(map[string]any{f.ann.cleanup: disabled}), metav1.PatchOptions{})
				f.must(err)
				return pvc
			},
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, nil)
				changed := make(chan *corev1.PersistentVolumeClaim, 1)
				var once sync.Once
				f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
					if r.Method == http.MethodDelete { // all is read and judged
						once.Do(func() { changed <- change(f) })
					}
					pass.ServeHTTP(w, r)
				})
				f.bound("a", "n")
				f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
				f.start()
				var pvc *corev1.PersistentVolumeClaim
				kubetest.Eventually(t, "the claim changes before its deletion", func(context.Context) error {
					select {
					case pvc = <-changed:
						return nil
					default:
						return errors.New("no deletion was sent")
					}
				})
				kubetest.Eventually(t, "the claim is looked at again", func(context.Context) error {
					if cached, ok := f.term().claims.Get(f.ns + "/a"); !ok || cached.ResourceVersion != pvc.ResourceVersion {
						return fmt.Errorf("the cache has %v", cached)
					}
					return nil
				})
				f.looks("pv-a")
				f.untouched(pvc)
				if n := len(f.asked("DELETE " + claimA)); n != 1 {
					t.Errorf("%d deletions were sent, want 1", n)
				}
			})
		}
	})
	t.Run("038_errors_of_the_api_server", func(t *testing.T) {
		f := scenario(t, nil)
		var broken atomic.Bool
		var asked atomic.Int32
		broken.Store(true)
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if broken.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/nodes/"+f.name("n")) {
				if asked.Add(1)%2 == 0 {
					<-r.Context().Done() // which ends by the deadline of the controller
					return
				}
				http.Error(w, "broken", http.StatusInternalServerError)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.cfg.Timeout = 500 * time.Millisecond
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		kubetest.Eventually(t, "it was tried again and again", func(context.Context) error {
			if n := asked.Load(); n < 5 {
				return fmt.Errorf("only %d times", n)
			}
			return nil
		})
		f.untouched(pv, pvc)
		broken.Store(false)
		f.claimDeleted("a")
	})
	t.Run("040_dry_run", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup = CleanupDryRun })
		var dry, wet atomic.Int32
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodDelete {
				var tried bool
				if r, tried = bodyHas(r, "All"); tried {
					dry.Add(1)
				} else {
					wet.Add(1)
				}
			}
			pass.ServeHTTP(w, r)
		})
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a as a trial") // the clock is a note
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), reasonMissing, "(dry-run) ")
		f.event("PersistentVolume", f.name("pv-a"), reasonClaimDeleted, "(dry-run) ")
		f.looks("pv-a")
		f.untouched(pvc)
		if dry.Load() != 1 || wet.Load() != 0 {
			t.Errorf("%d deletions were tried and %d were not only tried", dry.Load(), wet.Load())
		}
	})
	t.Run("041_forbidden", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.RetryIntervalMax = time.Minute })
		user := f.ns + "-user"
		f.user = f.cp.UserConfig(user)
		f.grant(user, []rbacv1.PolicyRule{
			{APIGroups: []string{"", "storage.k8s.io"}, Resources: []string{"*"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"patch"}},
		})
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, "forbidden")
		const tries = 5
		kubetest.Eventually(t, "it was tried again and again", func(context.Context) error {
			if n := len(f.asked("DELETE " + claimA)); n < tries {
				return fmt.Errorf("only %d times", n)
			}
			return nil
		})
		at, pause := f.asked("DELETE "+claimA), f.cfg.RetryIntervalStart
		for i := 1; i < tries; i++ {
			if d := at[i].Sub(at[i-1]); d < pause {
				t.Errorf("try %d came %v after the one before, want %v at least", i+1, d, pause)
			}
			pause *= 2
		}
		f.untouched(pvc)
		f.grant(user+"-more", []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"delete"}}}, user)
		f.claimDeleted("a") // the process is up, and comes back to it
	})
}

// grant allows a user, whose name is that of the role unless it is given, what rules say.
func (f *fixture) grant(name string, rules []rbacv1.PolicyRule, user ...string) {
	f.Helper()
	subject := name
	if len(user) > 0 {
		subject = user[0]
	}
	_, err := f.client.RbacV1().ClusterRoles().Create(f.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}, metav1.CreateOptions{})
	f.must(err)
	_, err = f.client.RbacV1().ClusterRoleBindings().Create(f.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: "rbac.authorization.k8s.io", Name: subject}},
	}, metav1.CreateOptions{})
	f.must(err)
}

// bodyHas tells whether the body of r has text in it, and returns r with its body unread.
func bodyHas(r *http.Request, text string) (*http.Request, bool) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return r, false
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return r, bytes.Contains(body, []byte(text))
}

// TestApprovedNodeIsBack has a node come back whose loss was approved by its name, and go
// again.
func TestApprovedNodeIsBack(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
	f.node("n")
	f.bound("a", "n")
	f.approve(f.name("n"), "")
	f.start()
	f.seen("pv-a", placeHealthy)
	f.deleteNode("n")
	f.claimDeleted("a")
	f.node("n")
	f.event("CSIDriver", f.driver, reasonReturned, f.ann.approve)
	_, pvc := f.bound("b", "n")
	f.seen("pv-b", placeHealthy)
	f.deleteNode("n")
	f.staysFor(shortGrace, "pv-b", placeOrphan, pvc)
	f.approve("", "")
	f.approve(f.name("n"), "")
	f.claimDeleted("b")
}

// TestNamespacesAreAskedBeforeAHold loses two nodes at once, of which one has claims that
// nobody wants to be cleaned up.
func TestNamespacesAreAskedBeforeAHold(t *testing.T) {
	lose := func(t *testing.T, change func(f *fixture)) *fixture {
		f := scenario(t, change)
		ten(f)
		ns := f.refusing()
		for i := range 8 {
			f.boundIn(ns, fmt.Sprintf("a%d", i), "n3")
		}
		f.claimIn(ns, "unbound", "", map[string]string{storagehelpers.AnnSelectedNode: f.name("n3")})
		f.start()
		f.seen("pv-a0", placeHealthy)
		f.seen("pv-c1", placeHealthy)
		f.deleteNode("n1")
		f.deleteNode("n3")
		f.claimDeleted("c1")
		if told := f.events("CSIDriver", f.driver, reasonBreakerOpen); len(told) > 0 {
			t.Errorf("told %q", told)
		}
		return f
	}
	t.Run("volumes", func(t *testing.T) { lose(t, nil) })
	t.Run("unbound_claims", func(t *testing.T) { lose(t, func(f *fixture) { f.cfg.NodeCleanupUnbound = UnboundDelete }) })
}
