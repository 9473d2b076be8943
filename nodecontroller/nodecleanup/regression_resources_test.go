// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestResourcesOfVolumesThatStay: custom resources may be needed to find the data of a volume that is kept.
func TestResourcesOfVolumesThatStay(t *testing.T) {
	t.Parallel()
	t.Run("of_terminating_nodes", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupRetain, f.cfg.NodeCleanupMinNodes = RetainSkip, 5 })
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.node("m", f.cfg.NodeFinalizer)
		_, kept := f.boundTo("a", []string{"n"}, nil, func(pvc *corev1.PersistentVolumeClaim) { pvc.Annotations[f.optOut] = disabled })
		_, retaining := f.boundTo("r", []string{"m"}, retained, nil)
		resources.create("lva", "n", "pv-a")
		resources.create("lvr", "m", "pv-r")
		f.onlyWrites("PATCH nodes/n", "PATCH nodes/m")
		f.start()
		f.observed("a")
		f.observed("r")
		f.deleteNode("n")
		f.deleteNode("m")
		f.nodeDeleted("n")
		f.nodeDeleted("m")
		f.stays(3*shortGrace, kept, retaining)
		resources.kept("lva", "lvr")
	})
	t.Run("of_a_namespace_that_opted_out", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		f.says("Namespace", f.ns, disabled)
		f.node("n")
		pv := f.released("a", "n", nil)
		resources.create("lv", "n", "pv-a")
		f.onlyWrites()
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.stays(3*shortGrace, pv)
		resources.kept("lv")
	})
	t.Run("that_did_not_opt_in", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeCleanupScope = ScopeOptIn })
		resources := f.installLogicalVolumes()
		f.node("n")
		pv := f.released("a", "n", nil)
		resources.create("lv", "n", "pv-a")
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.stays(3*shortGrace, pv)
		resources.kept("lv")
		f.says("StorageClass", "c", enabled)
		resources.deleted("lv")
	})
	t.Run("with_another_topology_key", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		f.node("n")
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = "legacy-" + f.key
		}, nil)
		resources.create("lv", "n", "pv-a")
		f.onlyWrites()
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.stays(3*shortGrace, pv, pvc)
		resources.kept("lv")
		f.metric(0, breakerOpen)
	})
	for name, change := range map[string]func(pv *corev1.PersistentVolume){
		"that_are_not_cached": retained,
		"that_are_not_cached_with_another_topology_key": func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = "legacy"
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, func(f *fixture) { parity(f); f.cfg.NodeFinalizerTimeout = shortGrace })
			resources := f.installLogicalVolumes()
			f.frozen("persistentvolumes")
			f.node("n", f.cfg.NodeFinalizer)
			resources.create("lv", "n", "pv-a")
			f.onlyWrites("PATCH nodes/n")
			f.start()
			pv, pvc := f.boundTo("a", []string{"n"}, change, nil)
			f.deleteNode("n")
			f.nodeDeleted("n")
			f.stays(3*shortGrace, pv, pvc)
			resources.kept("lv")
		})
	}
	t.Run("that_are_created_after_the_list", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { parity(f); f.cfg.TopologyNodeKey = f.key })
		resources := f.installLogicalVolumes()
		resources.create("lv", "n", "pv-a")
		started, created := make(chan struct{}), make(chan struct{})
		f.proxied(once(func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/logicalvolumes/lv") }, func() {
			<-started
			before := f.c.changes.Load()
			f.volume("pv-a", []string{"n"}, retained) // by an administrator
			f.eventually("the controller observes it", func(context.Context) error {
				if f.c.changes.Load() == before {
					return errors.New("it does not")
				}
				return nil
			})
			close(created)
		}))
		f.onlyWrites()
		f.start()
		close(started)
		<-created
		f.stays(2*shortGrace, f.getVolume("pv-a"))
		resources.kept("lv")
	})
	t.Run("of_a_node_with_another_name", func(t *testing.T) {
		f := scenario(t, func(f *fixture) {
			parity(f)
			f.cfg.NodeMissingGrace = togetherGrace // the node returns within it
		})
		resources := f.installLogicalVolumes()
		f.nodeAs("old", "id", "id")
		pv, pvc := f.bound("a", "id")
		resources.create("lv", "old", "pv-a")
		f.onlyWrites()
		f.start()
		f.observed("a")
		f.deleteNode("old")
		f.nodeAs("renamed", "id", "id")
		f.stays(2*togetherGrace, pv, pvc)
		resources.kept("lv")
	})
	t.Run("of_a_node_by_its_id", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		f.nodeAs("n", "n", "uuid")
		resources.create("lv", "uuid", "")
		f.onlyWrites()
		f.start()
		f.stays(3 * shortGrace)
		resources.kept("lv")
	})
}

