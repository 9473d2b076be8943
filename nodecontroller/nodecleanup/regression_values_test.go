// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// reregister has the kubelet of a node register the driver with another topology key, and labels the Node for it.
func (f *fixture) reregister(node, key string) {
	f.Helper()
	f.registered(node, "")
	f.patchNode(node, fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, key, f.name(node)))
	patch := fmt.Sprintf(`{"spec":{"drivers":[{"name":%q,"nodeID":%q,"topologyKeys":[%q]}]}}`, f.driver, f.name(node), key)
	_, err := f.client.StorageV1().CSINodes().Patch(f.Context(), f.name(node), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	f.must(err)
}

// TestKeyChangesWhileANodeIsMissing: no volume names the lost node by the new key. Its record does not end, because its
// volumes are found again with the former key.
func TestKeyChangesWhileANodeIsMissing(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanupWindow = 0 })
	f.node("n")
	f.says("Node", "n", disabled)
	_, pvc := f.bound("a", "n")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.optedOut("n")
	stored := func(key string) {
		f.eventually("the records have the key "+key, func(ctx context.Context) error {
			cm, err := f.client.CoreV1().ConfigMaps(f.ns).Get(ctx, ConfigMapName(f.driver), metav1.GetOptions{})
			if err == nil && cm.Annotations[AnnotationTopologyKey] != key {
				err = fmt.Errorf("they have %v", cm.Annotations)
			}
			return err
		})
	}
	f.reregister("keep", "new."+f.key)
	stored("new." + f.key)
	f.stays(2*shortGrace, pvc)
	f.optedOut("n")
	f.stop()
	f.start()
	f.stays(2*shortGrace, pvc)
	f.reregister("keep", f.key)
	stored(f.key)
	f.stays(2*shortGrace, pvc)
	f.optedOut("n")
	f.removeClaim("a")
	f.removeVolume("pv-a")
	f.noRecord("n")
}

// TestNodeReturnsWithAnotherValue: volumes of the former value are kept while a Node has the recorded name. The record
// is written a few times, not in a loop.
func TestNodeReturnsWithAnotherValue(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace, f.cfg.NodeCleanupWindow = 2*shortGrace, shortGrace })
	f.nodeAs("n", "v1", "v1")
	_, pvc := f.bound("a", "v1")
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.missing("v1")
	writes := func() (n int) {
		for _, s := range f.allRequests() {
			if s.writes() && s.ofRecords() {
				n++
			}
		}
		return n
	}
	begin, before := time.Now(), writes()
	f.nodeAs("n", "v2", "v2")
	f.stays(4*shortGrace, pvc)
	// One write per second records the checks.
	if n, limit := writes()-before, int(time.Since(begin).Seconds())+5; n > limit {
		t.Errorf("the records were written %d times, want %d at most", n, limit)
	}
	f.stop()
	f.start()
	f.stays(4*shortGrace, pvc)
	f.deleteNode("n")
	f.claimDeleted("a")
	f.nodeAs("n", "v2", "v2")
	f.removeClaim("a")
	f.removeVolume("pv-a")
	f.noRecord("v1") // nothing of it is left
}

// TestNodeDoesNotWaitForTheDriver: the finalizer path deletes only claims. A volume in its --pv-release-grace does not
// delay the deletion of the Node.
func TestNodeDoesNotWaitForTheDriver(t *testing.T) {
	f := scenario(t, func(f *fixture) { f.cfg.NodeCleanup, f.cfg.PVReleaseGrace = ModeVolumes, time.Hour })
	f.node("n", f.cfg.NodeFinalizer)
	f.bound("a", "n")
	pv := f.released("b", "n", nil)
	f.start()
	f.observed("a")
	f.deleteNode("n")
	f.claimDeleted("a")
	f.nodeDeleted("n")
	f.untouched(pv)
}

// TestRecordsHaveTheMode: the ConfigMap names the mode of the process that wrote it last.
func TestRecordsHaveTheMode(t *testing.T) {
	f := scenario(t, nil)
	f.bound("a", "n")
	for _, mode := range []Mode{ModeReport, ModeClaims} {
		f.cfg.NodeCleanup = mode
		f.start()
		f.missing("n")
		f.eventually("the records have the mode", func(ctx context.Context) error {
			cm, err := f.client.CoreV1().ConfigMaps(f.ns).Get(ctx, ConfigMapName(f.driver), metav1.GetOptions{})
			if err == nil && cm.Annotations[AnnotationMode] != string(mode) {
				err = fmt.Errorf("they have %v, want %s", cm.Annotations, mode)
			}
			return err
		})
		f.stop()
	}
}

