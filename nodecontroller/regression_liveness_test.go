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
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// forgetAll has n know as little as at the start of a term.
func (n *namespaces) forgetAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wants = nil
}

// refusing is another namespace, which has opted out.
func (f *fixture) refusing() string {
	f.Helper()
	ns := kubetest.Namespace(f.T, f.cp)
	f.says(ns, disabled)
	return ns
}

// says has a namespace opt out, or not any more.
func (f *fixture) says(ns string, value any) {
	f.Helper()
	_, err := f.client.CoreV1().Namespaces().Patch(f.Context(), ns, types.MergePatchType, annotationsPatch(map[string]any{f.ann.cleanup: value}), metav1.PatchOptions{})
	f.must(err)
}

// claimIn makes a claim of the class of the driver in some namespace.
func (f *fixture) claimIn(ns, name, volume string, annotations map[string]string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations, Finalizers: []string{protectionOfClaims}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To(f.name("c")), VolumeName: volume,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(ns).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.must(err)
	return pvc
}

// boundIn is [fixture.bound] for a claim in some namespace.
func (f *fixture) boundIn(ns, name, node string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := f.claimIn(ns, name, f.name("pv-"+name), nil)
	pvc.Status.Phase = corev1.ClaimBound
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(ns).UpdateStatus(f.Context(), pvc, metav1.UpdateOptions{})
	f.must(err)
	f.phase(f.volume("pv-"+name, []string{node}, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: ns, Name: name, UID: pvc.UID}
	}), corev1.VolumeBound)
	return pvc
}

// lostIs waits until the breaker counts so many nodes as lost.
func (f *fixture) lostIs(want int) {
	f.Helper()
	t := f.term()
	kubetest.Eventually(f.T, fmt.Sprintf("%d nodes are lost", want), func(context.Context) error {
		if v, _ := t.ledger.judge(time.Now()); v.lost != want {
			return fmt.Errorf("it is %v", v)
		}
		return nil
	})
}

// TestNamespaceOptsOut has nodes go for whose volumes nobody wants anything done: they are
// none of those of which only a few may be lost.
func TestNamespaceOptsOut(t *testing.T) {
	change := func(f *fixture) {
		f.cfg.NodeCleanupWindow, f.cfg.NodeCleanupUnbound = shortGrace, UnboundDelete
		f.cfg.NodeMissingGrace = 2 * shortGrace
	}
	t.Run("before_its_node_goes", func(t *testing.T) {
		f := scenario(t, change)
		ten(f)
		ns := f.refusing()
		kept := f.boundIn(ns, "a", "n3")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.deleteNode("n3")
		f.event("PersistentVolume", f.name("pv-a"), reasonMissing, "Namespace")
		counted := func(when string) {
			if v, _ := f.term().ledger.judge(time.Now()); v.lost > 0 {
				t.Errorf("%s: %v", when, v)
			}
		}
		counted("once the namespace was read") // and not when the next look is due
		f.term().reassess(t.Context())
		counted("after the review")
		f.deleteNode("n1")
		f.claimDeleted("c1")
		f.held("c1", false)
		if open := f.events("CSIDriver", f.driver, reasonBreakerOpen); len(open) > 0 {
			t.Errorf("the breaker has opened: %q", open)
		}
		got, err := f.client.CoreV1().PersistentVolumeClaims(ns).Get(t.Context(), "a", metav1.GetOptions{})
		if err != nil || got.ResourceVersion != kept.ResourceVersion {
			t.Errorf("got %v, %v", got, err)
		}
		f.says(ns, nil) // and the next review knows
		f.passed(time.Now(), f.cfg.NodeCleanupWindow)
		f.term().reassess(t.Context())
		kubetest.Eventually(t, "claim a is deleted", func(ctx context.Context) error {
			got, err := f.client.CoreV1().PersistentVolumeClaims(ns).Get(ctx, "a", metav1.GetOptions{})
			if err == nil && got.DeletionTimestamp == nil {
				err = fmt.Errorf("it is there: %v", f.getVolume("pv-a").Annotations)
			}
			return err
		})
	})
	t.Run("before_the_term_begins", func(t *testing.T) {
		f := scenario(t, change)
		ten(f)
		ns := f.refusing()
		f.boundIn(ns, "a", "n3")
		f.boundIn(ns, "b", "n4")
		f.claimIn(ns, "u", "", map[string]string{storagehelpers.AnnSelectedNode: f.name("n5")})
		for _, n := range []string{"n1", "n3", "n4", "n5"} {
			f.deleteNode(n)
		}
		f.start()
		f.lostIs(1)
		f.claimDeleted("c1")
		f.held("c1", false)
		if open := f.events("CSIDriver", f.driver, reasonBreakerOpen); len(open) > 0 {
			t.Errorf("the breaker has opened: %q", open)
		}
	})
}

