// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestApprovalIsForOneLoss: a node returns, the process restarts, and the node is lost again.
func TestApprovalIsForOneLoss(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
	f.node("n")
	f.bound("a", "n")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.missing("n")
	f.approve("n")
	f.claimDeleted("a")
	f.node("n")
	f.event("PersistentVolume", f.name("pv-a"), "NodeReturned", "")
	f.noRecord("n")
	f.stop()
	f.start()
	_, pvc := f.bound("b", "n")
	f.observed("b")
	f.deleteNode("n")
	f.missing("n")
	f.stays(2*shortGrace, pvc)
	f.approve("n")
	f.claimDeleted("b")
}

// TestStaleCacheReleasesNoHold: a new leader still has the lost Node in its cache.
func TestStaleCacheReleasesNoHold(t *testing.T) {
	f := scenario(t, nil)
	claims := ten(f)
	f.start()
	f.observed("c2")
	f.deleteNode("n1")
	f.claimDeleted("c1")
	use, release := f.stale("nodes") // as before the loss of n2
	f.deleteNode("n2")
	f.held("n2")
	f.stop()
	use()
	f.start()
	f.passed(time.Now(), shortGrace)
	f.held("n2")
	release()
	f.stays(2*shortGrace, claims[1])
	f.held("n2")
	if returned := f.messages("PersistentVolume", f.name("pv-c2"), "NodeReturned"); len(returned) > 0 {
		t.Errorf("events of a return: %q", returned)
	}
}

// TestLimitOutlivesTheLeader: nodes that one leader cleaned up count for the next one.
func TestLimitOutlivesTheLeader(t *testing.T) {
	f := scenario(t, nil)
	claims := ten(f)
	f.start()
	f.observed("c1")
	f.deleteNode("n1")
	f.claimDeleted("c1")
	f.stop()
	f.start()
	f.observed("c2")
	f.deleteNode("n2")
	f.held("n2")
	f.stays(2*shortGrace, claims[1])
}

// TestNodeWithoutLabelIsReported: a node of the driver that lacks its label may be any lost node.
func TestNodeWithoutLabelIsReported(t *testing.T) {
	f := scenario(t, nil)
	_, pvc := f.bound("a", "n")
	for _, name := range []string{"bare", "bare2"} {
		f.node(name)
		f.label(name, "")
	}
	f.start()
	f.event("Node", f.name("bare"), "NodeCleanupBlocked", "Restore the label")
	f.event("CSIDriver", f.driver, "NodeCleanupBlocked", f.name("bare"))
	f.event("CSIDriver", f.driver, "NodeCleanupBlocked", f.name("bare2"))
	if asked := f.asked("GET csidrivers/" + f.driver); len(asked) != 1 {
		t.Errorf("the CSIDriver was read %d times in one pass", len(asked))
	}
	f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", f.name("bare"))
	f.stays(2*shortGrace, pvc)
	f.label("bare", "bare")
	f.label("bare2", "bare2")
	f.claimDeleted("a")
}

// TestHoldHasNoTimeout: neither the end of the window, nor a shorter list of lost nodes, nor an opt-out that is
// withdrawn releases a hold.
func TestHoldHasNoTimeout(t *testing.T) {
	t.Parallel()
	t.Run("the_other_volume_is_removed", func(t *testing.T) {
		f, claims := twoHeld(t, nil)
		f.removeVolume("pv-c2")
		f.stays(3*shortGrace, claims[0])
		f.held("n1")
		f.metric(1, breakerOpen)
	})
	t.Run("an_opt_out_is_withdrawn", func(t *testing.T) {
		f, _ := twoHeld(t, nil)
		f.says("StorageClass", "c", disabled)
		f.passed(time.Now(), shortGrace)
		f.says("PersistentVolumeClaim", "c2", disabled)
		f.says("StorageClass", "c", nil)
		f.stays(3*shortGrace, f.getClaim("c1"))
		f.held("n1")
		f.approve("n1")
		f.claimDeleted("c1")
	})
	t.Run("the_topology_key_is_unknown", func(t *testing.T) {
		f, claims := twoHeld(t, nil)
		f.rivalKey()
		f.stays(2*shortGrace, claims[0], claims[1])
		f.held("n1")
		f.metric(1, breakerOpen)
		f.deleteNode("rival")
		f.stays(2*shortGrace, claims[0], claims[1])
		if returned := f.messages("PersistentVolume", f.name("pv-c1"), "NodeReturned"); len(returned) > 0 {
			t.Errorf("events of a return: %q", returned)
		}
	})
	t.Run("the_records_are_deleted", func(t *testing.T) {
		f, claims := twoHeld(t, nil)
		f.must(f.client.CoreV1().ConfigMaps(f.ns).Delete(t.Context(), ConfigMapName(f.driver), metav1.DeleteOptions{}))
		f.held("n1")
		f.held("n2")
		f.stop()
		f.must(f.client.CoreV1().ConfigMaps(f.ns).Delete(t.Context(), ConfigMapName(f.driver), metav1.DeleteOptions{}))
		f.start() // all lost nodes are counted again
		f.held("n1")
		f.held("n2")
		f.stays(f.cfg.NodeMissingGrace+shortGrace, claims[0], claims[1])
	})
}

