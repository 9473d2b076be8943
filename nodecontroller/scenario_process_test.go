package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// campaign has a controller work only while it holds the Lease of the scenario; the
// result ends that.
func (f *fixture) campaign(c *Controller, identity string) (end func()) {
	f.Helper()
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, f.ns, "lease", f.client.CoreV1(), f.client.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: identity})
	f.must(err)
	cfg := election.Config{LeaseDuration: 5 * time.Second, RenewDeadline: 3 * time.Second, RetryPeriod: 500 * time.Millisecond}
	candidate, err := election.NewCandidate(cfg, lock, election.NewMetrics(prometheus.NewRegistry()))
	f.must(err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- candidate.Campaign(ctx, c.Run) }()
	end = func() {
		cancel()
		<-done
	}
	f.Cleanup(cancel)
	return end
}

func TestNodecontrollerScenarioProcess(t *testing.T) {
	t.Run("047_two_replicas", func(t *testing.T) {
		f := scenario(t, nil)
		var deletes [2]atomic.Int32
		var replicas [2]process
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "PATCH persistentvolumes/pv-b", "DELETE persistentvolumeclaims/b")
		for i := range replicas {
			user := kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodDelete {
					deletes[i].Add(1)
				}
				pass.ServeHTTP(w, r)
			})
			replicas[i] = f.prepare(user)
		}
		f.bound("a", "n")
		endFirst := f.campaign(replicas[0].c, "first")
		kubetest.Eventually(t, "the first one leads", func(context.Context) error {
			if replicas[0].c.current.Load() == nil {
				return errors.New("it does not")
			}
			return nil
		})
		endSecond := f.campaign(replicas[1].c, "second")
		f.claimDeleted("a")
		if first, second := deletes[0].Load(), deletes[1].Load(); first != 1 || second != 0 {
			t.Errorf("the leader sent %d deletions, the other one %d", first, second)
		}
		endFirst()
		f.bound("b", "n")
		f.claimDeleted("b")
		endSecond()
		if first, second := deletes[0].Load(), deletes[1].Load(); first != 1 || second != 1 {
			t.Errorf("the first one sent %d deletions, the second one %d", first, second)
		}
	})
	t.Run("nothing_while_the_driver_is_called", func(t *testing.T) {
		f := scenario(t, nil)
		done := f.locks.Share(f.name("pv-a"))
		_, pvc := f.bound("a", "n")
		f.start()
		f.untilVolume("pv-a", "is missing its node", f.isMissing)
		f.passed(time.Now(), shortGrace+time.Second)
		f.looks("pv-a")
		f.untouched(pvc)
		done()
		f.claimDeleted("a")
	})
	t.Run("key_is_not_known", func(t *testing.T) {
		f := scenario(t, nil)
		_, err := f.client.StorageV1().CSINodes().Patch(t.Context(), f.name("keep"), "application/merge-patch+json",
			[]byte(fmt.Sprintf(`{"spec":{"drivers":[{"name":"%s","nodeID":"keep","topologyKeys":["%s","zone"]}]}}`, f.driver, f.key)), metav1.PatchOptions{})
		if err != nil { // drivers cannot be changed, but replaced
			f.must(f.client.StorageV1().CSINodes().Delete(t.Context(), f.name("keep"), metav1.DeleteOptions{}))
			f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("keep"), metav1.DeleteOptions{}))
			f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("keep"), Driver: f.driver, TopologyKeys: []string{f.key, "zone"}}))
		}
		pv, pvc := f.bound("a", "n")
		f.start()
		f.event("CSIDriver", f.driver, reasonSkipped, "TopologyKeyUnknown")
		f.staysFor(shortGrace, "pv-a", placeElsewhere, pv, pvc)
	})
	t.Run("035_conflict_and_retry", func(t *testing.T) {
		f := scenario(t, nil)
		var conflicts atomic.Int32
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodDelete && conflicts.CompareAndSwap(0, 1) {
				// Between the last read and the deletion somebody changes the claim.
				f.annotateClaim("a", map[string]any{"x.example.com/changed": "yes"})
			}
			pass.ServeHTTP(w, r)
		})
		f.bound("a", "n")
		f.start()
		f.claimDeleted("a")
		if conflicts.Load() != 1 {
			t.Error("nobody interfered")
		}
		if got := f.counter("conflict"); got != 1 {
			t.Errorf("%v conflicts were counted", got)
		}
	})
	t.Run("033_opt_out_at_the_last_moment", func(t *testing.T) {
		f := scenario(t, nil)
		var once atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodDelete && once.CompareAndSwap(false, true) {
				f.annotateClaim("a", map[string]any{f.ann.cleanup: disabled})
			}
			pass.ServeHTTP(w, r)
		})
		f.bound("a", "n")
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), reasonSkipped, "PersistentVolumeClaim")
		f.looks("pv-a")
		if pvc := f.getClaim("a"); pvc.DeletionTimestamp != nil {
			t.Error("the claim is deleted")
		}
		f.untilVolume("pv-a", "has no clock", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.missing] == "" })
	})
}

func (f *fixture) annotateClaim(name string, annotations map[string]any) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), name, "application/merge-patch+json", annotationsPatch(annotations), metav1.PatchOptions{})
	if err != nil { // of a goroutine of the proxy
		f.Error(err)
	}
}

// counter is how many deletions of claims ended with a result.
func (f *fixture) counter(result string) float64 {
	f.Helper()
	families, err := f.reg.Gather()
	f.must(err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == "storage_controller_cleanup_actions_total" && strings.Contains(fmt.Sprint(m.GetLabel()), `"claim_delete"`) && strings.Contains(fmt.Sprint(m.GetLabel()), `"`+result+`"`) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}