// watchEndsFor has the caches of a kind stay as they are at the start.
func (f *fixture) watchEndsFor(kind string) {
	f.Helper()
	f.watch = kubetest.Proxy(f.T, f.watch, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		switch query := r.URL.Query(); {
		case query.Get("watch") == "" || !strings.HasSuffix(r.URL.Path, "/"+kind):
			pass.ServeHTTP(w, r)
		case query.Get("sendInitialEvents") != "": // so that it lists
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
		default:
			<-r.Context().Done()
		}
	})
}

// TestCacheThatStaysBehind has the API server alone know why nothing is to be done.
func TestCacheThatStaysBehind(t *testing.T) {
	start := func(t *testing.T, kind string, change func(f *fixture)) (f *fixture, reads *atomic.Int32) {
		reads = new(atomic.Int32)
		f = scenario(t, change)
		f.watchEndsFor(kind)
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumes/"+f.name("pv-a")) {
				reads.Add(1)
			}
			pass.ServeHTTP(w, r)
		})
		f.node("n")
		return f, reads
	}
	readOnce := func(f *fixture, reads *atomic.Int32) {
		reads.Store(0)
		f.looks("pv-a")
		if n := reads.Load(); n > 2 { // one for a note, and one for what comes next
			f.Errorf("the volume was read %d times", n)
		}
	}
	t.Run("class_has_opted_out", func(t *testing.T) {
		f, reads := start(t, "storageclasses", nil)
		_, pvc := f.bound("a", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		f.patchClass("c", map[string]any{f.ann.cleanup: disabled})
		f.deleteNode("n")
		f.event("PersistentVolume", f.name("pv-a"), reasonSkipped, "StorageClass")
		readOnce(f, reads)
		f.untouched(pvc)
	})
	t.Run("volume_is_attached", func(t *testing.T) {
		f, reads := start(t, "volumeattachments", func(f *fixture) { f.cfg.NodeCleanup = CleanupVolumes })
		f.unclaimed("a", "n")
		f.start()
		f.seen("pv-a", placeHealthy)
		_, err := f.client.StorageV1().VolumeAttachments().Create(t.Context(), &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: f.name("va")},
			Spec: storagev1.VolumeAttachmentSpec{
				Attacher: f.driver, NodeName: f.name("n"), Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.name("pv-a"))},
			},
		}, metav1.CreateOptions{})
		f.must(err)
		f.deleteNode("n")
		f.event("PersistentVolume", f.name("pv-a"), reasonBlocked, f.name("va"))
		readOnce(f, reads)
		if pv := f.getVolume("pv-a"); pv.DeletionTimestamp != nil {
			t.Error("the volume is removed although it is attached")
		}
	})
}

// TestHeldRecordsAreRemoved has the driver, or somebody by hand, remove custom resources
// that are held: of what does not exist nobody would approve the clean-up.
func TestHeldRecordsAreRemoved(t *testing.T) {
	var records dynamic.NamespaceableResourceInterface
	nodes := []string{"n1", "n2", "n3", "n4"}
	f := fourGone(t, func(f *fixture) {
		parity(f)
		f.cfg.NodeCleanupResourceSweep = shortGrace
		records = f.installLogicalVolumes()
	}, func(f *fixture, node string) { f.logicalVolume(records, "lv"+node, node) })
	f.event("CSIDriver", f.driver, reasonBreakerOpen, "")
	f.gauge(breakerOpen, 1)
	for _, n := range nodes {
		f.lookedForRecords(n)
	}
	left, err := recordsLeft(records)
	f.must(err)
	if left == 0 {
		t.Fatal("nothing is held")
	}
	for _, n := range nodes {
		if n == "n1" { // this one is on its way out, and another controller keeps it
			if _, err := records.Patch(t.Context(), "lv"+n, types.MergePatchType, []byte(`{"metadata":{"finalizers":["x.example.com/y"]}}`), metav1.PatchOptions{}); err != nil && !kube.IsNotFound(err) {
				t.Error(err)
			}
		} else if _, err := records.Patch(t.Context(), "lv"+n, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil && !kube.IsNotFound(err) {
			t.Error(err)
		}
		if err := records.Delete(t.Context(), "lv"+n, metav1.DeleteOptions{}); err != nil && !kube.IsNotFound(err) {
			t.Error(err)
		}
	}
	for _, n := range nodes {
		f.lookedForRecords(n)
	}
	if _, held := f.term().ledger.judge(time.Now()); held {
		t.Errorf("what is gone is held: %q", f.term().ledger.keys())
	}
	f.event("CSIDriver", f.driver, reasonBreakerClosed, "")
}

// without has the controller be a user who may do everything that it needs but do verb to
// resource; the result allows that too.
func (f *fixture) without(verb, group, resource string) (allow func()) {
	f.Helper()
	user := f.name("without-" + verb + "-" + resource)
	var rules []rbacv1.PolicyRule
	for group, resources := range map[string][]string{
		"": {"nodes", "persistentvolumes", "persistentvolumeclaims", "pods", "namespaces"}, "storage.k8s.io": {"*"}, logicalVolumes(f).Group: {"logicalvolumes"},
	} {
		for _, r := range resources {
			verbs := []string{"get", "list", "patch", "delete"}
			if r == resource {
				verbs = slices.DeleteFunc(verbs, func(v string) bool { return v == verb })
			}
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{r}, Verbs: verbs})
		}
	}
	f.grant(user, rules)
	f.user = f.cp.UserConfig(user)
	return func() {
		f.Helper()
		f.grant(user+"-more", []rbacv1.PolicyRule{{APIGroups: []string{group}, Resources: []string{resource}, Verbs: []string{verb}}}, user)
	}
}