// rivalKey creates a node on which the driver reports another topology key.
func (f *fixture) rivalKey() {
	f.Helper()
	f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{
		Name: f.name("rival"), Driver: f.driver, TopologyKeys: []string{"rival-" + f.key},
	}))
	f.event("CSIDriver", f.driver, "NodeCleanupSkipped", "TopologyKeyUnknown")
}

// TestTopologyKeyIsUnknown: without a key nothing is deleted, and the records are kept.
func TestTopologyKeyIsUnknown(t *testing.T) {
	t.Parallel()
	t.Run("from_the_start", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.bound("a", "n")
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{
			Name: f.name("m"), Driver: f.driver, TopologyKeys: []string{f.key, "zone"},
		}))
		f.onlyWrites()
		f.start()
		f.event("CSIDriver", f.driver, "NodeCleanupSkipped", "TopologyKeyUnknown")
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("labels_are_zones", func(t *testing.T) {
		f := scenario(t, nil)
		f.label("keep", "other-zone")
		f.nodeAs("z1", "z", "")
		f.nodeAs("z2", "z", "")
		pv, pvc := f.bound("a", "z")
		f.onlyWrites()
		f.start()
		f.event("CSIDriver", f.driver, "NodeCleanupSkipped", "TopologyKeyUnknown")
		f.deleteNode("z1")
		f.deleteNode("z2")
		f.observedDeletion("z2")
		f.stays(2*shortGrace, pv, pvc)
		f.stop()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	for name, tc := range map[string]struct{ finalizer, set bool }{
		"opt_out_with_our_finalizer": {finalizer: true}, "opt_out_without": {}, "opt_out_and_the_key_is_set": {set: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, nil)
			f.node("n")
			if tc.finalizer {
				f.patchNode("n", `{"metadata":{"finalizers":["`+f.cfg.NodeFinalizer+`"]}}`)
			}
			f.says("Node", "n", disabled)
			_, pvc := f.bound("a", "n")
			f.start()
			f.observed("a")
			f.rivalKey()
			f.deleteNode("n")
			f.nodeDeleted("n")
			f.observedDeletion("n")
			if tc.set { // by a restart, while the key is unknown
				f.passed(time.Now(), shortGrace)
				f.stop()
				f.cfg.TopologyNodeKey = f.key
				f.start()
			} else {
				f.deleteNode("rival")
			}
			f.optedOut("n")
			f.stays(2*shortGrace, pvc)
			f.stop()
			f.start()
			f.stays(2*shortGrace, pvc)
		})
	}
}

// TestReturnByItsName: a node that returns with another label is still the lost one, until it is deleted again.
func TestReturnByItsName(t *testing.T) {
	const grace = 2 * shortGrace
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = grace })
	f.nodeAs("n", "id-1", "id-1")
	_, pvc := f.bound("a", "id-1")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.missing("id-1")
	f.nodeAs("n", "id-2", "id-2")
	f.event("PersistentVolume", f.name("pv-a"), "NodeReturned", "")
	f.stays(2*grace, pvc)
	again := time.Now()
	f.deleteNode("n")
	f.missing("id-1")
	f.claimDeleted("a")
	if d := f.asked("DELETE " + claimA)[0].Sub(again); d < grace {
		t.Errorf("deleted %v after the second loss", d)
	}
}

// TestNodesDeletedOneByOne: a volume of two nodes is lost with the second one, by which time the first one has a
// record.
func TestNodesDeletedOneByOne(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMinNodes = 5 })
	f.node("n", f.cfg.NodeFinalizer)
	f.node("m", "example.com/other")
	f.says("Node", "m", disabled)
	_, pvc := f.boundTo("a", []string{"n", "m"}, nil, nil)
	f.start()
	f.observed("a")
	f.deleteNode("m")
	f.deleteNode("n")
	f.nodeDeleted("n")
	f.untouched(pvc)
	f.patchNode("m", noFinalizers)
	f.nodeDeleted("m")
	f.optedOut("m")
	f.stays(3*shortGrace, pvc) // one of its nodes has opted out
}

