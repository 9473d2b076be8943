// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// parity sets what follows from the name of TopoLVM, for a driver of another name.
func parity(f *fixture) { f.cfg.NodeCleanupRetain, f.withResources = RetainClaim, true }

func manage(f *fixture) { f.cfg.NodeFinalizerMode = FinalizerManage }

// logicalVolumes returns a kind of this scenario: the sweep of one must not see the objects of another.
func (f *fixture) logicalVolumes() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: f.driver, Version: "v1", Resource: "logicalvolumes"}
}

// customResources is the kind LogicalVolume of a scenario. It implements [Resources].
type customResources struct {
	*fixture
	dynamic.NamespaceableResourceInterface
}

// customResources returns the kind as a controller for user sees it, or nil.
func (f *fixture) customResources(user *rest.Config) (Resources, error) {
	if !f.withResources {
		return nil, nil
	}
	client, err := dynamic.NewForConfig(user)
	if err != nil {
		return nil, err
	}
	if f.resourcesCached == nil {
		f.resourcesCached = make(signal)
		close(f.resourcesCached)
	}
	return ofDriver{customResources{f, client.Resource(f.logicalVolumes())}}, nil
}

// ofDriver is customResources as the driver passes it. It has no cache, and reports no changes: each pass lists.
type ofDriver struct{ customResources }

func (r ofDriver) OnChange(func(node string)) (kube.Registration, error) {
	return kube.Registration{Synced: r.resourcesCached}, nil
}

// signal is done when it is closed. It implements [cache.DoneChecker].
type signal chan struct{}

func (s signal) Name() string          { return "test" }
func (s signal) Done() <-chan struct{} { return s }

func (r ofDriver) List() (found []Resource) {
	all, err := r.customResources.List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return nil // the kind is not installed
	}
	for i := range all.Items {
		ours := slices.Contains(all.Items[i].GetFinalizers(), r.driver+"/logicalvolume")
		if res := resourceOf(&all.Items[i]); !res.Deleting || ours {
			found = append(found, res)
		}
	}
	return found
}

func (r ofDriver) Get(ctx context.Context, name string) (*Resource, error) {
	obj, err := r.customResources.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return nil, err
	}
	return ptr.To(resourceOf(obj)), nil
}

func (r ofDriver) Remove(ctx context.Context, res Resource, permitted func() error) error {
	if err := permitted(); err != nil {
		return err
	}
	patch := fmt.Sprintf(`{"metadata":{"uid":%q,"resourceVersion":%q,"finalizers":null,"annotations":{%q:"true"}}}`, res.UID, res.Version,
		r.driver+"/pendingdeletion")
	obj, err := r.Patch(ctx, res.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return r.Delete(ctx, res.Name, preconditions(obj))
}

func resourceOf(obj *unstructured.Unstructured) Resource {
	node, _, _ := unstructured.NestedString(obj.Object, "spec", "nodeName")
	handle, _, _ := unstructured.NestedString(obj.Object, "spec", "handle")
	return Resource{Name: obj.GetName(), Node: node, Handle: handle, Version: obj.GetResourceVersion(), UID: obj.GetUID(),
		Deleting: obj.GetDeletionTimestamp() != nil}
}

// installLogicalVolumes creates that kind.
func (f *fixture) installLogicalVolumes() customResources {
	f.Helper()
	r := f.logicalVolumes()
	body, err := json.Marshal(map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": r.Resource + "." + r.Group},
		"spec": map[string]any{
			"group": r.Group, "scope": "Cluster", "names": map[string]any{"kind": "LogicalVolume", "plural": r.Resource},
			"versions": []any{map[string]any{"name": r.Version, "served": true, "storage": true, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}},
		},
	})
	f.must(err)
	f.must(f.client.Discovery().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Content-Type", "application/json").Body(body).Do(f.Context()).Error())
	client, err := dynamic.NewForConfig(f.cp.Config())
	f.must(err)
	f.eventually("LogicalVolumes are served", func(ctx context.Context) error {
		_, err := client.Resource(r).List(ctx, metav1.ListOptions{})
		return err
	})
	return customResources{f, client.Resource(r)}
}

// create creates one that belongs to a node and, unless it is empty, to a volume.
func (c customResources) create(name, node, volume string) *unstructured.Unstructured {
	c.Helper()
	if volume != "" {
		volume = c.name(volume)
	}
	r := c.logicalVolumes()
	obj, err := c.Create(c.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": r.GroupVersion().String(), "kind": "LogicalVolume",
		"metadata": map[string]any{"name": name, "finalizers": []any{c.driver + "/logicalvolume"}},
		"spec":     map[string]any{"nodeName": c.name(node), "handle": volume},
	}}, metav1.CreateOptions{})
	c.must(err)
	return obj
}