// TestMisspelledOptOut: any value of the annotation but enabled opts out. The reason names an invalid one.
func TestMisspelledOptOut(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	p := newPolicy(settingsOf(0), worldDriver)
	for _, value := range []string{enabled, disabled, "Disabled", "disable", "false", "off", ""} {
		m := metav1.ObjectMeta{Name: "x", Annotations: map[string]string{p.annotation: value}}
		check := func(kind, what, text string) {
			t.Helper()
			want := []string{kind + " x has the annotation " + p.annotation + ": disabled"}
			switch {
			case value == enabled && strings.Contains(text, p.annotation):
				t.Errorf("%s of a %s with the value %q: %q", what, kind, value, text)
			case value == enabled:
				return
			case value != disabled:
				want = []string{fmt.Sprintf("annotation %s of %s x has the value %q", p.annotation, kind, value),
					"must be enabled or disabled", "treated as disabled"}
			}
			for _, part := range want {
				if !strings.Contains(text, part) {
					t.Errorf("%s of a %s with the value %q: %q, want %q", what, kind, value, text, part)
				}
			}
		}
		for kind, obj := range map[string]metav1.Object{
			"PersistentVolume":      &corev1.PersistentVolume{ObjectMeta: m},
			"PersistentVolumeClaim": &corev1.PersistentVolumeClaim{ObjectMeta: m},
			"StorageClass":          &storagev1.StorageClass{ObjectMeta: m}, "Namespace": &corev1.Namespace{ObjectMeta: m},
		} {
			check(kind, "refusal", p.refusal(map[string]metav1.Object{kind: obj}, false))
		}
		node := deletingNode("x", "u", now, p.NodeFinalizer)
		node.Annotations = m.Annotations
		h := host{value: "x", state: deleting, nodes: []*corev1.Node{node}, recorded: true}
		h.record = LostNode{Value: "x", Node: "x", UID: "u"}
		check("Node", "check", fmt.Sprint(p.mayClean(target{hosts: []host{h}}, cluster{now: now})))
		h.record, _ = p.recordOf(h, cluster{now: now})
		check("Node", "event", p.decideHost(h, cluster{now: now}, false).message)
		i := newIndex(worldDriver, worldKey)
		i.dropNode(node, p.annotation, now)
		if last, _ := i.lastSeen("x"); h.record.OptedOut != (value != enabled) || last.optedOut != (value != enabled) {
			t.Errorf("the record of a Node with the value %q is %+v, its last state %+v", value, h.record, last)
		}
	}
}

// TestFailureBeforeTheTimeoutIsShown: a failure that waits for the timeout of our finalizer stays on /statusz.
func TestFailureBeforeTheTimeoutIsShown(t *testing.T) {
	r := newActors().begin(0)
	p := r.replicas[0]
	p.restart(r.w, r.settings)
	r.lead(p)
	denied := errors.New("denied")
	h := host{value: "n", state: deleting, nodes: []*corev1.Node{deletingNode("n", "u", time.Now(), r.settings.NodeFinalizer)}}
	for retry, want := range map[time.Duration]error{0: denied, r.settings.NodeFinalizerTimeout: workloop.Waiting{Cause: denied}} {
		p.c.cfg.RetryIntervalMax = retry
		if next, err := r.term.bounded(t.Context(), h, time.Time{}, denied); err != want || next.IsZero() != (err == denied) {
			t.Errorf("with retries every %v: next %v, error %v", retry, next, err)
		}
	}
}

// TestOptOutBeforeTheRelease: at the timeout, only the API server knows that a Node has opted out.
func TestOptOutBeforeTheRelease(t *testing.T) {
	for _, value := range []string{disabled, "Disabled"} {
		synctest.Test(t, func(t *testing.T) {
			r := newActors().begin(0)
			r.settings.NodeDeleteGrace = time.Hour
			p := r.replicas[0]
			r.w.createNode("keep", "keep", false)
			r.w.createNode("n", "n", true)
			r.w.bind("a", "n")
			p.restart(r.w, r.settings)
			r.lead(p)
			r.checkLost(r.term)
			r.w.deleteNode("n")
			p.catchUp(r.w)
			r.sync(r.term, "n")
			time.Sleep(r.settings.NodeFinalizerTimeout) // of the clock of synctest
			r.w.editNode("n", func(n *corev1.Node) { n.Annotations = map[string]string{p.c.policy.annotation: value} })
			r.sync(r.term, "n")
			if n, _ := r.term.records.get("n"); r.w.nodes["n"] == nil && !n.OptedOut {
				t.Errorf("a Node with the value %q is released, its record is %+v", value, n)
			}
			p.catchUp(r.w)
			r.sync(r.term, "n")
			if n, _ := r.term.records.get("n"); r.w.nodes["n"] != nil || !n.OptedOut {
				t.Errorf("the record of a Node with the value %q is %+v, it exists: %v", value, n, r.w.nodes["n"] != nil)
			}
		})
	}
}
