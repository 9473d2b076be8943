// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/storage-controller/storage-controller/election"
)

// ten creates nine nodes beside keep; n1 and n2 have a bound pair each.
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

// togetherGrace is the grace of nodes that are lost together. The controller must see all of the losses within it.
const togetherGrace = 5 * time.Second

// twoHeld returns a running controller that holds the claims c1 and c2 of two lost nodes of ten after their grace.
func twoHeld(t *testing.T, change func(f *fixture)) (f *fixture, claims []*corev1.PersistentVolumeClaim) {
	t.Helper()
	f = scenario(t, func(f *fixture) {
		f.cfg.NodeCleanupWindow, f.cfg.NodeMissingGrace = shortGrace, togetherGrace
		if change != nil {
			change(f)
		}
	})
	claims = ten(f)
	f.start()
	f.observed("c1")
	f.observed("c2")
	f.deleteNodes("n1", "n2")
	f.held("n1")
	f.held("n2")
	f.passed(time.Now(), f.cfg.NodeMissingGrace)
	return f, claims
}

func TestNodecontrollerScenarioBreaker(t *testing.T) {
	t.Parallel()
	t.Run("042_044_two_nodes_of_ten", func(t *testing.T) {
		f, claims := twoHeld(t, nil)
		f.onlyWrites("DELETE persistentvolumeclaims/c1")
		f.metric(1, breakerOpen)
		f.event("CSIDriver", f.driver, "NodeCleanupBreakerOpen", "2 of 10")
		f.stays(3*shortGrace, claims[0], claims[1])
		if n := f.times("CSIDriver", f.driver, "NodeCleanupBreakerOpen"); n != 1 {
			t.Errorf("%d events for one trip", n)
		}
		f.stop() // 044
		f.start()
		f.metric(1, breakerOpen)
		f.stays(2*shortGrace, claims[0], claims[1])
		f.approve("n1")
		f.claimDeleted("c1")
		f.notHeld("n1")
		f.stays(shortGrace, claims[1])
		f.held("n2")
		f.node("n2")
		f.noRecord("n2")
		f.metric(0, breakerOpen)
		f.event("CSIDriver", f.driver, "NodeCleanupBreakerClosed", "")
		f.untouched(claims[1])
	})
	t.Run("042_one_of_two_has_opted_in", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupScope, f.cfg.NodeMissingGrace = ScopeOptIn, togetherGrace })
		claims := ten(f)
		f.says("PersistentVolumeClaim", "c1", enabled)
		claims[0] = f.getClaim("c1")
		f.onlyWrites("DELETE persistentvolumeclaims/c1")
		f.start()
		f.observed("c1")
		f.observed("c2")
		f.deleteNodes("n1", "n2")
		f.held("n1")
		f.event("CSIDriver", f.driver, "NodeCleanupBreakerOpen", "2 of 10")
		f.stays(togetherGrace+shortGrace, claims[0], claims[1])
		f.notHeld("n2")
		f.approve("n1")
		f.claimDeleted("c1")
	})
	t.Run("nodes_that_return_one_after_the_other", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupWindow = time.Hour })
		claims := ten(f)
		f.onlyWrites("DELETE persistentvolumeclaims/c1")
		f.start()
		f.observed("c1")
		f.observed("c2")
		f.deleteNode("n1")
		f.claimDeleted("c1")
		f.node("n1")
		f.noRecord("n1")
		f.stop()
		f.start()
		f.deleteNode("n2")
		f.held("n2")
		f.stays(3*shortGrace, claims[1])
	})
	t.Run("043_approvals_without_effect", func(t *testing.T) {
		f, claims := twoHeld(t, nil)
		f.onlyWrites()
		for _, tc := range []struct{ approve, until, why string }{
			{"*", in(time.Hour), "* has no effect: the value"}, {f.name("n1"), in(time.Hour), f.name("n1") + " has no effect: the value"},
			{f.name("keep"), "", "no such node is lost"},
		} {
			f.changeRecords(func(cm *corev1.ConfigMap) {
				cm.Annotations[AnnotationApprove] = tc.approve
				if tc.until != "" {
					cm.Annotations[annotationApproveUntil] = tc.until
				}
			})
			f.eventAbout(tc.why)
		}
		f.stays(shortGrace, claims[0], claims[1])
		f.changeRecords(func(cm *corev1.ConfigMap) {
			if left := cm.Annotations[AnnotationApprove] + cm.Annotations[annotationApproveUntil]; left != "" {
				t.Errorf("left are %q", left)
			}
		})
	})
	t.Run("045_no_node_is_left", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMaxFraction, f.cfg.TopologyNodeKey = 1, f.key })
		f.node("n")
		_, pvc := f.bound("a", "n")
		f.onlyWrites()
		f.start()
		f.observed("a")
		f.deleteNode("keep")
		f.deleteNode("n")
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", "NoReadyNode")
		f.stays(shortGrace, pvc)
	})
	t.Run("045_no_node_is_ready", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupMaxFraction, f.cfg.TopologyNodeKey = 1, f.key })
		_, pvc := f.bound("a", "n")
		f.unready("keep")
		f.onlyWrites()
		f.start()
		f.event("PersistentVolume", f.name("pv-a"), "NodeCleanupSkipped", "NoReadyNode")
		f.stays(shortGrace, pvc)
	})
	t.Run("046_rate", func(t *testing.T) {
		const all = 30
		f := scenario(t, func(f *fixture) { f.cfg.CheckInterval = time.Hour })
		var may []string
		for i := range all {
			f.bound(fmt.Sprintf("c%d", i), "n")
			may = append(may, fmt.Sprintf("DELETE persistentvolumeclaims/c%d", i))
		}
		f.onlyWrites(may...)
		f.start()
		due := f.missing("n").Since.Add(shortGrace)
		var deletions []time.Time
		f.eventually("15 claims are deleted", func(context.Context) error {
			deletions = nil
			for _, line := range may {
				deletions = append(deletions, f.asked(line)...)
			}
			if n := len(deletions); n < 15 {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
		f.stop()
		took := time.Since(due)
		if n := len(f.asked("GET csinodes")); n == 0 || n > 1+int(took/time.Minute) {
			t.Errorf("all CSINodes were listed %d times in %v of deletions, want once per minute", n, took)
		}
		slices.SortFunc(deletions, time.Time.Compare)
		for i, at := range deletions {
			if d := at.Sub(due); float64(i+1) > 10.5+0.5*d.Seconds() {
				t.Errorf("deletion %d was sent %v after the grace, want 10 at most and one per 2s", i+1, d)
			}
		}
	})
	// TopoLVM has several objects per volume: 400 volumes would take longer than --node-finalizer-timeout.
	t.Run("046_no_rate_after_a_request", func(t *testing.T) {
		slow := func(f *fixture) { f.cfg.NodeCleanupQPS, f.cfg.NodeCleanupBurst = 1e-6, 1; parity(f) }
		begin := func(t *testing.T, change func(f *fixture)) (*fixture, customResources) {
			f := scenario(t, func(f *fixture) { slow(f); change(f) })
			resources := f.installLogicalVolumes()
			f.node("n", f.cfg.NodeFinalizer)
			f.bound("a", "n")
			f.bound("b", "n")
			resources.create("lv-a", "n", "pv-a")
			resources.create("lv-b", "n", "pv-b")
			f.start()
			f.observedNodes()
			return f, resources
		}
		cleaned := func(f *fixture, resources customResources) {
			for _, name := range []string{"a", "b"} {
				f.claimDeleted(name)
			}
			resources.deleted("lv-a", "lv-b")
		}
		t.Run("of_a_deletion", func(t *testing.T) {
			f, resources := begin(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour })
			f.deleteNode("n")
			f.nodeDeleted("n")
			cleaned(f, resources)
		})
		t.Run("of_an_approval", func(t *testing.T) {
			f, resources := begin(t, func(f *fixture) { f.cfg.NodeMissingGrace = time.Hour; f.cfg.NodeFinalizerMode = FinalizerOff })
			f.patchNode("n", noFinalizers)
			f.deleteNode("n")
			f.missing("n")
			f.approve("n")
			cleaned(f, resources)
		})
	})
	t.Run("047_two_replicas", func(t *testing.T) {
		f := scenario(t, nil)
		f.onlyWrites("DELETE persistentvolumeclaims/a", "DELETE persistentvolumeclaims/b")
		first, second := f.prepare(f.user), f.prepare(f.user)
		f.bound("a", "n")
		endFirst := f.campaign(first.c, "first")
		f.leaseOf("first")
		endSecond := f.campaign(second.c, "second")
		f.claimDeleted("a")
		deleted := func(p process) float64 {
			n, err := p.value(actionsTotal, "claim_delete", "ok")
			f.must(err)
			return n
		}
		// The counter follows the response, which may come after the event of the deletion.
		counted := func(leader process) {
			f.eventually("a counted deletion", func(context.Context) error {
				if deleted(leader) != 1 {
					return errors.New("the leader has not counted it")
				}
				return nil
			})
		}
		counted(first)
		if deleted(second) != 0 {
			t.Errorf("the standby sent %v deletions", deleted(second))
		}
		endFirst()
		f.bound("b", "n")
		f.claimDeleted("b")
		counted(second)
		endSecond()
		if deleted(first) != 1 || deleted(second) != 1 {
			t.Errorf("the first leader sent %v deletions, the second %v", deleted(first), deleted(second))
		}
	})
}

// eventAbout waits for an event of the driver, about any object, whose message contains part.
func (f *fixture) eventAbout(part string) {
	f.Helper()
	f.eventually("an event with "+part, func(context.Context) error {
		if found := f.messages("", "", ""); !slices.ContainsFunc(found, func(m string) bool { return strings.Contains(m, part) }) {
			return fmt.Errorf("there are %q", found)
		}
		return nil
	})
}

// campaign runs a controller while it holds the Lease of the scenario. end ends that.
func (f *fixture) campaign(c *Controller, identity string) (end func()) {
	f.Helper()
	lock := &resourcelock.LeaseLock{
		LeaseMeta: metav1.ObjectMeta{Namespace: f.ns, Name: "lease"}, Client: f.client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
	}
	cfg := election.Config{LeaseDuration: 15 * time.Second, RenewDeadline: 12 * time.Second, RetryPeriod: 500 * time.Millisecond}
	candidate, err := election.NewCandidate(cfg, lock, election.NewMetrics(prometheus.NewRegistry()))
	f.must(err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- candidate.Campaign(ctx, c.Run) }()
	f.Cleanup(cancel)
	return func() {
		cancel()
		<-done
	}
}

// leaseOf waits until a replica holds the Lease.
func (f *fixture) leaseOf(identity string) {
	f.Helper()
	f.eventually(identity+" leads", func(ctx context.Context) error {
		lease, err := f.client.CoordinationV1().Leases(f.ns).Get(ctx, "lease", metav1.GetOptions{})
		if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != identity) {
			err = errors.New("another replica does")
		}
		return err
	})
}