// TestNodeHasAnotherName: a Node exists whose volumes name it by something other than its name.
func TestNodeHasAnotherName(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, change func(f *fixture)) (*fixture, *corev1.PersistentVolumeClaim) {
		f := scenario(t, change)
		f.nodeAs("n", "id", "id")
		_, pvc := f.bound("a", "id")
		f.onlyWrites("DELETE " + claimA)
		f.start()
		f.observed("a")
		return f, pvc
	}
	t.Run("label_is_removed", func(t *testing.T) {
		f, pvc := begin(t, nil)
		f.label("n", "")
		f.stays(2*shortGrace, pvc)
	})
	t.Run("label_is_changed", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.TopologyNodeKey = f.key }) // whose values may be any
		f.nodeAs("n", "v1", "")
		_, pvc := f.bound("a", "v1")
		f.onlyWrites()
		f.start()
		f.observed("a")
		f.label("n", "v2")
		f.untilRecord("v1", "names the Node", func(n *LostNode) bool { return n != nil && n.Node == f.name("n") })
		f.stays(3*shortGrace, pvc)
	})
	hostName := func(f *fixture, node, host string) {
		f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{Name: f.name(node)}))
		f.patchNode(node, `{"status":{"addresses":[{"type":"Hostname","address":"`+f.name(host)+`"}]}}`, "status")
	}
	t.Run("host_name", func(t *testing.T) {
		f := scenario(t, nil)
		hostName(f, "nb", "n")
		pv, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
	t.Run("host_name_that_is_not_cached", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 2 * shortGrace })
		f.frozen("nodes")
		_, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.missing("n")
		hostName(f, "nb", "n")
		f.stays(4*shortGrace, pvc)
	})
	t.Run("empty_value", func(t *testing.T) {
		f := scenario(t, nil)
		pv, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{""}
		}, nil)
		f.onlyWrites()
		f.start()
		f.stays(2*shortGrace, pv, pvc)
	})
}

// TestNodesUnheardOf: a node exists that the cache does not have. The API server is asked less and less often.
func TestNodesUnheardOf(t *testing.T) {
	f := scenario(t, nil)
	f.frozen("nodes")
	_, pvc := f.bound("a", "n")
	f.onlyWrites()
	f.start()
	f.node("n")
	f.stays(2*shortGrace, pvc)
	before := len(f.allRequests())
	const checks = 20
	f.passed(time.Now(), checks*checkInterval)
	if n := len(f.allRequests()) - before; n > 6*checks {
		t.Errorf("%d requests during %d checks", n, checks)
	}
}

// TestSlowLists: lists that took longer than a minute have the Nodes that they have.
func TestSlowLists(t *testing.T) {
	f := scenario(t, nil)
	slow := listed{at: time.Now().Add(-2 * listAge), nodes: []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n"}}}}
	term := term{Controller: f.prepare(f.user).c}
	if o := term.objects(slow); o.Nodes["n"] == nil || !o.Listed.Equal(slow.at) {
		t.Errorf("got %+v", o)
	}
}

// TestNoCheckForLong: a node returned and was lost again while no process checked. The grace starts again.
func TestNoCheckForLong(t *testing.T) {
	const grace = 4 * shortGrace
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace, f.cfg.ClockGap = time.Hour, 3*shortGrace })
	f.bound("a", "n")
	f.start()
	f.missing("n")
	f.stop()
	f.cfg.NodeMissingGrace = grace
	f.passed(time.Now(), grace)
	again := time.Now()
	f.start()
	f.claimDeleted("a")
	if d := f.asked("DELETE " + claimA)[0].Sub(again); d < grace {
		t.Errorf("deleted %v after the start", d)
	}
}

// TestOptInLater: a class opts in after the loss.
func TestOptInLater(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope = ScopeOptIn })
	f.bound("a", "n")
	f.start()
	f.event("PersistentVolumeClaim", "a", "NodeCleanupSkipped", f.optOut)
	f.says("StorageClass", "c", enabled)
	f.claimDeleted("a")
}

