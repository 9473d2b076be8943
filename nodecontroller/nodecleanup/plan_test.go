// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// lastNode returns the last state of a deleted Node h.
func lastNode(uid types.UID, created, at time.Time) *departed {
	return &departed{Name: "h", UID: uid, Created: created, At: at}
}

// leavingNode returns a Node h that is being deleted.
func leavingNode(uid types.UID) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "h", UID: uid, CreationTimestamp: metav1.NewTime(ago(time.Hour))}}
	n.DeletionTimestamp, n.Finalizers = &metav1.Time{Time: ago(6 * time.Minute)}, []string{testFinalizer}
	return n
}

// TestNextRecord has the table of the design: the record of host h, by its presence.
func TestNextRecord(t *testing.T) {
	since, created := ago(5*time.Minute), ago(time.Hour)
	lost := LostNode{Node: "h", UID: "u", Since: since}
	held, approved := lost, lost
	held.Held, approved.Approved, approved.ApprovedAll = HeldByBreaker, ago(time.Minute), true
	out := LostNode{Node: "h", UID: "u", Since: since, OptedOut: true}
	garbage := LostNode{Held: HeldByBreaker, OptedOut: true, Unparsable: true, text: "garbage"}
	planned, acted := lost, lost
	planned.Planned, acted.Acted = true, ago(9*time.Minute)
	opts := leavingNode("u")
	annotate(opts, disabled)
	cordoned := leavingNode("u")
	cordoned.Spec.Unschedulable = true
	old := leavingNode("u")
	old.DeletionTimestamp.Time = ago(11 * time.Minute)
	foreign := cordoned.DeepCopy()
	foreign.Finalizers = []string{"example.com/other"}
	with := func(r LostNode, change func(*LostNode)) *LostNode { change(&r); return &r }
	for _, c := range []struct {
		name   string
		h      host
		before *LostNode // nil: none
		change func(w *world)
		want   *LostNode
	}{
		{"a new loss", host{Presence: missing, Last: lastNode("u", created, since)}, nil, nil,
			&LostNode{Node: "h", UID: "u", Since: noon}},
		{"a new loss without lists", host{Presence: missing}, nil, func(w *world) { w.Fresh = false }, nil},
		{"a new loss of a Node that had opted out", host{Presence: missing, Last: &departed{Name: "h", UID: "u", OptedOut: true}}, nil, nil,
			&LostNode{Node: "h", UID: "u", Since: noon, OptedOut: true}},
		{"a value that cannot be a key", host{Value: "a/b", Presence: missing}, nil, nil, nil},
		{"nothing is left of an unknown host", host{Presence: missing, Items: []*item{}}, nil, nil, nil},
		{"still missing", host{Presence: missing}, &approved, nil, &approved},
		{"the event of the deletion is late", host{Presence: missing, Last: lastNode("u", created, noon)}, &approved, nil, &approved},
		{"an earlier Node", host{Presence: missing, Last: lastNode("v", created, ago(6*time.Minute))}, &approved, nil, &approved},
		{"an earlier Node that is observed late", host{Presence: missing, Last: lastNode("v", created, noon)}, &held, nil,
			&LostNode{Node: "h", UID: "v", Since: noon, Held: HeldByBreaker}},
		{"an opt-out is not forgotten for a Node that is observed late", host{Presence: missing, Last: lastNode("v", created, noon)}, &out,
			nil,
			&LostNode{Node: "h", UID: "v", Since: noon, OptedOut: true}},
		{"a later Node was lost", host{Presence: missing, Last: lastNode("v", ago(time.Minute), noon)},
			with(held, func(r *LostNode) { r.Approved, r.OptedOut, r.Acted = since, true, since }), nil,
			&LostNode{Node: "h", UID: "v", Since: noon, Acted: since}},
		{"an approval ends with a Node that returned", host{Presence: missing, Last: lastNode("v", ago(time.Minute), noon)}, &approved, nil,
			&LostNode{Node: "h", UID: "v", Since: noon}},
		{"a since in the future", host{Presence: missing}, with(lost, func(r *LostNode) { r.Since = ago(-time.Hour) }), nil,
			&LostNode{Node: "h", UID: "u", Since: noon}},
		{"a since in the future, and its Node had opted out", host{Presence: missing,
			Last: &departed{Name: "h", UID: "u", OptedOut: true, At: noon}}, &LostNode{Since: ago(-time.Hour)}, nil,
			&LostNode{Node: "h", UID: "u", Since: noon, OptedOut: true}},
		{"ten minutes without a check", host{Presence: missing}, with(approved, func(r *LostNode) {
			r.Since, r.Planned = ago(time.Hour),
				true
		}),
			func(w *world) { w.Checked = ago(11 * time.Minute) }, &LostNode{Node: "h", UID: "u", Since: noon}},
		{"ten minutes without a check, and a cache that has the Node", host{Presence: missing, Stale: true},
			with(approved, func(r *LostNode) { r.Since = ago(time.Hour) }), func(w *world) { w.Checked = ago(11 * time.Minute) },
			&LostNode{Node: "h", UID: "u"}},
		{"a hold has no end", host{Presence: missing}, with(held, func(r *LostNode) { r.Since = ago(time.Hour) }),
			func(w *world) { w.Checked = ago(time.Hour) }, &LostNode{Node: "h", UID: "u", Since: noon, Held: HeldByBreaker}},
		{"the cache has a Node that the lists lack", host{Presence: missing, Stale: true}, &approved, nil, &approved},
		{"nothing is left", host{Presence: missing, Items: []*item{}}, &lost, nil, nil},
		{"nothing is left, without lists", host{Presence: missing, Items: []*item{}}, &lost, func(w *world) { w.Fresh = false }, &lost},
		{"nothing is left in the window", host{Presence: missing, Items: []*item{}}, &acted, nil, &acted},
		{"nothing is left, as far as it is known", host{Presence: missing, Items: []*item{}}, &lost,
			func(w *world) { w.Incomplete = resourcesUnknown }, &lost},
		{"a volume names it by another key", host{Presence: missing, Items: []*item{}, Mentioned: true}, &lost, nil, &lost},
		{"nothing is left of a held host", host{Presence: missing, Items: []*item{}}, &held, nil, &held},
		{"nothing is left of a held host, with a list of volumes", host{Presence: missing, Items: []*item{}}, &held,
			func(w *world) { w.VolumesListed = true }, nil},
		{"nothing is left of a host that opted out", host{Presence: missing, Items: []*item{}}, &out, nil, &out},
		{"nothing is known without a topology key", host{Presence: missing, Items: []*item{}}, &out,
			func(w *world) { w.KeyProblem, w.VolumesListed = "unknown", true }, &out},
		{"a record that cannot be parsed", host{Presence: missing}, &garbage, nil, &garbage},
		{"a record that cannot be parsed, and the Node exists", host{Presence: present}, &garbage, nil, &garbage},
		{"returned", host{Presence: present}, &held, nil, nil},
		{"returned, by the cache", host{Presence: present}, &held, func(w *world) { w.Fresh = false }, &held},
		{"returned in the window", host{Presence: present}, &acted, nil, &LostNode{Acted: acted.Acted}},
		{"a planned removal, returned in the window", host{Presence: present},
			with(acted, func(r *LostNode) { r.Planned = true }), nil, nil},
		{"unclear", host{Presence: unclear}, with(approved, func(r *LostNode) {
			r.Held, r.Planned, r.OptedOut = HeldByBreaker, true,
				true
		}), nil,
			&LostNode{Node: "h", UID: "u", Held: HeldByBreaker, OptedOut: true}},
		{"unclear, by the cache", host{Presence: unclear}, &approved, func(w *world) { w.Fresh = false }, &approved},
		{"unclear, and unknown", host{Presence: unclear}, nil, nil, nil},
		{"unclear, and approved while a Node that may be it exists", host{Presence: unclear, Nodes: []*corev1.Node{leavingNode("u")}},
			with(approved, func(r *LostNode) { r.Since = time.Time{} }), nil, &LostNode{Node: "h", UID: "u"}},
		{"unclear, and its Node is being deleted and opts out", host{Presence: unclear, Leaving: []*corev1.Node{opts},
			Nodes: []*corev1.Node{opts}, Items: []*item{}}, nil, nil, &LostNode{Node: "h", UID: "u", OptedOut: true}},
		{"unclear, and its Node had opted out", host{Presence: unclear, Last: &departed{Name: "h", UID: "u", OptedOut: true}}, nil, nil,
			&LostNode{Node: "h", UID: "u", OptedOut: true}},
		{"being deleted", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}}, nil, func(w *world) { w.Fresh = false },
			&LostNode{Node: "h", UID: "u"}},
		{"being deleted without volumes", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}, Items: []*item{}}, nil, nil,
			nil},
		{"being deleted, and opts out", host{Presence: deleting, Leaving: []*corev1.Node{opts}, Nodes: []*corev1.Node{opts},
			Items: []*item{}}, nil, nil,
			&LostNode{Node: "h", UID: "u", OptedOut: true}},
		{"an administrator has opted it out", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}},
			&LostNode{Node: "h", UID: "u", OptedOut: true}, nil, &LostNode{Node: "h", UID: "u", OptedOut: true}},
		{"being deleted, unobserved for ten minutes", host{Presence: deleting, Leaving: []*corev1.Node{old}}, nil,
			func(w *world) { w.Fresh = false }, &LostNode{Node: "h", UID: "u", Restarted: noon}},
		{"being deleted, without a check for ten minutes", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}},
			&LostNode{Node: "h", UID: "u", Planned: true, Approved: since, Restarted: ago(time.Hour)},
			func(w *world) { w.Checked = ago(11 * time.Minute) }, &LostNode{Node: "h", UID: "u", Restarted: noon}},
		{"being deleted, without a check since the grace started again", host{Presence: deleting, Leaving: []*corev1.Node{old}},
			&LostNode{Node: "h", UID: "u", Restarted: since}, func(w *world) { w.Checked = time.Time{} },
			&LostNode{Node: "h", UID: "u", Restarted: since}},
		{"being deleted for ten minutes, with checks", host{Presence: deleting, Leaving: []*corev1.Node{old}},
			&LostNode{Node: "h", UID: "u"}, nil, &LostNode{Node: "h", UID: "u"}},
		{"unclear, without a check for ten minutes", host{Presence: unclear, Nodes: []*corev1.Node{old}}, &LostNode{Node: "h", UID: "u"},
			func(w *world) { w.Checked = ago(11 * time.Minute) }, &LostNode{Node: "h", UID: "u", Restarted: noon}},
		{"unclear after its grace has started again", host{Presence: unclear, Nodes: []*corev1.Node{old}},
			&LostNode{Node: "h", UID: "u", Restarted: since}, nil, &LostNode{Node: "h", UID: "u", Restarted: since}},
		{"missing after its grace has started again", host{Presence: missing}, &LostNode{Node: "h", UID: "u", Restarted: since}, nil,
			&LostNode{Node: "h", UID: "u", Since: noon}},
		{"being deleted and drained", host{Presence: deleting, Leaving: []*corev1.Node{cordoned}}, nil, nil,
			&LostNode{Node: "h", UID: "u", Planned: true}},
		{"drained, and another finalizer keeps it", host{Presence: deleting, Leaving: []*corev1.Node{foreign}}, nil, nil,
			&LostNode{Node: "h", UID: "u"}},
		{"being deleted and cordoned", host{Presence: deleting, Leaving: []*corev1.Node{cordoned}, Used: true}, nil, nil,
			&LostNode{Node: "h", UID: "u"}},
		{"cordoned after the first deletion", host{Presence: deleting, Leaving: []*corev1.Node{cordoned}},
			&LostNode{Node: "h", UID: "u", Acted: ago(time.Minute)}, nil, &LostNode{Node: "h", UID: "u", Acted: ago(time.Minute)}},
		{"a planned removal stays one", host{Presence: missing}, &planned, nil, &planned},
		{"another Node is being deleted", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("v")}},
			with(approved, func(r *LostNode) { r.Acted = since }), nil, &LostNode{Node: "h", UID: "v", Acted: since}},
		{"another Node is being deleted, by the cache", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("v")}}, &approved,
			func(w *world) { w.Fresh = false }, &approved},
		{"a hold of an unknown Node that is being deleted", host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("v")}},
			&LostNode{Since: since, Held: HeldByBreaker}, nil, &LostNode{Node: "h", UID: "v", Held: HeldByBreaker}},
	} {
		s := DefaultSettings()
		s.Driver, s.NodeFinalizer = testDriver, testFinalizer
		w := world{objects: objects{Now: noon, Fresh: true}, Checked: ago(time.Minute)}
		if c.change != nil {
			c.change(&w)
		}
		h := c.h
		if h.Value == "" {
			h.Value = "h"
		}
		if h.Items == nil {
			h.Items = []*item{{}}
		}
		before := LostNode{}
		if c.before != nil {
			before = *c.before
		}
		before.Value = h.Value
		s.NodeCleanup, s.NodeFinalizerMode = ModeClaims, FinalizerRemove
		got, exists := nextRecord(s, w, &h, before, c.before != nil)
		switch {
		case exists != (c.want != nil):
			t.Errorf("%s: got %v %+v, want %+v", c.name, exists, got, c.want)
		case exists:
			c.want.Value = h.Value
			if got != *c.want {
				t.Errorf("%s:\ngot  %+v\nwant %+v", c.name, got, *c.want)
			}
			c.want.Value = ""
		}
	}
}

