// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	s := DefaultSettings()
	s.Driver = "local.example.com"
	annotation := CleanupAnnotation(s.Driver)
	for _, value := range []string{enabled, disabled, "Disabled", "disable", "false", "off", ""} {
		m := metav1.ObjectMeta{Name: "x", UID: "u", Annotations: map[string]string{annotation: value}}
		node := &corev1.Node{ObjectMeta: m}
		node.DeletionTimestamp = &metav1.Time{}
		for _, kind := range []string{"PersistentVolume", "PersistentVolumeClaim", "StorageClass", "Namespace", "Node"} {
			f := facts{Item: &item{Owners: map[string]metav1.Object{kind: &m}}}
			if kind == "Node" {
				f.Hosts = []hostFacts{{Nodes: []*corev1.Node{node}}}
			}
			text := ""
			checkOptOut(s, f, func(_ time.Time, _, format string, args ...any) { text += fmt.Sprintf(format, args...) })
			want := []string{kind + " x has the annotation " + annotation + ": disabled"}
			switch {
			case value == enabled && text != "":
				t.Errorf("%s with the value %q: %q", kind, value, text)
			case value == enabled:
				want = nil
			case value != disabled:
				want = []string{
					fmt.Sprintf("annotation %s of %s x has the value %q", annotation, kind, value), "must be enabled or disabled",
					"treated as disabled",
				}
			}
			for _, part := range want {
				if !strings.Contains(text, part) {
					t.Errorf("%s with the value %q: %q, want %q", kind, value, text, part)
				}
			}
		}
		var d departures
		d.add(s, node, node, true)
		record := LostNode{}.deleting(s, &host{Nodes: []*corev1.Node{node}, Leaving: []*corev1.Node{node}})
		if last, _ := d.since(time.Now()); record.OptedOut != (value != enabled) || last[0].OptedOut != (value != enabled) {
			t.Errorf("the record of a Node with the value %q is %+v, its last state %+v", value, record, last)
		}
	}
}