func (c customResources) exists(ctx context.Context, name string) (bool, error) {
	_, err := c.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// deleted waits until custom resources do not exist.
func (c customResources) deleted(names ...string) {
	c.Helper()
	for _, name := range names {
		c.eventually("custom resource "+name+" is deleted", func(ctx context.Context) error {
			there, err := c.exists(ctx, name)
			if there {
				err = errors.New("it exists")
			}
			return err
		})
	}
}

// kept checks that custom resources exist and that their deletion was not requested.
func (c customResources) kept(names ...string) {
	c.Helper()
	for _, name := range names {
		obj, err := c.Get(c.Context(), name, metav1.GetOptions{})
		if err != nil || obj.GetDeletionTimestamp() != nil || len(obj.GetFinalizers()) == 0 {
			c.Errorf("custom resource %s: %v, %v", name, obj, err)
		}
	}
}

// same checks that a custom resource was not written.
func (c customResources) same(was *unstructured.Unstructured) {
	c.Helper()
	is, err := c.Get(c.Context(), was.GetName(), metav1.GetOptions{})
	c.must(err)
	if is.GetResourceVersion() != was.GetResourceVersion() {
		c.Errorf("custom resource %s was changed: %v", was.GetName(), is)
	}
}

// marked checks that a custom resource was marked, and had no finalizer, when it was deleted.
func (c customResources) marked(was *unstructured.Unstructured) {
	c.Helper()
	w, err := c.Watch(c.Context(), metav1.ListOptions{ResourceVersion: was.GetResourceVersion()})
	c.must(err)
	defer w.Stop()
	last := was
	for e := range w.ResultChan() {
		if obj, ok := e.Object.(*unstructured.Unstructured); ok && obj.GetName() == was.GetName() {
			if last = obj; e.Type == watch.Deleted {
				break
			}
		}
	}
	if last.GetAnnotations()[c.driver+"/pendingdeletion"] != "true" || len(last.GetFinalizers()) > 0 {
		c.Errorf("it was deleted as %v", last)
	}
}

func TestNodecontrollerScenarioNodes(t *testing.T) {
	t.Parallel()
	t.Run("007_claims_and_resources", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeMissingGrace = time.Hour })
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("a", "n")
		// The cache learns late that the last claim is being deleted.
		f.late("persistentvolumeclaims", 300*time.Millisecond)
		lv, other := resources.create("lv", "n", "pv-a"), resources.create("other", "keep", "")
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH logicalvolumes/lv", "DELETE logicalvolumes/lv", "PATCH nodes/n")
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.nodeDeleted("n")
		if there, err := resources.exists(t.Context(), "lv"); there || err != nil {
			t.Fatalf("the Node was released before its custom resource was deleted: %t, %v", there, err)
		}
		f.claimDeleted("a")
		resources.marked(lv)
		resources.same(other)
	})
	t.Run("008_skip", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.SkipNodeFinalize = true })
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		pv, pvc := f.bound("a", "n")
		lv := resources.create("lv", "n", "pv-a")
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.stays(shortGrace, pv, pvc)
		resources.same(lv)
	})
	t.Run("009_unbound_claims", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		other := f.claim("other", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Annotations[storagehelpers.AnnSelectedNode] = f.name("n")
			*pvc.Spec.StorageClassName = "of-another-driver"
		})
		ours := f.selecting("ours", "n") // the provisioner lets the scheduler select another node
		none := f.claim("none", func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Annotations[storagehelpers.AnnSelectedNode] = f.name("n")
			pvc.Spec.StorageClassName = nil
		})
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.stays(shortGrace, other, ours, none)
	})
	t.Run("010_affinity_mismatch", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		f.node("m")
		pv, pvc := f.boundTo("a", []string{"m"}, nil, func(pvc *corev1.PersistentVolumeClaim) {
			pvc.Annotations[storagehelpers.AnnSelectedNode] = f.name("n")
		})
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.stays(shortGrace, pv, pvc)
	})
	t.Run("011_086_bound_pair_and_its_pod", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		pv, _ := f.bound("a", "n")
		pod := f.pod("p", "a", f.name("n"))
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.observed("a")
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.claimDeleted("a")
		f.untouched(pod, pv)
		if len(f.getClaim("a").Finalizers) != 1 {
			t.Error("the controller removed the protection of the claim")
		}
	})
	t.Run("012_finalizer_twice", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer, "x.example.com/other", f.cfg.NodeFinalizer)
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.deleteNode("n")
		f.finalizers("n", "x.example.com/other")
	})
	t.Run("013_manage", func(t *testing.T) {
		f := scenario(t, manage)
		f.node("n")
		f.node("m") // without a volume
		f.volume("v", []string{"n"}, nil)
		f.onlyWrites("PATCH nodes/keep", "PATCH nodes/n", "PATCH nodes/m")
		f.start()
		f.finalizers("n", f.cfg.NodeFinalizer)
		f.finalizers("m", f.cfg.NodeFinalizer)
		f.registered("n", "")
		f.registered("m", "")
		f.stays(shortGrace)
		f.finalizers("n", f.cfg.NodeFinalizer)
		f.finalizers("m", f.cfg.NodeFinalizer)
		f.deleteNode("m")
		f.nodeDeleted("m")
	})
	t.Run("014_manage_terminating", func(t *testing.T) {
		f := scenario(t, manage)
		f.node("n", "x.example.com/other")
		f.must(f.client.CoreV1().Nodes().Delete(t.Context(), f.name("n"), metav1.DeleteOptions{}))
		node, err := f.client.CoreV1().Nodes().Get(t.Context(), f.name("n"), metav1.GetOptions{})
		f.must(err)
		f.onlyWrites("PATCH nodes/keep")
		f.start()
		f.finalizers("keep", f.cfg.NodeFinalizer)
		f.stays(shortGrace, node)
		// The API server refuses such a patch, so that the Node does not show whether one was sent.
		if n := len(f.asked("PATCH nodes/n")); n > 0 {
			t.Errorf("%d patches were sent", n)
		}
		if n := f.failures(); n > 0 {
			t.Errorf("%v errors were counted", n)
		}
	})
	t.Run("015_wait_for_others", func(t *testing.T) {
		const drain = "x.example.com/drain"
		waits := func(f *fixture) { f.cfg.NodeFinalizerWaitForOthers = true }
		t.Run("of_a_ready_node", func(t *testing.T) {
			f := scenario(t, waits)
			f.node("n", f.cfg.NodeFinalizer, drain)
			_, pvc := f.bound("a", "n")
			f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
			f.start()
			f.deleteNode("n")
			f.stays(shortGrace, pvc)
			f.finalizers("n", f.cfg.NodeFinalizer, drain)
			f.patchNode("n", fmt.Sprintf(`{"metadata":{"finalizers":["%s"]}}`, f.cfg.NodeFinalizer))
			f.nodeDeleted("n")
			f.claimDeleted("a")
		})
		t.Run("of_no_other_node", func(t *testing.T) {
			f := scenario(t, waits)
			f.node("n", f.cfg.NodeFinalizer, drain)
			f.unready("n")
			f.bound("a", "n")
			f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
			f.start()
			f.deleteNode("n")
			f.claimDeleted("a")
			f.finalizers("n", drain)
		})
	})
	t.Run("016_timeout", func(t *testing.T) {
		f := scenario(t, func(f *fixture) {
			f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerTimeout, f.cfg.NodeMissingGrace = time.Hour, 5*time.Second, time.Hour
		})
		f.node("n", f.cfg.NodeFinalizer)
		_, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH nodes/n")
		f.start()
		begin := time.Now()
		f.deleteNode("n")
		f.nodeDeleted("n")
		if d := f.asked("PATCH nodes/n")[0].Sub(begin); d < 4*time.Second { // the API stores whole seconds
			t.Errorf("finalizer removed after %v", d)
		}
		f.event("Node", f.name("n"), "NodeFinalizerTimeout", "5s")
		f.missing("n")
		f.stays(shortGrace, pvc)
	})
	t.Run("017_opt_out_outlives_the_node", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeDeleteGrace = time.Hour })
		f.node("n", f.cfg.NodeFinalizer)
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH nodes/n")
		// A process that exits between the two writes must not have released the Node first.
		var early atomic.Bool
		f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/nodes/"+f.name("n")) {
				all, err := f.records(r.Context())
				early.CompareAndSwap(false, err != nil || !all[f.name("n")].OptedOut)
			}
			pass.ServeHTTP(w, r)
		})
		f.start()
		f.deleteNode("n")
		f.untilRecord("n", "exists", func(n *LostNode) bool { return n != nil })
		f.says("Node", "n", disabled)
		f.nodeDeleted("n")
		if early.Load() {
			t.Error("the Node was released before the record had its opt-out")
		}
		f.optedOut("n")
		f.stays(2*shortGrace, pv, pvc)
		f.stop()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("018_controller_starts_later", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("a", "n")
		f.bound("b", "n")
		lv := resources.create("lv", "n", "pv-a")
		f.deleteNode("n")
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH logicalvolumes/lv", "DELETE logicalvolumes/lv",
			"DELETE persistentvolumeclaims/b", "PATCH nodes/n")
		f.start()
		f.nodeDeleted("n")
		f.claimDeleted("a")
		f.claimDeleted("b")
		resources.deleted("lv")
		resources.marked(lv)
	})
	t.Run("018_controller_starts_much_later", func(t *testing.T) { // in the grace, the cleanup can be canceled
		f := scenario(t, func(f *fixture) { f.cfg.ClockGap, f.cfg.NodeDeleteGrace = shortGrace, togetherGrace })
		f.node("n", f.cfg.NodeFinalizer)
		_, pvc := f.bound("a", "n")
		f.deleteNode("n")
		f.passed(time.Now(), togetherGrace+time.Second) // the API stores whole seconds
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		begin := time.Now()
		f.start()
		f.stays(shortGrace, pvc)
		f.nodeDeleted("n")
		f.claimDeleted("a")
		if d := f.asked("DELETE " + claimA)[0].Sub(begin); d < togetherGrace {
			t.Errorf("the claim was deleted after %v", d)
		}
	})
	t.Run("019_remove_finalizers", func(t *testing.T) {
		f := scenario(t, nil)
		nodes := []string{"a", "b", "c"}
		for _, n := range nodes {
			f.node(n, f.cfg.NodeFinalizer, "x.example.com/other")
		}
		f.onlyWrites("PATCH nodes/a", "PATCH nodes/b", "PATCH nodes/c")
		api := f.recorded()
		var plan, done strings.Builder
		f.must(RemoveFinalizers(t.Context(), f.cfg, api, false, &plan))
		for _, n := range nodes {
			f.finalizers(n, f.cfg.NodeFinalizer, "x.example.com/other")
			if !strings.Contains(plan.String(), f.name(n)) {
				t.Errorf("the plan lacks %s: %s", n, &plan)
			}
		}
		f.must(RemoveFinalizers(t.Context(), f.cfg, api, true, &done))
		for _, n := range nodes {
			f.finalizers(n, "x.example.com/other")
		}
		done.Reset()
		f.must(RemoveFinalizers(t.Context(), f.cfg, api, true, &done))
		if !strings.Contains(done.String(), "no Node has finalizer "+f.cfg.NodeFinalizer) {
			t.Errorf("without any: %q", &done)
		}
	})
	t.Run("020_kind_not_installed", func(t *testing.T) {
		f := scenario(t, parity)
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("a", "n")
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.claimDeleted("a")
	})
	t.Run("087_breaker_is_open", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
		f.node("n", f.cfg.NodeFinalizer)
		f.bound("x", "lost-x")
		f.bound("y", "lost-y")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites("PATCH nodes/n")
		f.start()
		f.metric(1, breakerOpen)
		f.deleteNode("n")
		f.nodeDeleted("n")
		all, err := f.records(t.Context())
		if n := all[f.name("n")]; err != nil || n.Held != HeldByBreaker || n.Node != f.name("n") {
			t.Errorf("the records are %+v, %v", all, err)
		}
		f.event("Node", f.name("n"), "NodeCleanupSkipped", "waits for an approval")
		f.stays(shortGrace, pv, pvc)
	})
	t.Run("088_leaked_resources", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		kept := resources.create("kept", "keep", "")
		resources.create("leaked", "never", "")
		f.onlyWrites("PATCH logicalvolumes/leaked", "DELETE logicalvolumes/leaked")
		f.start()
		begin := time.Now()
		resources.deleted("leaked")
		if d := f.asked("DELETE logicalvolumes/leaked")[0].Sub(begin); d < shortGrace-time.Second {
			t.Errorf("deleted after %v, want %v at least", d, shortGrace)
		}
		resources.same(kept)
	})
}

