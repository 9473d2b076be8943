// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
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

// TestLists checks that lists decide about the next passes only if the caches had all of their Nodes and CSINodes.
func TestLists(t *testing.T) {
	a := newAPI()
	node, csiNode := &corev1.Node{ObjectMeta: a.meta("n")}, &storagev1.CSINode{ObjectMeta: a.meta("n")}
	other := &corev1.Node{ObjectMeta: a.meta("n")}
	for _, c := range []struct {
		name     string
		nodes    []*corev1.Node
		csiNodes []*storagev1.CSINode
		want     bool
	}{
		{"the same", []*corev1.Node{node}, []*storagev1.CSINode{csiNode}, true},
		{"the lists have less", nil, nil, true},
		{"the cache has another Node", []*corev1.Node{other}, nil, false},
		{"the cache lacks a Node", []*corev1.Node{node, {ObjectMeta: a.meta("m")}}, nil, false},
		{"the cache lacks a CSINode", nil, []*storagev1.CSINode{csiNode, {ObjectMeta: a.meta("m")}}, false},
	} {
		o := objects{Nodes: map[string]*corev1.Node{"n": node}, CSINodes: map[string]*storagev1.CSINode{"n": csiNode}}
		got := o.list(noon, c.nodes, c.csiNodes)
		if got != c.want || len(o.Nodes) != len(c.nodes) || len(o.CSINodes) != len(c.csiNodes) || len(o.Cached) != 1 || !o.Fresh {
			t.Errorf("%s: got %v: %+v", c.name, got, o)
		}
	}
}

// TestItems checks which items host h has, and which of them cannot be read.
func TestItems(t *testing.T) {
	s, _ := permitted(KindClaim, false)
	s.TopologyNodeKey = testKey
	a := newAPI()
	a.bind("c", "h")
	a.bind("d", "h")
	pv, shared, foreign := a.volumes["pv-c"], a.volumes["pv-d"].DeepCopy(), a.volumes["pv-c"].DeepCopy()
	shared.Spec.CSI.VolumeHandle = pv.Spec.CSI.VolumeHandle
	foreign.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = "legacy"
	own := Resource{Name: "r", Node: "h", Handle: pv.Spec.CSI.VolumeHandle, UID: "r"}
	for _, c := range []struct {
		name     string
		listed   []*corev1.PersistentVolume
		uncached bool
		res      Resource
		want     []Kind
		unread   error
	}{
		{"a volume and its custom resource", []*corev1.PersistentVolume{pv}, false, own, []Kind{KindClaim, KindResource}, nil},
		{"a volume that only a list has", []*corev1.PersistentVolume{pv}, true, own, []Kind{KindNone, KindResource}, errNotCached},
		{"two volumes with one handle", []*corev1.PersistentVolume{pv, shared}, false, own, []Kind{KindNone, KindNone, KindResource},
			errSharedHandle},
		{"a volume with another topology key", []*corev1.PersistentVolume{foreign}, false, own, []Kind{KindResource}, nil},
		{"a custom resource with the name of a deleted Node of another host", nil, false, Resource{Name: "r", Node: "h"},
			[]Kind{KindResource}, nil},
	} {
		src := newStore()
		for _, pv := range c.listed {
			if !c.uncached {
				src.volumes[pv.Name] = pv
			}
		}
		src.claims = a.claims
		o := objects{Now: noon, Listed: noon, Fresh: true, VolumesListed: true, Volumes: c.listed, Resources: []Resource{c.res},
			Departed: []departed{{Name: "h", Labels: map[string]string{testKey: "other"}, Deleted: true}}}
		var kinds []Kind
		h := newWorld(context.Background(), s, o, Records{}, src).Hosts["h"]
		for _, it := range h.Items {
			kinds = append(kinds, nextKind(s, it))
			if it.Unread != c.unread {
				t.Errorf("%s: %s is unread: %v, want %v", c.name, nextKind(s, it), it.Unread, c.unread)
			}
		}
		if !slices.Equal(kinds, c.want) || h.Used != (c.unread != nil) {
			t.Errorf("%s: got %q, used %v", c.name, kinds, h.Used)
		}
	}
}