// fourLost deletes four of five nodes at once, each with what create leaves behind.
func fourLost(t *testing.T, change func(f *fixture), create func(f *fixture, node string)) *fixture {
	t.Helper()
	f := scenario(t, func(f *fixture) {
		f.cfg.NodeMissingGrace = togetherGrace
		change(f)
	})
	nodes := []string{"n1", "n2", "n3", "n4"}
	for _, n := range nodes {
		f.node(n)
		create(f, n)
	}
	f.start()
	f.observedNodes()
	f.deleteNodes(nodes...)
	f.event("CSIDriver", f.driver, "NodeCleanupBreakerOpen", "")
	f.metric(1, breakerOpen)
	return f
}

// TestResourcesThatAreNotCached: nothing is cleaned up before the custom resources are known. Their Node is released at its timeout.
func TestResourcesThatAreNotCached(t *testing.T) {
	f := scenario(t, func(f *fixture) { parity(f); f.cfg.Timeout, f.cfg.NodeFinalizerTimeout = 5*time.Second, 2*shortGrace })
	f.resourcesCached = make(signal)
	resources := f.installLogicalVolumes()
	f.node("n", f.cfg.NodeFinalizer)
	pv, pvc := f.bound("a", "n")
	resources.create("lv", "n", "pv-a")
	f.start()
	f.event("CSIDriver", f.driver, "NodeCleanupBlocked", resourcesUnknown)
	f.deleteNode("n")
	f.event("Node", f.name("n"), "NodeFinalizerTimeout", "")
	f.nodeDeleted("n")
	f.stays(2*shortGrace, pv, pvc)
	resources.kept("lv")
	f.untilRecord("n", "says why", func(n *LostNode) bool { return n != nil && strings.Contains(n.Next, resourcesUnknown) })
	close(f.resourcesCached)
	resources.deleted("lv")
	f.claimDeleted("a")
}

// TestBreakerAndCustomResources: nodes of which only custom resources are left count and are held too.
func TestBreakerAndCustomResources(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T) (f *fixture, resources customResources) {
		f = fourLost(t, func(f *fixture) {
			parity(f)
			resources = f.installLogicalVolumes()
		}, func(_ *fixture, node string) { resources.create("lv"+node, node, "") })
		f.passed(time.Now(), f.cfg.NodeMissingGrace+shortGrace)
		return f, resources
	}
	t.Run("approved", func(t *testing.T) {
		f, resources := begin(t)
		list, err := resources.List(t.Context(), metav1.ListOptions{})
		f.must(err)
		if len(list.Items) < 3 {
			t.Errorf("%d of 4 are left without an approval", len(list.Items))
		}
		f.approve("n1", "n2", "n3", "n4")
		resources.deleted("lvn1", "lvn2", "lvn3", "lvn4")
		f.metric(0, breakerOpen)
	})
	t.Run("removed_by_the_driver", func(t *testing.T) {
		f, resources := begin(t)
		for _, n := range []string{"n1", "n2", "n3", "n4"} {
			patch := noFinalizers
			if n == "n1" { // being deleted, kept by another controller
				patch = `{"metadata":{"finalizers":["x.example.com/y"]}}`
			}
			_, _ = resources.Patch(t.Context(), "lv"+n, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			_ = resources.Delete(t.Context(), "lv"+n, metav1.DeleteOptions{})
		}
		f.metric(0, breakerOpen)
		f.event("CSIDriver", f.driver, "NodeCleanupBreakerClosed", "")
	})
}