// TestPlannedRemoval: nodes that were drained before their deletion do not count for the breaker.
func TestPlannedRemoval(t *testing.T) {
	t.Parallel()
	cordon := func(f *fixture, n string) { f.patchNode(n, `{"spec":{"unschedulable":true}}`) }
	t.Run("drained", func(t *testing.T) {
		f := scenario(t, nil)
		nodes := []string{"n1", "n2", "n3"}
		for _, n := range nodes {
			f.node(n, f.cfg.NodeFinalizer)
			f.bound("c"+n, n)
			cordon(f, n)
		}
		f.start()
		f.observed("cn3")
		f.eventually("the cache of pods is complete", func(context.Context) error { // else no Node counts as drained
			if !f.c.pods.Synced() {
				return errors.New("it is not")
			}
			return nil
		})
		for _, n := range nodes {
			f.deleteNode(n)
		}
		for _, n := range nodes {
			f.claimDeleted("c" + n)
			f.nodeDeleted(n)
		}
		if open := f.messages("CSIDriver", f.driver, "NodeCleanupBreakerOpen"); len(open) > 0 {
			t.Errorf("the breaker opened: %q", open)
		}
		// A planned removal does not make room for an unplanned loss either, nor does it use it up.
		f.node("m")
		f.bound("m", "m")
		f.observed("m")
		f.deleteNode("m")
		f.claimDeleted("m")
	})
	t.Run("a_pod_uses_a_volume", func(t *testing.T) {
		f := scenario(t, nil)
		var claims []*corev1.PersistentVolumeClaim
		for _, n := range []string{"n1", "n2", "n3"} {
			f.node(n, f.cfg.NodeFinalizer)
			_, pvc := f.bound("c"+n, n)
			claims = append(claims, pvc)
			f.pod("p"+n, "c"+n, f.name(n))
			cordon(f, n)
		}
		f.start()
		f.observed("cn3")
		for _, n := range []string{"n1", "n2", "n3"} {
			f.deleteNode(n)
		}
		f.metric(1, breakerOpen)
		f.held("n3")
		f.stays(2*shortGrace, claims[2])
	})
	t.Run("a_pod_uses_a_volume_whose_claim_is_deleted", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.patchNode("n", `{"metadata":{"finalizers":["`+f.cfg.NodeFinalizer+`"]}}`)
		f.bound("c", "n")
		f.pod("p", "c", f.name("n"))
		cordon(f, "n")
		f.start()
		f.observed("c")
		f.deleteNode("n")
		f.claimDeleted("c")
		f.node("m")
		f.bound("m", "m")
		f.observed("m")
		f.deleteNode("m")
		f.held("m") // the breaker counts n
	})
}