// forbidden waits until the metric says that so much is not done for want of a permission.
func (f *fixture) forbidden(want float64) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%v are forbidden", want), func(context.Context) error {
		families, err := f.reg.Gather()
		if err != nil {
			return err
		}
		got := 0.0
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == "storage_controller_cleanup_blocked" && m.GetLabel()[0].GetValue() == string(gateForbidden) {
					got = m.GetGauge().GetValue()
				}
			}
		}
		if got != want {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

// TestMissingPermission has the controller told what it may not do, and goes on when it may.
func TestMissingPermission(t *testing.T) {
	t.Run("for_the_cluster", func(t *testing.T) {
		f := scenario(t, nil)
		allow := f.without("get", "", "namespaces")
		f.start()
		f.event("CSIDriver", f.driver, reasonBlocked, metav1.NamespaceSystem)
		f.forbidden(1)
		allow()
		f.forbidden(0)
	})
	t.Run("for_the_sweep", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupResourceSweep = shortGrace })
		f.installLogicalVolumes()
		allow := f.without("list", logicalVolumes(f).Group, "logicalvolumes")
		f.start()
		f.event("CSIDriver", f.driver, reasonBlocked, "logicalvolumes")
		f.forbidden(1)
		allow()
		f.forbidden(0)
	})
	t.Run("for_a_node", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode = NodeFinalizerManage })
		allow := f.without("patch", "", "nodes")
		f.start()
		f.event("Node", f.name("keep"), reasonBlocked, "forbidden")
		f.forbidden(1)
		allow()
		f.finalizers("keep", f.cfg.NodeFinalizer)
		f.forbidden(0)
	})
	t.Run("for_a_claim_of_a_node_that_is_gone", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupUnbound = UnboundDelete })
		f.node("n")
		pvc := f.selecting("a", "n")
		allow := f.without("delete", "", "persistentvolumeclaims")
		f.start()
		f.seenNode("n", false)
		f.deleteNode("n")
		f.event("PersistentVolumeClaim", "a", reasonBlocked, "forbidden")
		f.event("CSIDriver", f.driver, reasonBlocked, "forbidden")
		f.forbidden(1)
		f.untouched(pvc)
		allow()
		f.claimDeleted("a")
		f.forbidden(0)
	})
}

// TestCleanupCommandWaits has a node come back while the command waits for the end of a
// claim, under a host name by which the volume means it.
func TestCleanupCommandWaits(t *testing.T) {
	for host, what := range map[string]string{"host": "of_the_volume", "n": "that_was_asked_for"} {
		t.Run(what, func(t *testing.T) {
			f := scenario(t, nil)
			f.bound("a", "host")
			f.patchVolume("pv-a", string(annotationsPatch(map[string]any{f.ann.lostNode: f.name("n")})))
			request := CleanupRequest{Driver: f.driver, Node: f.name("n"), Volumes: true, Yes: true, Wait: time.Minute}
			var out bytes.Buffer
			done := make(chan error, 1)
			go func() { done <- Cleanup(t.Context(), f.cfg, f.client, request, &out) }()
			f.claimDeleted("a")
			f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("nb")}))
			f.patchNode("nb", `{"status":{"addresses":[{"type":"Hostname","address":"`+f.name(host)+`"}]}}`, "status")
			f.release("a")
			if err := <-done; !errors.Is(err, ErrRefused) {
				t.Errorf("got %v, %s", err, out.String())
			}
			if pv := f.getVolume("pv-a"); pv.DeletionTimestamp != nil {
				t.Errorf("the volume is removed: %s", out.String())
			}
		})
	}
}
