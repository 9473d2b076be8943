// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestIndexOfDeletedNodesHasTheKey: Node n, the node of host id, opted out and was deleted. Its last state is that of host id
// once the topology key is known.
func TestIndexOfDeletedNodesHasTheKey(t *testing.T) {
	now := time.Now()
	const annotation, former = "opt-out", "former.example.com/node"
	node := func(uid types.UID, host string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: uid, Labels: map[string]string{worldKey: host}}}
	}
	optedOut := node("u", "id")
	optedOut.Annotations = map[string]string{annotation: disabled}
	register := func(i *index, key string) {
		i.setCSINode("keep", &storagev1.CSINodeDriver{Name: worldDriver, NodeID: "keep", TopologyKeys: []string{key}}, true)
	}
	for name, tc := range map[string]struct {
		known            string         // the key at the deletion
		first            func(i *index) // before the deletion
		before, keyed    func(i *index) // before the key is known, and how it becomes known
		exists, recorded bool
	}{
		"first_CSINode":         {},
		"key_of_the_records":    {keyed: func(i *index) { i.remember(worldKey) }},
		"another_key":           {known: former},
		"key_was_known":         {known: worldKey},
		"exists_with_the_value": {before: func(i *index) { i.setNode(node("v", "id")) }, exists: true},
		"exists_with_another_value": {before: func(i *index) {
			i.setNode(node("v", "other"))
		}},
		"another_value_was_deleted_too": {before: func(i *index) {
			i.setNode(node("v", "other"))
			i.dropNode(node("v", "other"), annotation, now)
		}},
		"same_value_was_deleted_before": {first: func(i *index) {
			i.dropNode(node("older", "id"), annotation, now.Add(-time.Second))
		}},
		"is_recorded": {before: func(i *index) {
			i.amend("id", "u", func(l *lastSeen) { l.recorded = true })
		}, recorded: true},
	} {
		t.Run(name, func(t *testing.T) {
			i := newIndex(worldDriver, "")
			if tc.known != "" {
				register(i, tc.known)
			}
			if tc.first != nil {
				tc.first(i)
			}
			i.setNode(optedOut)
			i.dropNode(optedOut, annotation, now)
			if tc.before != nil {
				tc.before(i)
			}
			if tc.keyed == nil {
				tc.keyed = func(i *index) { register(i, worldKey) }
			}
			tc.keyed(i)
			last, ok := i.lastSeen("id")
			if ok == tc.exists || ok && (last.uid != "u" || !last.optedOut || last.recorded != tc.recorded) {
				t.Errorf("the last state of the Node of host id is %+v (%v)", last, ok)
			}
			if other, ok := i.lastSeen("n"); ok {
				t.Errorf("host n, which does not exist, has %+v", other)
			}
			if host, ok := i.hostNamed("n"); tc.before == nil && (!ok || host != "id") {
				t.Errorf("the host of Node n is %q (%v)", host, ok)
			}
			if names := i.names.with("id"); tc.exists != (len(names) > 0) {
				t.Errorf("host id has Nodes %q", names)
			}
		})
	}
}

// TestNodeLeavesItsHost: a Node whose value changes is remembered for its former one, unless that is still a name of it.
func TestNodeLeavesItsHost(t *testing.T) {
	node := func(uid types.UID, host string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: uid}}
		if host != "" {
			n.Labels = map[string]string{worldKey: host}
		}
		return n
	}
	driver := &storagev1.CSINodeDriver{Name: worldDriver, NodeID: "id", TopologyKeys: []string{worldKey}}
	for name, tc := range map[string]struct {
		key    string
		change func(i *index)
		want   string // remembered hosts
	}{
		"another_value": {worldKey, func(i *index) { i.setNode(node("u", "v1")); i.setNode(node("u", "v2")) }, "[v1]"},
		"opted_out": {worldKey, func(i *index) {
			n := node("u", "v1")
			n.Annotations = map[string]string{CleanupAnnotation(worldDriver): disabled}
			i.setNode(n)
			i.setNode(node("u", "v2"))
		}, "[v1]"},
		"value_is_removed": {worldKey, func(i *index) { i.setNode(node("u", "v1")); i.setNode(node("u", "")) }, "[v1]"},
		"value_is_back": {worldKey, func(i *index) {
			i.setNode(node("u", "v1"))
			i.setNode(node("u", ""))
			i.setNode(node("u", "v1"))
		}, "[]"},
		"value_is_late":      {worldKey, func(i *index) { i.setNode(node("u", "")); i.setNode(node("u", "v1")) }, "[]"},
		"value_was_the_name": {worldKey, func(i *index) { i.setNode(node("u", "n")); i.setNode(node("u", "v1")) }, "[]"},
		"value_is_the_ID": {worldKey, func(i *index) {
			i.setCSINode("n", driver, true)
			i.setNode(node("u", "id"))
			i.setNode(node("u", ""))
		}, "[]"},
		"registers": {"", func(i *index) { // the driver is registered first, then the label appears
			i.setNode(node("u", ""))
			i.setCSINode("n", driver, true)
			i.setNode(node("u", "id"))
		}, "[]"},
		"driver_is_removed_for_some_time": {worldKey, func(i *index) {
			i.setNode(node("u", "v1"))
			i.setCSINode("n", driver, true)
			i.setCSINode("n", nil, true)
			i.setNode(node("u", "v1"))
			i.setCSINode("n", driver, true)
		}, "[]"},
		"another_Node": {worldKey, func(i *index) { i.setNode(node("u", "v1")); i.setNode(node("v", "v2")) }, "[]"},
		"is_deleted_then": {worldKey, func(i *index) {
			i.setNode(node("u", "v1"))
			i.setNode(node("u", "v2"))
			i.dropNode(node("u", "v2"), "", time.Now().Add(time.Second))
		}, "[v1 v2]"},
	} {
		t.Run(name, func(t *testing.T) {
			i := newIndex(worldDriver, tc.key)
			if tc.change(i); fmt.Sprint(sortedKeys(i.deleted)) != tc.want {
				t.Errorf("remembered are %+v, want %s", i.deleted, tc.want)
			}
			for host, l := range i.deleted {
				if l.name != "n" || l.uid != "u" || l.optedOut != (name == "opted_out") {
					t.Errorf("host %s has %+v", host, l)
				}
			}
			if host, ok := i.hostNamed("n"); name == "is_deleted_then" && (!ok || host != "v2") {
				t.Errorf("the host of Node n is %q (%v)", host, ok)
			}
			if i.registered("n") && name == "is_deleted_then" {
				t.Error("the driver is on a Node that does not exist")
			}
		})
	}
}