// TestOptOutOfANode: a Node that opted out was deleted.
func TestOptOutOfANode(t *testing.T) {
	t.Parallel()
	t.Run("returns_without_it", func(t *testing.T) {
		f := scenario(t, parity)
		resources := f.installLogicalVolumes()
		f.node("n", f.cfg.NodeFinalizer)
		f.says("Node", "n", disabled)
		_, pvc := f.bound("a", "n")
		resources.create("lv", "n", "pv-a")
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.optedOut("n")
		f.stays(3*shortGrace, pvc)
		resources.kept("lv")
		f.event("PersistentVolumeClaim", "a", "NodeCleanupSkipped", f.optOut)
		f.metric(0, breakerOpen)
		f.node("n") // without the annotation
		f.noRecord("n")
		f.deleteNode("n")
		f.claimDeleted("a")
		resources.deleted("lv")
	})
	t.Run("while_no_replica_leads", func(t *testing.T) {
		f := scenario(t, nil)
		f.nodeAs("n", "id", "id")
		f.says("Node", "n", disabled)
		_, pvc := f.bound("a", "id")
		f.process = f.prepare(f.user) // a standby
		f.observed("a")
		f.deleteNode("n")
		f.observedDeletion("n")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.c.Run(ctx) }()
		f.optedOut("id")
		f.stays(2*shortGrace, pvc)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Run("while_no_process_runs", func(t *testing.T) {
		f := scenario(t, nil)
		f.nodeAs("n", "id", "id")
		_, pvc := f.bound("a", "id")
		f.start()
		f.observed("a")
		f.says("Node", "n", disabled)
		f.optedOut("id")
		f.stop()
		f.deleteNode("n")
		f.start()
		f.missing("id")
		f.stays(2*shortGrace, pvc)
	})
	t.Run("is_withdrawn", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.says("Node", "n", disabled)
		f.start()
		f.optedOut("n")
		f.says("Node", "n", nil)
		f.noRecord("n")
	})
	t.Run("is_removed_from_the_record", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.says("Node", "n", disabled)
		_, pvc := f.bound("a", "n")
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.optedOut("n")
		f.stays(2*shortGrace, pvc)
		f.changeRecords(func(cm *corev1.ConfigMap) {
			cm.Data[f.name("n")] = strings.Replace(cm.Data[f.name("n")], `"optedOut":true`, `"optedOut":false`, 1)
		})
		f.claimDeleted("a")
	})
	for name, start := range map[string]bool{"cannot_be_recorded": false, "cannot_be_recorded_from_the_start": true} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerTimeout = shortGrace })
			var refuses atomic.Bool
			f.proxied(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if refuses.Load() && r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/configmaps") {
					answer(w, http.StatusForbidden, "Forbidden", denial)
					return
				}
				pass.ServeHTTP(w, r)
			})
			f.node("n", f.cfg.NodeFinalizer)
			f.node("m", f.cfg.NodeFinalizer)
			f.patchNode("n", fmt.Sprintf(`{"metadata":{"labels":{%q:"host-of-n"}}}`, corev1.LabelHostname)) // which is another name of it
			f.says("Node", "n", disabled)
			_, pvc := f.bound("a", "n")
			if refuses.Store(start); start {
				f.process = f.run(f.user) // start waits for the records
			} else {
				f.start()
			}
			f.observedNodes()
			refuses.Store(true)
			f.deleteNode("n")
			f.deleteNode("m")
			f.nodeDeleted("m")
			f.event("Node", f.name("n"), "NodeCleanupBlocked", ConfigMapName(f.driver))
			f.passed(time.Now(), shortGrace)
			f.finalizers("n", f.cfg.NodeFinalizer)
			refuses.Store(false)
			f.nodeDeleted("n")
			f.optedOut("n")
			f.untouched(pvc)
		})
	}
	t.Run("volume_is_not_cached", func(t *testing.T) {
		f := scenario(t, nil)
		f.frozen("persistentvolumes")
		f.node("n", f.cfg.NodeFinalizer)
		f.says("Node", "n", disabled)
		f.start()
		f.observedNodes()
		f.bound("a", "n")
		f.deleteNode("n")
		f.nodeDeleted("n")
		f.passed(time.Now(), shortGrace)
		f.optedOut("n")
	})
	t.Run("volume_is_created_later", func(t *testing.T) {
		f := scenario(t, nil)
		f.node("n")
		f.says("Node", "n", disabled)
		f.start()
		f.observedNodes()
		f.deleteNode("n")
		f.observedDeletion("n")
		_, pvc := f.bound("a", "n")
		f.stays(3*shortGrace, pvc)
	})
}

