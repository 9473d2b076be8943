// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/topology"
)

// world is nodes with their labels, all with the same topology keys.
func world(keys []string, nodes ...map[string]string) *topology.Aggregate {
	a := topology.NewAggregate()
	for i, labels := range nodes {
		name := fmt.Sprintf("node-%d", i)
		a.SetNode(name, labels, true)
		a.SetKeys(name, keys, true)
	}
	return a
}

// text is topologies as "k=v,k=v; k=v".
func text(topologies []*csi.Topology) string {
	var out []string
	for _, t := range topologies {
		var pairs []string
		for k, v := range t.GetSegments() {
			pairs = append(pairs, k+"="+v)
		}
		slices.Sort(pairs)
		out = append(out, strings.Join(pairs, ","))
	}
	return strings.Join(out, "; ")
}

func allow(expressions ...corev1.TopologySelectorLabelRequirement) []corev1.TopologySelectorTerm {
	return []corev1.TopologySelectorTerm{{MatchLabelExpressions: expressions}}
}

func in(key string, values ...string) corev1.TopologySelectorLabelRequirement {
	return corev1.TopologySelectorLabelRequirement{Key: key, Values: values}
}

// TestAdmits compares admits with flatten.
func TestAdmits(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var allowed []corev1.TopologySelectorTerm
		for range random.IntN(3) {
			var term corev1.TopologySelectorTerm
			for _, key := range []string{"zone", "rack", "disk"}[:random.IntN(4)] {
				term.MatchLabelExpressions = append(term.MatchLabelExpressions, in(key, []string{"a", "b", "c"}[:random.IntN(4)]...))
			}
			allowed = append(allowed, term)
		}
		labels := map[string]string{}
		for _, key := range []string{"zone", "rack", "disk"} {
			if random.IntN(5) > 0 {
				labels[key] = string("abc"[random.IntN(3)])
			}
		}
		segments, err := flatten(allowed)
		want := slices.ContainsFunc(segments, func(s topology.Segment) bool { return s.SubsetOf(topology.SegmentOf(labels)) })
		if got := admits(allowed, labels); err != nil || got != want {
			t.Fatalf("%v admits %v: %t, want %t (%v)", allowed, labels, got, want, err)
		}
	}
}