// TestRequestsOfResources: a custom resource without a volume is kept while its claim may get the volume.
func TestRequestsOfResources(t *testing.T) {
	a := newAPI()
	a.bind("c", "h")
	pv, claim := a.volumes["pv-c"], a.claims["c"]
	other, waits := pv.DeepCopy(), claim.DeepCopy()
	other.Spec.CSI.VolumeHandle, waits.Spec.VolumeName, waits.Finalizers = "other", "", []string{kube.ProvisioningFinalizer}
	never := waits.DeepCopy()
	never.Finalizers = nil
	key, handle := claim.Namespace+"/"+claim.Name, pv.Spec.CSI.VolumeHandle
	for name, c := range map[string]struct {
		of    string
		uid   types.UID
		claim *corev1.PersistentVolumeClaim
		pv    *corev1.PersistentVolume
		want  *corev1.PersistentVolumeClaim
	}{
		"CreateVolume may be running":           {key, "", waits, nil, waits},
		"no CreateVolume is recorded":           {key, "", never, nil, nil},
		"its volume was created":                {key, "", never, pv, never},
		"a later list has its volume":           {key, "", claim, pv, claim},
		"the volume does not exist any more":    {key, "", claim, nil, nil},
		"the claim has another volume":          {key, "", claim, other, nil},
		"the claim was recreated":               {key, "old", waits, nil, nil},
		"its UID is known":                      {key, claim.UID, waits, nil, waits},
		"the claim does not exist":              {key, "", nil, nil, nil},
		"it is not known for which claim it is": {"", "", claim, pv, nil},
	} {
		src := newStore()
		if c.claim != nil {
			src.claims[claim.Name] = c.claim
		}
		if c.pv != nil {
			src.volumes[pv.Name] = c.pv
		}
		for _, state := range []Resource{{}, {Deleting: true}, {Unusable: true}} {
			res, want := state, c.want
			res.Name, res.Node, res.Handle, res.Claim, res.ClaimUID = pv.Name, "h", handle, c.of, c.uid
			it := item{Resource: &res, Owners: map[string]metav1.Object{}}
			if state.Deleting || state.Unusable && want == waits {
				want = nil
			}
			if err := it.readRequest(context.Background(), src); err != nil || it.Claim != want {
				t.Errorf("%s, %+v: %v, %v", name, state, it.Claim, err)
			}
		}
	}
}

// TestDepartures checks that a Node whose labels have changed stays in lists, unlike a deleted one, and the limit.
func TestDepartures(t *testing.T) {
	node := &corev1.Node{ObjectMeta: newAPI().meta("n")}
	for deleted, want := range map[bool]int{true: 0, false: 1} {
		var d departures
		d.add(DefaultSettings(), node, node, deleted)
		o := objects{}
		o.Departed, _ = d.since(time.Now())
		o.list(noon, []*corev1.Node{node}, nil)
		if len(o.Nodes) != want {
			t.Errorf("deleted %v: %d Nodes are left", deleted, len(o.Nodes))
		}
	}
	s, d := DefaultSettings(), departures{}
	for range maxDeparted {
		d.add(s, node, node, false)
	}
	if _, incomplete := d.since(time.Now()); incomplete != "" {
		t.Error(incomplete)
	}
	d.add(s, node, node, false)
	optedOut := node.DeepCopy()
	optedOut.Annotations = map[string]string{CleanupAnnotation(s.Driver): disabled}
	d.add(s, optedOut, optedOut, true)
	nodes, incomplete := d.since(time.Now())
	if len(nodes) != maxDeparted+1 || incomplete == "" {
		t.Errorf("%d Nodes are remembered, incomplete: %q", len(nodes), incomplete)
	}
	_, incomplete = d.since(time.Now().Add(departedAge + time.Minute))
	if incomplete != "" {
		t.Errorf("later: %s", incomplete)
	}
}

// TestBounded checks the limit of problems.
func TestBounded(t *testing.T) {
	many := make([]Reason, maxProblems+2)
	if got := bounded(many); len(got) != maxProblems+1 || got[maxProblems].Message != "there are 2 more problems" {
		t.Errorf("%d problems: %d are left, the last is %q", len(many), len(got), got[len(got)-1].Message)
	}
	if got := bounded(many[2:]); len(got) != maxProblems {
		t.Errorf("%d problems: %d are left", len(many)-2, len(got))
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
