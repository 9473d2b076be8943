// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/storage-controller/storage-controller/internal/topology"
)

func (m segmentChange) String() string {
	s := ""
	if m.added != nil {
		s += "+" + string(*m.added)
	}
	if m.removed != nil {
		s += "-" + string(*m.removed)
	}
	return s
}

func TestNodes(t *testing.T) {
	zone := func(v string) map[string]string { return map[string]string{"z": v, "r": "1"} }
	type step struct {
		do   func(*nodes) segmentChange
		want string
	}
	label := func(name string, labels map[string]string, want string) step {
		return step{func(n *nodes) segmentChange { return n.setLabels(name, labels, true) }, want}
	}
	deleted := func(name, want string) step {
		return step{func(n *nodes) segmentChange { return n.setLabels(name, nil, false) }, want}
	}
	register := func(name, want string, keys ...string) step {
		return step{func(n *nodes) segmentChange { return n.setKeys(name, keys, true) }, want}
	}
	unregister := func(name, want string) step {
		return step{func(n *nodes) segmentChange { return n.setKeys(name, nil, false) }, want}
	}
	for name, tt := range map[string]struct {
		steps []step
		left  map[segment]int
	}{
		"node first":           {[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z")}, map[segment]int{"z=a": 1}},
		"CSINode first":        {[]step{register("n1", "", "z"), label("n1", zone("a"), "+z=a")}, map[segment]int{"z=a": 1}},
		"CSINode without Node": {[]step{register("n1", "", "z")}, nil},
		"Node without CSINode": {[]step{label("n1", zone("a"), "")}, nil},
		"two nodes, one segment": {
			[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z"), label("n2", zone("a"), ""), register("n2", "", "z")},
			map[segment]int{"z=a": 2},
		},
		"the last one counts": {
			[]step{
				label("n1", zone("a"), ""), register("n1", "+z=a", "z"), label("n2", zone("a"), ""), register("n2", "", "z"),
				deleted("n1", ""), unregister("n2", "-z=a"),
			},
			nil,
		},
		"label comes late": {
			[]step{
				label("n1", map[string]string{"r": "1"}, ""), register("n1", "", "z"), label("n1", zone("a"), "+z=a"),
				label("n1", nil, "-z=a"),
			},
			nil,
		},
		"moves": {
			[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z"), label("n1", zone("b"), "+z=b-z=a")},
			map[segment]int{"z=b": 1},
		},
		"moves to a known one": {
			[]step{
				label("n1", zone("a"), ""), register("n1", "+z=a", "z"), label("n2", zone("b"), ""), register("n2", "+z=b", "z"),
				label("n1", zone("b"), "-z=a"),
			},
			map[segment]int{"z=b": 2},
		},
		"order of keys": {
			[]step{label("n1", zone("a"), ""), register("n1", "+r=1,z=a", "z", "r"), register("n1", "", "r", "z")},
			map[segment]int{"r=1,z=a": 1},
		},
		"other keys": {
			[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z"), register("n1", "+r=1,z=a-z=a", "z", "r")},
			map[segment]int{"r=1,z=a": 1},
		},
		"no keys": {
			[]step{label("n1", zone("a"), ""), register("n1", "+"), register("n1", "+z=a-", "z")}, map[segment]int{"z=a": 1},
		},
		"no keys, and unregisters": {[]step{label("n1", zone("a"), ""), register("n1", "+"), unregister("n1", "-")}, nil},
		"other labels": {
			[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z"), label("n1", map[string]string{"z": "a", "x": "y"}, "")},
			map[segment]int{"z=a": 1},
		},
		"back under its name": {
			[]step{label("n1", zone("a"), ""), register("n1", "+z=a", "z"), deleted("n1", "-z=a"), label("n1", zone("a"), "+z=a")},
			map[segment]int{"z=a": 1},
		},
		"deletion of unknown node": {[]step{deleted("n1", ""), unregister("n1", "")}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodes()
			for i, s := range tt.steps {
				if got := s.do(n).String(); got != s.want {
					t.Errorf("step %d: %q instead of %q", i, got, s.want)
				}
			}
			if !maps.Equal(n.segments, tt.left) {
				t.Errorf("the segments are %v instead of %v", n.segments, tt.left)
			}
		})
	}
}

func TestNodesLeaveTheKeysAlone(t *testing.T) {
	keys := []string{"z", "r"}
	newNodes().setKeys("n1", keys, true)
	if keys[0] != "z" {
		t.Error("the keys of the cache were sorted in place")
	}
}

func TestNodesForgetWhatIsGone(t *testing.T) {
	n := newNodes()
	for i := range 100 {
		name := fmt.Sprint(i)
		n.setLabels(name, map[string]string{"z": name}, true)
		n.setKeys(name, []string{"z"}, true)
	}
	for i := range 100 {
		n.setKeys(fmt.Sprint(i), nil, false)
		n.setLabels(fmt.Sprint(i), nil, false)
	}
	if len(n.known) > 0 || len(n.segments) > 0 {
		t.Errorf("%v and %v are left", n.known, n.segments)
	}
}

// The counts are those of a new computation, whatever happened before, and the moves add
// up to the segments that there are.
func TestNodesCountAsAComputationFromScratch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	type truth struct {
		labels             map[string]string
		keys               []string
		labelled, register bool
	}
	all, n := map[string]*truth{}, newNodes()
	present := map[segment]bool{}
	keySets := [][]string{nil, {"z"}, {"z", "r"}, {"r", "z"}, {"missing"}}
	for range 5000 {
		name := fmt.Sprint(random.IntN(8))
		node := all[name]
		if node == nil {
			node = &truth{}
			all[name] = node
		}
		var m segmentChange
		if random.IntN(2) == 0 {
			node.labelled = random.IntN(4) > 0
			node.labels = map[string]string{"z": fmt.Sprint(random.IntN(3)), "r": fmt.Sprint(random.IntN(2))}
			m = n.setLabels(name, node.labels, node.labelled)
		} else {
			node.register, node.keys = random.IntN(4) > 0, keySets[random.IntN(len(keySets))]
			m = n.setKeys(name, slices.Clone(node.keys), node.register)
		}
		if m.added != nil {
			if present[*m.added] {
				t.Fatalf("%q appeared and was there", *m.added)
			}
			present[*m.added] = true
		}
		if m.removed != nil {
			if !present[*m.removed] {
				t.Fatalf("%q vanished and was not there", *m.removed)
			}
			delete(present, *m.removed)
		}
		want := map[segment]int{}
		for _, node := range all {
			if s, missing := topology.OfNode(node.labels, node.keys); missing == nil && node.labelled && node.register {
				want[segment(s.String())]++
			}
		}
		if diff := cmp.Diff(want, n.segments); diff != "" {
			t.Fatal(diff)
		}
		if !slices.Equal(slices.Sorted(maps.Keys(present)), slices.Sorted(maps.Keys(n.segments))) {
			t.Fatalf("by the moves there are %v, and by the counts %v", present, n.segments)
		}
	}
}