func TestRequirement(t *testing.T) {
	zones := world(
		[]string{"zone"}, map[string]string{"zone": "z1"}, map[string]string{"zone": "z2"}, map[string]string{"zone": "z3"},
		map[string]string{"zone": "z2"},
	)
	racks := world(
		[]string{"zone", "rack"}, map[string]string{"zone": "z2", "rack": "A"}, map[string]string{"zone": "z1", "rack": "A"},
		map[string]string{"zone": "z1", "rack": "B"},
	)
	disks := world([]string{"zone", "rack", "disk"}, map[string]string{"zone": "z1", "rack": "r1", "disk": "ssd"})
	other := map[string]string{"other": "x"}
	unlabelled := world([]string{"zone"}, other, other, other, other)
	halfLabelled := world(
		[]string{"zone"}, map[string]string{"zone": "z1"}, map[string]string{"zone": "z1"}, map[string]string{"zone": "z2"},
		map[string]string{"zone": "z2"},
	)
	halfLabelled.SetKeys("node-0", []string{"gone", "zone"}, true)
	halfLabelled.SetKeys("node-1", []string{"gone", "zone"}, true)
	pools := world(
		[]string{"zone"}, map[string]string{"zone": "z1"}, map[string]string{"zone": "z2"},
		map[string]string{"zone": "z3", "outpost": "o"},
	)
	pools.SetKeys("node-2", []string{"zone", "outpost"}, true)
	halfGone := world([]string{"zone"}, map[string]string{"zone": "z1"})
	halfGone.SetNode("node-0", nil, false)
	hundred := strings.Split(strings.Repeat("v,", 100), ",")
	noKeys := world(nil, map[string]string{"zone": "z1"})
	tests := map[string]struct {
		known                *topology.Aggregate
		request              topologyRequest
		requisite, preferred string
		absent               bool
		err                  error
		text                 string // in err
	}{
		"selected node, strict": {
			known: zones, request: topologyRequest{strict: true, node: "node-1"}, requisite: "zone=z2", preferred: "zone=z2",
		},
		"selected node, strict, in the allowed topologies": {known: zones, request: topologyRequest{
			strict: true, node: "node-1", allowed: allow(in("zone", "z1", "z2")),
		},
			requisite: "zone=z2", preferred: "zone=z2"},
		"selected node, strict, not in the allowed topologies": {
			known: zones, request: topologyRequest{strict: true, node: "node-2", allowed: allow(in("zone", "z1"))}, err: errTopology,
		},
		"selected node": {known: zones, request: topologyRequest{node: "node-1"}, requisite: "zone=z1; zone=z2; zone=z3",
			preferred: "zone=z2; zone=z3; zone=z1"},
		"selected node, with allowed topologies": {known: zones, request: topologyRequest{
			node: "node-1", allowed: allow(in("zone", "z2", "z1")),
		},
			requisite: "zone=z1; zone=z2", preferred: "zone=z2; zone=z1"},
		"selected node, not in the allowed topologies": {
			known: zones, request: topologyRequest{node: "node-2", allowed: allow(in("zone", "z1"))}, err: errTopology,
		},
		"immediate, with allowed topologies": {known: zones, request: topologyRequest{
			immediate: true, claim: "testpvc", allowed: allow(in("zone", "z2", "z1", "z2")),
		},
			requisite: "zone=z1; zone=z2", preferred: "zone=z1; zone=z2"},
		"immediate": {known: zones, request: topologyRequest{immediate: true, claim: "data-web-0"},
			requisite: "zone=z1; zone=z2; zone=z3", preferred: "zone=z1; zone=z2; zone=z3"},
		"immediate, next of the StatefulSet": {known: zones, request: topologyRequest{immediate: true, claim: "data-web-1"},
			requisite: "zone=z1; zone=z2; zone=z3", preferred: "zone=z2; zone=z3; zone=z1"},
		"immediate without immediate topology": {known: zones, request: topologyRequest{claim: "x"}, absent: true},
		"immediate without immediate topology, with allowed ones": {
			known: zones, request: topologyRequest{claim: "testpvc", allowed: allow(in("zone", "z3"))}, requisite: "zone=z3",
			preferred: "zone=z3",
		},
		"two keys are ordered by key": {known: racks, request: topologyRequest{node: "node-0"},
			requisite: "rack=A,zone=z1; rack=A,zone=z2; rack=B,zone=z1", preferred: "rack=A,zone=z2; rack=B,zone=z1; rack=A,zone=z1"},
		"allowed topologies are multiplied out": {known: racks, request: topologyRequest{
			node: "node-0", allowed: allow(in("zone", "z1", "z2"), in("rack", "A", "B")),
		}, requisite: "rack=A,zone=z1; rack=A,zone=z2; rack=B,zone=z1; rack=B,zone=z2",
			preferred: "rack=A,zone=z2; rack=B,zone=z1; rack=B,zone=z2; rack=A,zone=z1"},
		"allowed topology with fewer keys than the node": {
			known: disks, request: topologyRequest{node: "node-0", allowed: allow(in("disk", "ssd"), in("zone", "z1"))},
			requisite: "disk=ssd,zone=z1", preferred: "disk=ssd,zone=z1",
		},
		"allowed topology with fewer keys than the node, strict": {
			known: disks, request: topologyRequest{strict: true, node: "node-0", allowed: allow(in("disk", "ssd"), in("zone", "z1"))},
			requisite: "disk=ssd,rack=r1,zone=z1", preferred: "disk=ssd,rack=r1,zone=z1",
		},
		"allowed topologies that are empty say nothing": {
			known: zones, request: topologyRequest{immediate: true, allowed: []corev1.TopologySelectorTerm{{}}}, absent: true,
		},
		"allowed topologies with too many combinations": {
			known: zones, err: errTopology,
			request: topologyRequest{immediate: true, allowed: allow(in("a", hundred...), in("b", hundred...), in("c", "1", "2"))},
		},
		"node without CSINode": {
			known: zones, request: topologyRequest{node: "other"}, err: errNodeNotFound,
		},
		"CSINode without Node": {
			known: halfGone, request: topologyRequest{node: "node-0"}, err: errNodeNotFound,
		},
		"driver is not on the selected node": {
			known: noKeys, request: topologyRequest{node: "node-0"}, err: errTopology, text: "set --feature-gates=Topology=false",
		},
		"selected node lacks a label": {
			known: unlabelled, request: topologyRequest{node: "node-0"}, err: errTopology, text: "Restart the node plugin there",
		},
		"driver is on no node": {
			known: topology.NewAggregate(), request: topologyRequest{immediate: true}, err: errTopology,
			text: "set --feature-gates=Topology=false",
		},
		"no node has the labels": {
			known: unlabelled, request: topologyRequest{immediate: true}, err: errTopology,
			text: `no Node has all of them as labels: ` +
				`node "node-0" lacks ["zone"], node "node-1" lacks ["zone"], node "node-2" lacks ["zone"], 1 more. Restart the node plugin`,
		},
		"key that no Node has as a label, on half of the nodes": {
			known: halfLabelled, request: topologyRequest{immediate: true, claim: "testpvc"}, requisite: "zone=z1; zone=z2",
			preferred: "zone=z1; zone=z2",
		},
		"immediate, two sets of keys": {
			known: pools, request: topologyRequest{immediate: true, claim: "testpvc"},
			requisite: "zone=z1; zone=z2; outpost=o,zone=z3", preferred: "outpost=o,zone=z3; zone=z1; zone=z2",
		},
		"selected node, two sets of keys": {
			known: pools, request: topologyRequest{node: "node-2"}, requisite: "outpost=o,zone=z3", preferred: "outpost=o,zone=z3",
		},
		"with allowed topologies the nodes of the driver do not matter": {
			known: topology.NewAggregate(), request: topologyRequest{immediate: true, claim: "c", allowed: allow(in("zone", "z"))},
			requisite: "zone=z", preferred: "zone=z",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := requirement(tt.request, tt.known)
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Fatalf("error %v, want %v %q", err, tt.err, tt.text)
			}
			if err != nil {
				return
			}
			if tt.absent {
				if got != nil {
					t.Errorf("got %v, want none", got)
				}
				return
			}
			if diff := cmp.Diff(
				[]string{tt.requisite, tt.preferred}, []string{text(got.GetRequisite()), text(got.GetPreferred())},
			); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSpread(t *testing.T) {
	for claim, want := range map[string][3]int{ // modulo 2, 3 and 4
		"testpvc": {0, 2, 2}, "testset-2": {1, 1, 1}, "testpvcA-testset-1": {0, 0, 0}, "testpvc-testset-4": {1, 0, 3},
		"data-web-0": {1, 0, 1}, "data-web-1": {0, 1, 2}, "data-my-db-10": {1, 2, 1}, "claim-4294967296": {0, 2, 2},
	} {
		if got := [3]int{spread(claim, 2), spread(claim, 3), spread(claim, 4)}; got != want {
			t.Errorf("%s: got %v, want %v", claim, got, want)
		}
	}
}

func TestAffinity(t *testing.T) {
	d := testDriver(func(d *driver) { d.topology = true })
	if got := d.affinityOf(&csi.Volume{AccessibleTopology: []*csi.Topology{{}, nil}}); got != nil {
		t.Errorf("topologies without segments: %v", got)
	}
	got := d.affinityOf(&csi.Volume{AccessibleTopology: []*csi.Topology{
		{Segments: map[string]string{"b": "2", "a": "1"}}, {}, {Segments: map[string]string{"a": "3"}},
	}})
	want := &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{
			MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "a", Operator: "In", Values: []string{"1"}}, {Key: "b", Operator: "In", Values: []string{"2"}},
			},
		},
		{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: "In", Values: []string{"3"}}}},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// FuzzRequirement builds a cluster, and the topologies that a class allows, from bytes.
