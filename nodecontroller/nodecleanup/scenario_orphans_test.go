// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const claimA = "persistentvolumeclaims/a"

func TestNodecontrollerScenarioOrphans(t *testing.T) {
	t.Parallel()
	t.Run("021_report", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup = ModeReport })
		pv, pvc := f.bound("a", "n")
		f.boundTo("b", []string{"n"}, retained, nil)
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", pv.Name, "NodeMissing", f.name("n"))
		f.event("PersistentVolumeClaim", pvc.Name, "NodeMissing", f.name("n"))
		f.missing("n")
		f.stays(2*shortGrace, pv, pvc)
		f.metric(1, "storage_controller_nodes_missing")
		f.metric(0, blockedGauge, "policy") // no deletion is expected
	})
	t.Run("022_claims", func(t *testing.T) {
		const grace = 6 * time.Second
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope, f.cfg.NodeMissingGrace = ScopeOptIn, grace })
		f.says("StorageClass", "c", enabled)
		f.node("n")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.observed("a")
		begin := time.Now()
		f.deleteNode("n")
		n := f.missing("n")
		f.untouched(pvc)
		if n.Node != f.name("n") || n.UID == "" || n.Since.Before(begin) || n.Since.After(time.Now()) {
			t.Errorf("the record is %+v, the Node was deleted at %v", n, begin)
		}
		f.claimDeleted("a")
		if at := f.asked("DELETE " + claimA)[0]; at.Sub(n.Since) < grace {
			t.Errorf("deleted at %v, missing since %v", at, n.Since)
		}
		f.event("PersistentVolume", pv.Name, "NodeVolumeClaimDeleted", f.ns+"/a")
		f.stays(shortGrace, pv)
		if f.getClaim("a").UID != pvc.UID {
			t.Error("it is another claim")
		}
		f.untilRecord("n", "says that a deletion was sent", func(n *LostNode) bool { return n != nil && !n.Acted.IsZero() })
	})
	t.Run("023_node_is_back", func(t *testing.T) {
		const grace = 15 * time.Second
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
		_, pvc := f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.missing("n")
		f.passed(time.Now(), 3*time.Second) // which do not count for the second loss
		f.untouched(pvc)
		f.node("n")
		f.noRecord("n")
		f.event("PersistentVolume", f.name("pv-a"), "NodeReturned", f.name("n"))
		f.untouched(pvc)
		f.changeRecords(func(cm *corev1.ConfigMap) { cm.Annotations[AnnotationLastLook] = "2020-01-01T00:00:00Z" })
		again := time.Now()
		f.deleteNode("n")
		f.missing("n")
		f.changeRecords(func(cm *corev1.ConfigMap) {
			if last := cm.Annotations[AnnotationLastLook]; last < again.UTC().Format(time.RFC3339) { // without records there are none
				t.Errorf("the last check was at %s, before the node was lost", last)
			}
		})
		f.claimDeleted("a")
		if d := f.asked("DELETE " + claimA)[0].Sub(again); d < grace {
			t.Errorf("deleted %v after the node", d)
		}
	})
	t.Run("024_restart_keeps_the_deadline", func(t *testing.T) {
		const grace = 15 * time.Second
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
		f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		n := f.missing("n")
		f.passed(n.Since, 10*time.Second)
		f.stop()
		restarted := time.Now()
		f.start()
		f.claimDeleted("a")
		if at := f.asked("DELETE " + claimA)[0]; at.Sub(n.Since) < grace || at.Sub(restarted) >= grace {
			t.Errorf("deleted %v after the node and %v after the restart, want the original deadline", at.Sub(n.Since),
				at.Sub(restarted))
		}
		if again := f.missing("n"); !again.Since.Equal(n.Since) {
			t.Errorf("the clock was set from %v to %v", n.Since, again.Since)
		}
	})
	t.Run("025_clock_in_the_future", func(t *testing.T) {
		const grace = 5 * time.Second
		for name, since := range map[string]string{"future": in(time.Hour), "garbage": "yesterday"} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
				f.bound("a", "n")
				begin := time.Now()
				f.changeRecords(func(cm *corev1.ConfigMap) {
					cm.Annotations[AnnotationTopologyKey], cm.Annotations[AnnotationLastLook] = f.key, in(0)
					cm.Data[f.name("n")] = fmt.Sprintf(`{"node":%q,"since":%q}`, f.name("n"), since)
				})
				f.onlyWrites("DELETE " + claimA)
				f.start()
				n := f.untilRecord("n", "has a clock that began now", func(n *LostNode) bool {
					return n != nil && !n.Since.Before(begin) && !n.Since.After(time.Now())
				})
				f.claimDeleted("a")
				if at := f.asked("DELETE " + claimA)[0]; at.Sub(n.Since) < grace {
					t.Errorf("deleted at %v, missing since %v", at, n.Since)
				}
			})
		}
	})
	t.Run("026_node_without_label", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.label("n", "")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("027_csinode_is_left", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.observed("a")
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.stays(2*shortGrace, pv, pvc)
		left := time.Now()
		f.must(f.client.StorageV1().CSINodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		f.claimDeleted("a")
		if d := f.asked("DELETE " + claimA)[0].Sub(left); d < shortGrace {
			t.Errorf("deleted %v after the CSINode", d)
		}
	})
	t.Run("028_not_ready", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.unready("n")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
		f.noRecord("n")
		f.silent()
	})
	t.Run("030_term_without_key", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			terms := &pv.Spec.NodeAffinity.Required.NodeSelectorTerms
			*terms = append(*terms, corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "other", Operator: corev1.NodeSelectorOpExists},
			}})
		}, nil)
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("031_several_nodes", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMinNodes = 2 })
		f.node("m")
		pv, pvc := f.boundTo("a", []string{"n", "m"}, nil, nil)
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.stays(2*shortGrace, pv, pvc)
		f.deleteNode("m")
		f.claimDeleted("a")
	})
	t.Run("032_other_driver", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other.example.com" }, nil)
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("033_scope", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope = ScopeOptIn })
		f.class("in", map[string]string{f.optOut: enabled})
		f.class("off", map[string]string{f.optOut: disabled})
		ofClass := func(class string, annotation string) func(*corev1.PersistentVolume) {
			return func(pv *corev1.PersistentVolume) {
				if pv.Spec.StorageClassName = f.name(class); annotation != "" {
					pv.Annotations[f.optOut] = annotation
				}
			}
		}
		ofClaim := func(class, annotation string) func(*corev1.PersistentVolumeClaim) {
			return func(pvc *corev1.PersistentVolumeClaim) {
				if *pvc.Spec.StorageClassName = f.name(class); annotation != "" {
					pvc.Annotations[f.optOut] = annotation
				}
			}
		}
		refusing := f.refusing()
		var kept []metav1.Object
		keep := func(pv *corev1.PersistentVolume, pvc *corev1.PersistentVolumeClaim) { kept = append(kept, pv, pvc) }
		keep(f.boundTo("nothing", []string{"n"}, nil, nil))
		f.boundTo("by-claim", []string{"n"}, nil, ofClaim("c", enabled))
		f.boundTo("by-class", []string{"n"}, ofClass("in", ""), ofClaim("in", ""))
		keep(f.boundTo("not-volume", []string{"n"}, ofClass("in", disabled), ofClaim("in", "")))
		keep(f.boundTo("not-claim", []string{"n"}, ofClass("in", ""), ofClaim("in", disabled)))
		keep(f.boundTo("misspelled", []string{"n"}, ofClass("in", ""), ofClaim("in", "Disabled")))
		keep(f.boundTo("not-class", []string{"n"}, ofClass("off", ""), ofClaim("off", enabled)))
		keep(f.boundIn(refusing, "not-namespace", []string{"n"}, ofClass("in", ""), ofClaim("in", "")))
		f.onlyWrites("DELETE persistentvolumeclaims/by-claim", "DELETE persistentvolumeclaims/by-class")
		f.start()
		f.claimDeleted("by-claim")
		f.claimDeleted("by-class")
		for _, obj := range kept {
			if _, ok := obj.(*corev1.PersistentVolume); ok {
				f.event("PersistentVolume", obj.GetName(), "NodeCleanupSkipped", f.optOut)
			}
		}
		f.stays(shortGrace, kept...)
	})
	t.Run("033_at_the_last_moment", func(t *testing.T) {
		f := scenario(t, nil)
		f.proxied(once(deletes, func() { f.says("PersistentVolumeClaim", "a", disabled) }))
		f.bound("a", "n")
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", "PersistentVolumeClaim")
		f.passed(time.Now(), shortGrace)
		if pvc := f.getClaim("a"); pvc.DeletionTimestamp != nil {
			t.Error("the claim is deleted")
		}
		if n := len(f.asked("DELETE " + claimA)); n != 1 {
			t.Errorf("%d deletions were sent, want 1", n)
		}
		f.metric(1, actionsTotal, "claim_delete", "conflict")
	})
	t.Run("034_retain", func(t *testing.T) {
		t.Run("skip", func(t *testing.T) {
			f := scenario(t, nil)
			pv, pvc := f.boundTo("a", []string{"n"}, retained, nil)
			f.onlyWrites()
			f.start()
			f.event("PersistentVolume", pv.Name, "NodeCleanupSkipped", "Retain")
			f.stays(2*shortGrace, pv, pvc)
		})
		t.Run("claim", func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup, f.cfg.NodeCleanupRetain = ModeVolumes, RetainClaim })
			f.boundTo("a", []string{"n"}, retained, nil)
			f.onlyWrites("DELETE " + claimA)
			f.start()
			f.claimDeleted("a")
			f.release("a")
			f.stays(2*shortGrace, f.getVolume("pv-a"))
		})
	})
	t.Run("035_claim_of_another_uid", func(t *testing.T) {
		const grace = 10 * time.Second // the claim is another one before it ends
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
		f.frozen("persistentvolumeclaims")
		_, old := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.missing("n")
		f.removeClaim("a")
		recreated := f.claim("a", func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.name("pv-a") })
		if recreated.UID == old.UID {
			t.Fatal("it is the same claim")
		}
		f.passed(time.Now(), grace)
		before := len(f.asked("GET " + claimA))
		f.passed(time.Now(), 10*time.Second)
		if n := len(f.asked("GET "+claimA)) - before; n > 3 {
			t.Errorf("%d attempts within 10s, want 3 at most", n)
		}
		f.untouched(recreated)
	})
	t.Run("035_claim_that_is_replaced_before_the_call", func(t *testing.T) {
		f := scenario(t, nil)
		replaced := make(chan *corev1.PersistentVolumeClaim, 1)
		f.proxied(once(deletes, func() {
			f.removeClaim("a")
			replaced <- f.claim("a", func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.name("pv-a") })
		}))
		f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		var pvc *corev1.PersistentVolumeClaim
		f.eventually("the claim is replaced before its deletion", func(context.Context) error {
			select {
			case pvc = <-replaced:
				return nil
			default:
				return errNone
			}
		})
		f.stays(2*shortGrace, pvc)
		if n := len(f.asked("DELETE " + claimA)); n != 1 {
			t.Errorf("%d deletions were sent, want 1", n)
		}
	})
	t.Run("035_conflict_and_retry", func(t *testing.T) {
		f := scenario(t, nil)
		f.proxied(once(deletes, func() {
			_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), "a", "application/merge-patch+json",
				annotationsPatch(map[string]any{"x.example.com/changed": "yes"}), metav1.PatchOptions{})
			if err != nil {
				t.Error(err)
			}
		}))
		f.bound("a", "n")
		f.start()
		f.claimDeleted("a")
		f.metric(1, actionsTotal, "claim_delete", "conflict")
	})
	t.Run("036_037_claim_in_use", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("m")
		_, used := f.bound("a", "n")
		f.bound("b", "n")
		_, ephemeral := f.bound("ephemeral-v", "n") // a generic ephemeral volume is named like its pod and the volume
		kept := []metav1.Object{
			used, ephemeral, f.pod("contradiction", "a", f.name("m")), f.pod("left", "b", f.name("n")),
			f.podWith("ephemeral", f.name("m"), corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
					AccessModes: ephemeral.Spec.AccessModes, StorageClassName: ephemeral.Spec.StorageClassName,
					Resources: ephemeral.Spec.Resources,
				}},
			}}),
		}
		f.pod("ended", "b", f.name("m"))
		kept = append(kept, f.podPhase("ended", corev1.PodSucceeded))
		f.onlyWrites("DELETE persistentvolumeclaims/b")
		f.start()
		f.claimDeleted("b")
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", "ClaimInUse")
		f.event("PersistentVolume", f.name("pv-ephemeral-v"), "NodeCleanupSkipped", "ClaimInUse")
		f.untouched(kept...)
	})
	t.Run("038_errors_of_the_api_server", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.Timeout = 500 * time.Millisecond })
		var broken atomic.Bool
		var asked atomic.Int32
		broken.Store(true)
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if broken.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/nodes/"+f.name("n")) {
				if asked.Add(1)%2 == 0 {
					<-r.Context().Done() // until the deadline of the controller
					return
				}
				http.Error(w, "broken", http.StatusInternalServerError)
				return
			}
			pass.ServeHTTP(w, r)
		})
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.atLeast(&asked, 5)
		f.untouched(pv, pvc)
		broken.Store(false)
		f.claimDeleted("a")
	})
	t.Run("041_forbidden", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.RetryIntervalMax = time.Minute })
		allow := f.without("delete", "", "persistentvolumeclaims")
		_, pvc := f.bound("a", "n")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupBlocked", "forbidden")
		const tries = 4
		f.eventually("the deletion is retried", func(context.Context) error {
			if n := len(f.asked("DELETE " + claimA)); n < tries {
				return fmt.Errorf("only %d times", n)
			}
			return nil
		})
		at, pause := f.asked("DELETE "+claimA), f.cfg.RetryIntervalStart
		for i := 1; i < tries; i++ {
			if d := at[i].Sub(at[i-1]); d < pause {
				t.Errorf("try %d was sent %v after the previous one, want %v at least", i+1, d, pause)
			}
			pause *= 2
		}
		f.untouched(pvc)
		allow()
		f.claimDeleted("a") // the process still runs and retries
	})
}

