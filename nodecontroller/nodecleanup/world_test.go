// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestWorld checks what lists of the same pass and the cache decide together about host h, whose volume the cache has.
func TestWorld(t *testing.T) {
	for _, c := range []struct {
		name           string
		cached, listed bool // whether the cache, and the list of the pass, have Node h
		sameUID        bool
		want           presence
		stale          bool
	}{
		{"both have it", true, true, true, present, false},
		{"none has it", false, false, true, missing, false},
		{"the cache still has it", true, false, true, missing, true},
		{"the cache does not have it yet", false, true, true, unclear, false},
		{"the cache has an earlier one", true, true, false, unclear, true},
	} {
		s, _ := permitted(KindClaim, false)
		a := newAPI()
		a.bind("c", "h")
		node := &corev1.Node{ObjectMeta: a.meta("h")}
		o := objects{Now: noon, Listed: noon, Fresh: true, Nodes: map[string]*corev1.Node{}, Cached: map[string]*corev1.Node{}}
		o.Volumes = []*corev1.PersistentVolume{a.volumes["pv-c"]}
		s.TopologyNodeKey = testKey
		if c.listed {
			o.Nodes["h"] = node
		}
		if c.cached {
			o.Cached["h"] = node.DeepCopy()
			if !c.sameUID {
				o.Cached["h"].UID = "earlier"
			}
		}
		records := Records{Lost: map[string]LostNode{"h": {Value: "h", Node: "h"}}}
		h := newWorld(context.Background(), s, o, records, a.store).Hosts["h"]
		if h.Presence != c.want || h.Stale != c.stale {
			t.Errorf("%s: got %s, stale %v", c.name, h.Presence, h.Stale)
		}
	}
}

// TestVolumeThatIsNotCached checks that a volume which only a list of the pass has keeps itself and its custom resource.
func TestVolumeThatIsNotCached(t *testing.T) {
	s, _ := permitted(KindClaim, false)
	s.TopologyNodeKey = testKey
	a := newAPI()
	a.bind("c", "h")
	o := objects{Now: noon, Listed: noon, Fresh: true, VolumesListed: true, Volumes: []*corev1.PersistentVolume{a.volumes["pv-c"]},
		Resources: []Resource{{Name: "r", Node: "h", Handle: "handle-c", UID: "r"}}}
	h := newWorld(context.Background(), s, o, Records{}, newStore()).Hosts["h"]
	if len(h.Items) != 2 || h.Items[0].Unread == nil || h.Items[1].Unread == nil || h.Items[1].Resource == nil || !h.Used {
		t.Errorf("got %+v", h.Items)
	}
}

// TestNamesFromLists checks that a Node which has the value of a host only as its host name is read before a deletion.
func TestNamesFromLists(t *testing.T) {
	s, _ := permitted(KindClaim, false)
	s.TopologyNodeKey = testKey
	a := newAPI()
	node := &corev1.Node{ObjectMeta: a.meta("n")}
	node.Labels = map[string]string{corev1.LabelHostname: "h"}
	a.nodes["n"] = node
	for want, names := range map[presence][]string{present: {"n"}, missing: nil} {
		got, _, err := readHost(context.Background(), s, a.store, testKey, "h", "", names)
		if err != nil || got != want {
			t.Errorf("with %q: got %s, %v", names, got, err)
		}
	}
}