// TestReleases has the order of the design: the first that matches decides.
func TestReleases(t *testing.T) {
	due := Step{Kind: KindClaim, Item: &item{}}
	with := func(check Check, name string) Step {
		return Step{Kind: KindClaim, Item: &item{}, Reasons: []Reason{{Check: check, Name: name}}}
	}
	for _, c := range []struct {
		name   string
		change func(s *Settings, w *world, h *host, r *LostNode)
		steps  []Step
		want   string // reason of the event; "-": none; "": not released
	}{
		{"after its steps", nil, nil, "-"},
		{"a step is due", nil, []Step{due}, ""},
		{"a step failed without an answer", nil, []Step{with(CheckFailed, "Timeout")}, ""},
		{"a step was refused", nil, []Step{with(CheckForbidden, "Forbidden")}, "-"},
		{"a step is refused by a rule", nil, []Step{with(CheckUse, "ClaimInUse")}, "-"},
		{"the volumes were not listed", nil, []Step{with(CheckOrder, volumesNotListed)}, ""},
		{"a volume could not be read", nil, []Step{{Kind: KindClaim, Item: &item{Unread: errNotCached},
			Reasons: []Reason{{Check: CheckAbsence}}}}, ""},
		{"the volume follows without the Node", nil, []Step{{Kind: KindVolume, Item: &item{}, Reasons: []Reason{{Check: CheckOrder}}}},
			"-"},
		{"mode report", func(s *Settings, _ *world, _ *host, _ *LostNode) { s.NodeCleanup = ModeReport }, []Step{due}, reasonSkipped},
		{"mode off", func(s *Settings, _ *world, _ *host, _ *LostNode) { s.NodeCleanup = ModeOff }, []Step{due}, reasonSkipped},
		{"nothing is cleaned up", func(s *Settings, _ *world, h *host, _ *LostNode) {
			s.SkipNodeFinalize = true
			annotate(h.Leaving[0], disabled)
		}, []Step{due}, reasonSkipped},
		{"the finalizer is not ours", func(s *Settings, _ *world, _ *host, _ *LostNode) { s.NodeFinalizerMode = FinalizerOff }, nil, ""},
		{"the Node has no finalizer", func(_ *Settings, _ *world, h *host, _ *LostNode) { h.Leaving[0].Finalizers = nil }, nil, ""},
		{"the topology key is unknown", func(_ *Settings, w *world, _ *host, _ *LostNode) { w.KeyProblem = "unknown" }, []Step{due},
			reasonSkipped},
		{"an opt-out that is recorded", func(_ *Settings, _ *world, h *host, r *LostNode) {
			annotate(h.Leaving[0], disabled)
			r.OptedOut = true
		}, []Step{due}, reasonSkipped},
		{"an opt-out that is not recorded", func(_ *Settings, w *world, h *host, _ *LostNode) {
			annotate(h.Leaving[0], disabled)
			w.Now = w.Now.Add(time.Hour)
		}, nil, ""},
		{"an opt-out that is not recorded, in mode report", func(s *Settings, _ *world, h *host, _ *LostNode) {
			annotate(h.Leaving[0], disabled)
			s.NodeCleanup = ModeReport
		}, nil, ""},
		{"an opt-out in the record of another Node", func(_ *Settings, _ *world, h *host, r *LostNode) {
			annotate(h.Leaving[0], disabled)
			r.OptedOut, r.UID = true, "other"
		}, nil, ""},
		{"an opt-out in a record that cannot be parsed", func(_ *Settings, w *world, h *host, r *LostNode) {
			annotate(h.Leaving[0], disabled)
			w.Now = w.Now.Add(time.Hour)
			*r = LostNode{Value: "h", Unparsable: true, OptedOut: true}
		}, nil, ""},
		{"an opt-out, and another Node exists", func(_ *Settings, w *world, h *host, _ *LostNode) {
			annotate(h.Leaving[0], disabled)
			h.Presence, w.Now = present, w.Now.Add(time.Hour)
		}, nil, reasonTimeout},
		{"the timeout", func(_ *Settings, w *world, _ *host, _ *LostNode) { w.Now = w.Now.Add(9 * time.Minute) }, []Step{due},
			reasonTimeout},
		{"the timeout without a record", func(_ *Settings, w *world, _ *host, r *LostNode) {
			w.Now, *r = w.Now.Add(9*time.Minute), LostNode{Value: "h"}
		}, []Step{due}, reasonTimeout},
		{"another Node exists", func(_ *Settings, _ *world, h *host, _ *LostNode) { h.Presence = present }, nil, ""},
		{"unclear", func(_ *Settings, _ *world, h *host, _ *LostNode) { h.Presence = unclear }, nil, ""},
		{"the grace", func(s *Settings, _ *world, _ *host, _ *LostNode) { s.NodeDeleteGrace = 7 * time.Minute }, nil, ""},
		{"the grace that has started again", func(_ *Settings, _ *world, _ *host, r *LostNode) { r.Restarted = ago(time.Minute) }, nil, ""},
		{"drained by another component", func(_ *Settings, _ *world, h *host, _ *LostNode) {
			h.Leaving[0].Finalizers = append(h.Leaving[0].Finalizers, "example.com/drain")
			h.Leaving[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		}, nil, ""},
		{"no record", func(_ *Settings, _ *world, h *host, r *LostNode) {
			h.Items, *r = []*item{{}}, LostNode{Value: "h"}
		}, nil, ""},
		{"no volumes, as far as it is known", func(_ *Settings, w *world, _ *host, _ *LostNode) { w.Incomplete = resourcesUnknown }, nil,
			""},
		{"the timeout, as far as it is known", func(_ *Settings, w *world, _ *host, _ *LostNode) {
			w.Incomplete, w.Now = resourcesUnknown, w.Now.Add(9*time.Minute)
		}, nil, reasonTimeout},
		{"no record, and no volumes", func(_ *Settings, _ *world, _ *host, r *LostNode) { *r = LostNode{Value: "h"} }, nil, "-"},
		{"held", func(_ *Settings, _ *world, _ *host, r *LostNode) { r.Held = HeldByBreaker }, []Step{due}, reasonSkipped},
		{"held in its grace", func(s *Settings, _ *world, _ *host, r *LostNode) {
			s.NodeDeleteGrace, r.Held = 7*time.Minute, HeldByBreaker
		}, nil, ""},
	} {
		s, _ := permitted(KindClaim, true)
		w := world{objects: objects{Now: noon}}
		h, r := host{Value: "h", Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}}, LostNode{Value: "h", Node: "h", UID: "u"}
		if c.change != nil {
			c.change(&s, &w, &h, &r)
		}
		got := ""
		for _, release := range releases(s, w, &h, r, c.steps) {
			if got = release.Reason; got == "" {
				got = "-"
			}
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

// TestReleasePermits checks what the live read of a Node must agree with.
func TestReleasePermits(t *testing.T) {
	s, _ := permitted(KindClaim, true)
	release := Release{Node: leavingNode("u")}
	for name, c := range map[string]struct {
		change func(*corev1.Node)
		want   bool
	}{
		"unchanged":          {func(*corev1.Node) {}, true},
		"another finalizer":  {func(n *corev1.Node) { n.Finalizers = append(n.Finalizers, "example.com/drain") }, true},
		"another Node":       {func(n *corev1.Node) { n.UID = "other" }, false},
		"not being deleted":  {func(n *corev1.Node) { n.DeletionTimestamp = nil }, false},
		"a later opt-out":    {func(n *corev1.Node) { annotate(n, disabled) }, false},
		"another host":       {func(n *corev1.Node) { n.Labels = map[string]string{testKey: "other"} }, false},
		"its label is added": {func(n *corev1.Node) { n.Labels = map[string]string{testKey: "h"} }, true},
	} {
		node := leavingNode("u")
		c.change(node)
		if got := release.permits(s, testKey, node); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// large returns what a pass reads in a cluster with 5,000 Nodes and 10,000 volumes, of which 50 hosts are lost.
func large() (Settings, objects, *store) {
	s, _ := permitted(KindClaim, false)
	a := newAPI()
	a.now = ago(time.Hour)
	for i := range 5000 {
		name := fmt.Sprintf("worker-%04d", i)
		for k := range 2 {
			a.bind(fmt.Sprintf("c-%04d-%d", i, k), name)
		}
		if i%100 == 0 {
			continue
		}
		n := &corev1.Node{ObjectMeta: a.meta(name)}
		n.Labels = map[string]string{corev1.LabelHostname: name, testKey: name}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeHostName,
			Address: name}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		a.nodes[name] = n
		c := &storagev1.CSINode{ObjectMeta: a.meta(name)}
		c.Spec.Drivers = []storagev1.CSINodeDriver{{Name: testDriver, NodeID: name, TopologyKeys: []string{testKey}}}
		a.csiNodes[name] = c
	}
	return s, objects{Now: noon, Listed: noon, Fresh: true, Volumes: slices.Collect(maps.Values(a.volumes))}, a.store
}

// planOnce makes a plan, from the objects in caches and lists.
func planOnce(s Settings, o objects, src reader, nodes []*corev1.Node, csiNodes []*storagev1.CSINode) Plan {
	o.Nodes, o.CSINodes = byName(nodes), byName(csiNodes)
	o.Cached = o.Nodes
	w := newWorld(context.Background(), s, o, Records{Lost: map[string]LostNode{}, Checked: ago(time.Minute)}, src)
	return plan(s, w, Records{Lost: map[string]LostNode{}, Checked: ago(time.Minute)}, nil)
}

// withoutPods is a store whose pods are not cached yet.
type withoutPods struct{ *store }

func (withoutPods) pods(context.Context, *corev1.PersistentVolumeClaim) ([]*corev1.Pod, error) {
	return nil, errPodsUnknown
}

// TestHolds: while it is not known which volumes may be deleted, the breaker is open, and no host waits for an approval.
func TestHolds(t *testing.T) {
	s, o, src := large()
	s.NodeCleanupMaxFraction = 0
	for held, reads := range map[int]reader{50: src, 0: withoutPods{src}} {
		p, n := planOnce(s, o, reads, slices.Collect(maps.Values(src.nodes)), slices.Collect(maps.Values(src.csiNodes))), 0
		for _, r := range p.Records.Lost {
			n += map[bool]int{true: 1}[r.Held != ""]
		}
		if !p.Breaker.Open || p.Breaker.Lost != 50 || n != held {
			t.Errorf("%d of 50 are held, want %d; breaker %+v", n, held, p.Breaker)
		}
	}
}

// maxBytesOfPlan is the memory that a plan of [large] may allocate. The goal is 5 MB.
const maxBytesOfPlan = 15 << 20

// TestMemoryOfPlan checks that a plan does not allocate for each volume of a node that exists.
func TestMemoryOfPlan(t *testing.T) {
	s, o, src := large()
	nodes, csiNodes := slices.Collect(maps.Values(src.nodes)), slices.Collect(maps.Values(src.csiNodes))
	if p := planOnce(s, o, src, nodes,
		csiNodes); len(p.Hosts) != 50 || !p.Breaker.Open && p.Breaker.Lost != 50 || len(p.Hosts[0].Steps) != 2 {
		t.Fatalf("%d hosts, breaker %+v", len(p.Hosts), p.Breaker)
	}
	result := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			planOnce(s, o, src, nodes, csiNodes)
		}
	})
	t.Logf("%v per plan, %d bytes", time.Duration(result.NsPerOp()), result.AllocedBytesPerOp())
	if result.AllocedBytesPerOp() > maxBytesOfPlan {
		t.Errorf("a plan allocates %d bytes, at most %d", result.AllocedBytesPerOp(), maxBytesOfPlan)
	}
}

// BenchmarkPlan has the goals 20 ms and 5 MB.
func BenchmarkPlan(b *testing.B) {
	s, o, src := large()
	nodes, csiNodes := slices.Collect(maps.Values(src.nodes)), slices.Collect(maps.Values(src.csiNodes))
	b.ReportAllocs()
	for b.Loop() {
		planOnce(s, o, src, nodes, csiNodes)
	}
}