// TestFinalizerWasRemoved: an administrator removed our finalizer from a Node that is being deleted.
func TestFinalizerWasRemoved(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeDeleteGrace = 2 * shortGrace })
	f.node("n", f.cfg.NodeFinalizer, "example.com/other")
	pv, pvc := f.bound("a", "n")
	f.onlyWrites()
	f.start()
	f.deleteNode("n")
	f.untilRecord("n", "exists", func(n *LostNode) bool { return n != nil })
	f.patchNode("n", `{"metadata":{"finalizers":["example.com/other"]}}`)
	f.stays(3*shortGrace, pv, pvc)
}

// TestFinalizerIsIgnored: mode off never removes the finalizer that another mode has added. An event says so.
func TestFinalizerIsIgnored(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{ModeOff, ModeReport, ModeClaims} {
		t.Run(string(mode), func(t *testing.T) {
			f := scenario(t, func(f *fixture) { f.cfg.NodeFinalizerMode, f.cfg.NodeCleanup = FinalizerOff, mode })
			f.node("n", f.cfg.NodeFinalizer)
			f.node("m", "example.com/other")
			f.bound("a", "n")
			f.onlyWrites()
			f.start()
			f.observed("a")
			f.deleteNode("m")
			f.deleteNode("n")
			f.event("Node", f.name("n"), "NodeCleanupBlocked", "remove-finalizers --driver-name="+f.driver)
			f.finalizers("n", f.cfg.NodeFinalizer)
			if said := f.messages("Node", f.name("m"), "NodeCleanupBlocked"); len(said) > 0 {
				t.Errorf("events about a Node without our finalizer: %q", said)
			}
		})
	}
}

// TestNamespacesBeforeAHold: after the window, claims of namespaces that have opted out do not count for the breaker.
func TestNamespacesBeforeAHold(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupWindow = shortGrace })
	ten(f)
	ns := f.refusing()
	for i := range 4 {
		f.boundIn(ns, fmt.Sprintf("a%d", i), []string{"n3"}, nil, nil)
	}
	f.start()
	f.observed("c1")
	f.deleteNode("n3")
	f.missing("n3")
	f.passed(time.Now(), f.cfg.NodeCleanupWindow)
	f.deleteNode("n1")
	f.claimDeleted("c1")
	if open := f.messages("CSIDriver", f.driver, "NodeCleanupBreakerOpen"); len(open) > 0 {
		t.Errorf("the breaker opened: %q", open)
	}
	f.stop()
	f.start() // nor in the next term
	f.passed(time.Now(), 2*shortGrace)
	f.metric(0, breakerOpen)
	f.stop()
	f.says("Namespace", ns, nil)
	f.start() // namespaces are read again after some minutes, and by the next term
	f.claimDeletedIn(ns, "a0")
}

// TestDeposedLeader: a process whose Lease was taken over while it was suspended deletes nothing, and ends its term.
func TestDeposedLeader(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 3 * shortGrace })
	_, pvc := f.bound("a", "n")
	f.onlyWrites()
	p, done := f.prepare(f.user), make(chan error, 1)
	go func() { done <- p.c.Run(f.Context()) }()
	f.missing("n")
	f.changeRecords(func(cm *corev1.ConfigMap) { cm.Annotations[AnnotationHolder] = "the next leader" })
	f.eventually("the term has ended", func(context.Context) error {
		select {
		case err := <-done:
			if !errors.Is(err, election.ErrLost) {
				f.Errorf("the controller returned %v", err)
			}
			return nil
		default:
			return errors.New("it runs")
		}
	})
	f.stays(3*shortGrace, pvc)
}

// TestHolderIsChanged: an administrator who removes or changes the holder of the records stops no clean-up. The
// leader gives its Lease back, and the next term takes the records over.
func TestHolderIsChanged(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 3 * shortGrace })
	f.bound("a", "n")
	f.onlyWrites("DELETE persistentvolumeclaims/a")
	p := f.prepare(f.user)
	f.campaign(p.c, "first")
	f.missing("n")
	for _, holder := range []string{"", "somewhere else"} {
		before := f.holder(t.Context())
		f.changeRecords(func(cm *corev1.ConfigMap) {
			if delete(cm.Annotations, AnnotationHolder); holder != "" {
				cm.Annotations[AnnotationHolder] = holder
			}
		})
		f.eventually("the next term holds the records", func(ctx context.Context) error {
			if h := f.holder(ctx); h == "" || h == holder || h == before {
				return fmt.Errorf("they are held by %q", h)
			}
			return nil
		})
	}
	f.claimDeleted("a")
}