// permissions is what the role needs in mode claims, by resource; see contract 2.16.
func (f *fixture) permissions() []rbacv1.PolicyRule {
	read := []string{"get", "list", "watch"}
	with := func(verbs ...string) []string { return slices.Concat(read, verbs) }
	rule := func(group string, verbs []string, resources ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs}
	}
	return []rbacv1.PolicyRule{
		rule("", with("patch"), "nodes"), rule("", with("delete"), "persistentvolumeclaims"),
		rule("", with(), "persistentvolumes"), rule("", with(), "pods"), rule("", []string{"get"}, "namespaces"),
		rule("", with("create", "update"), "configmaps"),
		rule("storage.k8s.io", with(), "csinodes", "csidrivers", "storageclasses", "volumeattachments"),
		rule(f.logicalVolumes().Group, []string{"list", "patch", "delete"}, "logicalvolumes"),
	}
}

// without runs the controller as a user who has all permissions that mode claims needs, except verb for
// resource. allow grants that too.
func (f *fixture) without(verb, group, resource string) (allow func()) {
	f.Helper()
	user := f.name("without-" + verb + "-" + resource)
	var rules []rbacv1.PolicyRule
	for _, r := range f.permissions() {
		if r.APIGroups[0] == group && r.Resources[0] == resource {
			r.Verbs = slices.DeleteFunc(r.Verbs, func(v string) bool { return v == verb })
		}
		if len(r.Verbs) > 0 {
			rules = append(rules, r)
		}
	}
	f.grant(user, user, rules)
	f.user = f.cp.UserConfig(f, user)
	return func() {
		f.Helper()
		f.grant(user+"-more", user, []rbacv1.PolicyRule{{APIGroups: []string{group}, Resources: []string{resource}, Verbs: []string{verb}}})
	}
}

// grant creates a ClusterRole for a user.
func (f *fixture) grant(name, user string, rules []rbacv1.PolicyRule) {
	f.Helper()
	kubetest.NeedReal(f)
	rbac := f.client.RbacV1()
	_, err := rbac.ClusterRoles().Create(f.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules},
		metav1.CreateOptions{})
	f.must(err)
	_, err = rbac.ClusterRoleBindings().Create(f.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: "rbac.authorization.k8s.io", Name: user}},
	}, metav1.CreateOptions{})
	f.must(err)
}

// readAs answers GETs of a path with a changed object.
func readAs(w http.ResponseWriter, obj any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(obj)
}
