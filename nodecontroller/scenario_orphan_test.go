package nodecontroller

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

func (f *fixture) isMissing(pv *corev1.PersistentVolume) bool {
	return pv != nil && pv.Annotations[f.ann.missing] != ""
}

// unnoted is that nothing of the driver is written on a volume.
func (f *fixture) unnoted(pv *corev1.PersistentVolume) bool {
	for key := range pv.Annotations {
		if strings.HasPrefix(key, f.driver+"/") {
			return false
		}
	}
	return true
}

func TestNodecontrollerScenarioOrphans(t *testing.T) {
	t.Run("021_report", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup = CleanupReport })
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, reasonMissing, f.name("n"))
		f.event("PersistentVolumeClaim", pvc.Name, reasonMissing, f.name("n"))
		f.staysFor(shortGrace, "pv-a", placeOrphan, pv, pvc)
		f.gauge("storage_controller_nodes_missing", 1)
	})
	t.Run("022_claims", func(t *testing.T) {
		const grace = 8 * time.Second
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope, f.cfg.NodeMissingGrace = ScopeOptIn, grace })
		f.patchClass("c", map[string]any{f.ann.cleanup: enabled})
		f.node("n")
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		f.seen("pv-a", placeHealthy)
		begin := time.Now()
		f.deleteNode("n")
		pv := f.untilVolume("pv-a", "says that its node is missing", f.isMissing)
		f.soon("it is said that the node is missing", begin, grace)
		f.untouched(pvc)
		if pv.Annotations[f.ann.lostNode] != f.name("n") || pv.Annotations[f.ann.lostNodeUID] == "" {
			t.Errorf("annotations %v", pv.Annotations)
		}
		since, err := time.Parse(time.RFC3339, pv.Annotations[f.ann.missing])
		f.must(err)
		f.claimDeleted("a")
		if deleted := f.getClaim("a").DeletionTimestamp; deleted.Sub(since) < grace || since.Before(begin.Truncate(time.Second)) {
			t.Errorf("deleted at %v, missing since %v", deleted, since)
		}
		f.event("PersistentVolume", pv.Name, reasonClaimDeleted, f.ns+"/a")
		f.looks("pv-a")
		f.untouched(pv)
		if f.getClaim("a").UID != pvc.UID || f.actions("pv_delete") != 0 {
			t.Error("more than the claim was deleted")
		}
	})
	t.Run("023_node_is_back", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 5 * time.Second })
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		f.untilVolume("pv-a", "is missing its node", f.isMissing)
		f.passed(time.Now(), 3*time.Second) // of which nothing may count for the second absence
		f.untouched(pvc)
		f.node("n")
		f.untilVolume("pv-a", "has no notes", f.unnoted)
		f.event("PersistentVolume", f.name("pv-a"), reasonReturned, f.name("n"))
		f.untouched(pvc)
		again := time.Now()
		f.deleteNode("n")
		f.claimDeleted("a")
		if d := time.Since(again); d < 4*time.Second { // the annotation is cut to seconds
			t.Errorf("deleted %v after the node", d)
		}
	})
	t.Run("024_restart_keeps_the_deadline", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 6 * time.Second })
		f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		pv := f.untilVolume("pv-a", "is missing its node", f.isMissing)
		since, err := time.Parse(time.RFC3339, pv.Annotations[f.ann.missing])
		f.must(err)
		f.passed(since, 4*time.Second)
		f.stop()
		f.start()
		f.claimDeleted("a")
		if d := time.Since(since); d < 6*time.Second || d > 11*time.Second {
			t.Errorf("deleted %v after the node, want the 6s that it had from the start", d)
		}
		if again := f.getVolume("pv-a").Annotations[f.ann.missing]; again != pv.Annotations[f.ann.missing] {
			t.Errorf("the clock went from %s to %s", pv.Annotations[f.ann.missing], again)
		}
	})
	t.Run("025_clock_in_the_future", func(t *testing.T) {
		const grace = 5 * time.Second
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
		future := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
		f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Annotations[f.ann.missing] = future }, nil)
		begin := time.Now()
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		pv := f.untilVolume("pv-a", "has a clock that has begun", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.missing] != future })
		since, err := time.Parse(time.RFC3339, pv.Annotations[f.ann.missing])
		f.must(err)
		if since.Before(begin.Truncate(time.Second)) || since.After(time.Now()) { // annotations have whole seconds
			t.Errorf("the clock began at %v, want a time since %v", since, begin)
		}
		f.claimDeleted("a")
		if deleted := f.getClaim("a").DeletionTimestamp; deleted.Sub(since) < grace {
			t.Errorf("deleted at %v, missing since %v", deleted, since)
		}
	})
	t.Run("026_node_without_label", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.patchNode("n", fmt.Sprintf(`{"metadata":{"labels":{"%s":null}}}`, f.key))
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.staysFor(shortGrace, "pv-a", placeHealthy, pv, pvc)
	})
	t.Run("027_csinode_is_left", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.staysFor(shortGrace, "pv-a", placeUnclear, pv, pvc)
		f.must(f.client.StorageV1().CSINodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("a")
	})
	t.Run("028_not_ready", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.patchNode("n", `{"status":{"conditions":[{"type":"Ready","status":"Unknown","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}`, "status")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.staysFor(shortGrace, "pv-a", placeHealthy, pv, pvc)
		f.gauge("storage_controller_nodes_not_ready", 1)
		f.silent()
	})
	t.Run("030_term_without_key", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			terms := &pv.Spec.NodeAffinity.Required.NodeSelectorTerms
			*terms = append(*terms, corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "other", Operator: corev1.NodeSelectorOpExists}}})
		}, nil)
		f.onlyWrites()
		f.start()
		f.staysFor(shortGrace, "pv-a", placeElsewhere, pv, pvc)
	})
	t.Run("031_several_nodes", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("m")
		pv, pvc := f.boundTo("a", []string{"n", "m"}, nil, nil)
		f.onlyWrites("PATCH persistentvolumes/pv-a")
		f.start()
		f.staysFor(shortGrace, "pv-a", placeHealthy, pv, pvc)
		f.deleteNode("m")
		f.untilVolume("pv-a", "is missing its nodes", f.isMissing)
	})
	t.Run("032_other_driver", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other.example.com" }, nil)
		f.onlyWrites()
		f.start()
		f.staysFor(shortGrace, "pv-a", placeElsewhere, pv, pvc)
	})
	t.Run("033_scope", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope = ScopeOptIn })
		f.class("in", map[string]string{f.ann.cleanup: enabled})
		ofClass := func(pv *corev1.PersistentVolume) { pv.Spec.StorageClassName = f.name("in") }
		out, outClaim := f.bound("out", "n")
		f.boundTo("in", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = enabled })
		byVolume, volumeClaim := f.boundTo("by-volume", []string{"n"}, func(pv *corev1.PersistentVolume) {
			ofClass(pv)
			pv.Annotations[f.ann.cleanup] = disabled
		}, nil)
		byClaim, claimClaim := f.boundTo("by-claim", []string{"n"}, ofClass, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.ann.cleanup] = disabled })
		f.class("off", map[string]string{f.ann.cleanup: disabled})
		byClass, classClaim := f.boundTo("by-class", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Spec.StorageClassName = f.name("off") }, func(pvc *corev1.PersistentVolumeClaim) {
			*pvc.Spec.StorageClassName = f.name("off")
			pvc.Annotations[f.ann.cleanup] = enabled
		})
		f.onlyWrites("PATCH persistentvolumes/pv-in", "DELETE persistentvolumeclaims/in")
		f.start()
		f.claimDeleted("in")
		for _, pv := range []*corev1.PersistentVolume{out, byVolume, byClaim, byClass} {
			f.event("PersistentVolume", pv.Name, reasonSkipped, f.ann.cleanup)
			f.looks(strings.TrimPrefix(pv.Name, f.ns+"-"))
		}
		f.untouched(out, outClaim, byVolume, volumeClaim, byClaim, claimClaim, byClass, classClaim)
	})
	t.Run("033_scope_of_the_namespace", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope = ScopeOptIn })
		f.patchClass("c", map[string]any{f.ann.cleanup: enabled})
		_, err := f.client.CoreV1().Namespaces().Patch(t.Context(), f.ns, types.MergePatchType, annotationsPatch(map[string]any{f.ann.cleanup: disabled}), metav1.PatchOptions{})
		f.must(err)
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, reasonSkipped, "Namespace "+f.ns)
		f.looks("pv-a")
		f.untouched(pv, pvc)
	})
	t.Run("034_retain", func(t *testing.T) {
		retain := func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}
		t.Run("skip", func(t *testing.T) {
			f := scenario(t, nil)
			pv, pvc := f.boundTo("a", []string{"n"}, retain, nil)
			f.onlyWrites()
			f.start()
			f.event("PersistentVolume", pv.Name, reasonSkipped, "Retain")
			f.looks("pv-a")
			f.untouched(pv, pvc)
		})
		t.Run("claim", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup, f.cfg.NodeCleanupRetain = CleanupVolumes, RetainClaim })
			f.boundTo("a", []string{"n"}, retain, nil)
			f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a")
			f.start()
			f.claimDeleted("a")
			f.release("a")
			released := f.getVolume("pv-a")
			f.passed(time.Now(), shortGrace+time.Second)
			f.looks("pv-a")
			f.untouched(released)
		})
	})
	t.Run("036_037_claim_in_use", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("m")
		pv, pvc := f.bound("a", "n")
		f.bound("b", "n")
		contradiction := f.pod("contradiction", "a", f.name("m"))
		left := f.pod("left", "b", f.name("n"))
		ended := f.pod("ended", "b", f.name("m"))
		ended, err := f.client.CoreV1().Pods(f.ns).Patch(t.Context(), ended.Name, types.MergePatchType, []byte(`{"status":{"phase":"Succeeded"}}`), metav1.PatchOptions{}, "status")
		f.must(err)
		// The claim of a generic ephemeral volume is called like its pod and the volume.
		_, ephemeralClaim := f.bound("ephemeral-v", "n")
		ephemeral, err := f.client.CoreV1().Pods(f.ns).Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "ephemeral"}, Spec: corev1.PodSpec{
			NodeName: f.name("m"), Containers: []corev1.Container{{Name: "c", Image: "i"}},
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
					AccessModes: ephemeralClaim.Spec.AccessModes, StorageClassName: ephemeralClaim.Spec.StorageClassName, Resources: ephemeralClaim.Spec.Resources,
				}},
			}}}},
		}}, metav1.CreateOptions{})
		f.must(err)
		f.onlyWrites("PATCH persistentvolumes/pv-a", "PATCH persistentvolumes/pv-b", "PATCH persistentvolumes/pv-ephemeral-v", "DELETE persistentvolumeclaims/b")
		f.start()
		f.claimDeleted("b")
		f.event("PersistentVolume", pv.Name, reasonSkipped, "ClaimInUse")
		f.event("PersistentVolume", f.name("pv-ephemeral-v"), reasonSkipped, "ClaimInUse")
		f.untouched(pvc, contradiction, left, ended, ephemeralClaim, ephemeral)
	})
	t.Run("039_unbound", func(t *testing.T) {
		selecting := func(f *fixture) *corev1.PersistentVolumeClaim {
			return f.claim("a", func(pvc *corev1.PersistentVolumeClaim) {
				pvc.Annotations = map[string]string{storagehelpers.AnnSelectedNode: f.name("n")}
			})
		}
		t.Run("ignore", func(t *testing.T) {
			f := scenario(t, nil)
			pvc := selecting(f)
			f.onlyWrites()
			f.start()
			f.passed(time.Now(), shortGrace+time.Second)
			_, err := f.term().syncNode(t.Context(), f.name("n"))
			f.must(err)
			f.untouched(pvc)
		})
		t.Run("reschedule", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupUnbound = UnboundReschedule })
			pvc := selecting(f)
			read := fmt.Sprintf(`"resourceVersion":%q`, pvc.ResourceVersion)
			var blind atomic.Bool
			f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodPatch {
					var has bool
					r, has = bodyHas(r, read)
					blind.CompareAndSwap(false, !has)
				}
				pass.ServeHTTP(w, r)
			})
			begin := time.Now()
			f.onlyWrites("PATCH persistentvolumeclaims/a")
			f.start()
			f.untilClaim("a", "has no selected node", func(now *corev1.PersistentVolumeClaim) bool {
				return now != nil && now.UID == pvc.UID && now.DeletionTimestamp == nil && now.Annotations[storagehelpers.AnnSelectedNode] == ""
			})
			if d := f.asked("PATCH persistentvolumeclaims/a")[0].Sub(begin); d < shortGrace {
				t.Errorf("rescheduled after %v", d)
			}
			if blind.Load() {
				t.Error("the patch applies to more than the claim as it was read")
			}
		})
		t.Run("delete", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupUnbound = UnboundDelete })
			selecting(f)
			begin := time.Now()
			f.onlyWrites("DELETE persistentvolumeclaims/a")
			f.start()
			f.claimDeleted("a")
			if d := time.Since(begin); d < shortGrace {
				t.Errorf("deleted after %v", d)
			}
		})
	})
}