// The preferred topologies are always the requisite ones in another order, without
// duplicates, and the selected node can reach the first of them.
func FuzzRequirement(f *testing.F) {
	f.Add([]byte("abcabc"), "data-web-0", true, false, uint8(1), "")
	f.Add([]byte(""), "", false, true, uint8(0), "ab")
	f.Add([]byte("abcabc"), "data-web-0", false, false, uint8(1), "ca")
	f.Fuzz(func(t *testing.T, labels []byte, claim string, immediate, strict bool, node uint8, allowed string) {
		a := topology.NewAggregate()
		for i := 0; i+1 < len(labels) && i < 40; i += 2 {
			name := fmt.Sprintf("node-%d", i/2)
			nodeLabels := map[string]string{"zone": string(labels[i : i+1])}
			if labels[i+1]%3 > 0 {
				nodeLabels["rack"] = string(labels[i+1 : i+2])
			}
			a.SetNode(name, nodeLabels, labels[i]%7 > 0)
			a.SetKeys(name, []string{"zone", "rack"}[:labels[i+1]%3], true)
		}
		r := topologyRequest{strict: strict, immediate: immediate, claim: claim}
		if node > 0 {
			r.node = fmt.Sprintf("node-%d", node-1)
		}
		if allowed != "" {
			r.allowed = allow(in("zone", strings.Split(allowed, "")...))
		}
		first, err := requirement(r, a)
		second, _ := requirement(r, a)
		if text(first.GetPreferred()) != text(second.GetPreferred()) {
			t.Fatal("two answers to one question")
		}
		if err != nil {
			if first != nil {
				t.Fatal("an answer and an error")
			}
			return
		}
		if err := r.check(first, a); err != nil {
			t.Fatalf("recorded: %v", err)
		}
		requisite, preferred := strings.Split(text(first.GetRequisite()), "; "), strings.Split(text(first.GetPreferred()), "; ")
		slices.Sort(requisite)
		slices.Sort(preferred)
		if !slices.Equal(requisite, preferred) {
			t.Fatalf("requisite %v, preferred %v", requisite, preferred)
		}
		if len(slices.Compact(requisite)) != len(preferred) {
			t.Fatalf("duplicates in %v", preferred)
		}
		if r.node == "" || first == nil {
			return
		}
		nodeLabels, _ := a.Labels(r.node)
		for k, v := range first.GetPreferred()[0].GetSegments() {
			if nodeLabels[k] != v {
				t.Fatalf("node with %v, preferred %v", nodeLabels, preferred)
			}
		}
		if strict && len(requisite) > 1 {
			t.Fatalf("strict, but %v", requisite)
		}
	})
}

func BenchmarkRequirement(b *testing.B) {
	for _, nodes := range []int{10, 5000} {
		a := topology.NewAggregate()
		for i := range nodes {
			name := fmt.Sprint("node-", i)
			a.SetNode(name, map[string]string{"zone": fmt.Sprint(i % 3)}, true)
			a.SetKeys(name, []string{"zone"}, true)
		}
		b.Run(fmt.Sprint(nodes, " nodes in 3 zones"), func(b *testing.B) {
			for b.Loop() {
				if _, err := requirement(topologyRequest{node: "node-1"}, a); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
