// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// deletingNode returns a Node that is being deleted since at and waits for a finalizer.
func deletingNode(name string, uid types.UID, at time.Time, finalizer string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: uid, DeletionTimestamp: &metav1.Time{Time: at}, Finalizers: []string{finalizer},
	}}
}

// TestRecordOfAnotherLoss: an approval, a planned removal and a grace are for one loss. A hold without a known
// Node outlives what the process saw of its Node.
func TestRecordOfAnotherLoss(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	hour, minute := now.Add(-time.Hour), now.Add(-time.Minute)
	unparsable := LostNode{Held: HeldByBreaker, OptedOut: true, Unparsable: true}
	p := newPolicy(settingsOf(0), worldDriver)
	unschedulable := deletingNode("n", "u", minute, p.NodeFinalizer)
	unschedulable.Spec.Unschedulable = true
	for name, tc := range map[string]struct {
		state   presence
		record  LostNode
		last    lastSeen
		nodes   []*corev1.Node
		drained bool
		new     host // if it leaves anything: there is no record
		want    LostNode
	}{
		"a_CSINode_is_left_of_a_Node_that_had_opted_out": {
			state: unclear, new: host{volumes: make([]volume, 1)}, last: lastSeen{name: "n", uid: "u", optedOut: true, at: minute},
			want: LostNode{Node: "n", UID: "u", OptedOut: true},
		},
		"and_a_custom_resource": {
			state: unclear, new: host{resources: true}, last: lastSeen{name: "n", uid: "u", optedOut: true, at: minute},
			want: LostNode{Node: "n", UID: "u", OptedOut: true},
		},
		"drained": {
			state: deleting, record: LostNode{Node: "n", UID: "u"}, nodes: []*corev1.Node{unschedulable}, drained: true,
			want: LostNode{Node: "n", UID: "u", Planned: true},
		},
		"unschedulable_and_used": {
			state: deleting, record: LostNode{Node: "n", UID: "u"}, nodes: []*corev1.Node{unschedulable},
			want: LostNode{Node: "n", UID: "u"},
		},
		"a_CSINode_appears": {
			state:  unclear,
			record: LostNode{Since: hour, Approved: hour, Planned: true, Held: HeldByBreaker, OptedOut: true},
			want:   LostNode{Held: HeldByBreaker, OptedOut: true},
		},
		"a_CSINode_is_left_of_a_Node_that_was_being_deleted": {
			state: unclear, record: LostNode{UID: "u", Approved: hour, Planned: true},
			want: LostNode{UID: "u", Approved: hour, Planned: true},
		},
		"an_unknown_Node_is_lost_again": {
			state: missing, record: LostNode{Since: hour, Approved: hour, Planned: true}, last: lastSeen{name: "n", uid: "u", at: minute},
			want: LostNode{Node: "n", UID: "u", Since: now},
		},
		"an_unknown_Node_was_seen_before_its_loss": {
			state: missing, record: LostNode{Since: minute, Approved: minute}, last: lastSeen{name: "n", uid: "u", at: hour},
			want: LostNode{Node: "n", UID: "u", Since: minute, Approved: minute},
		},
		"a_hold_of_an_unknown_Node": {
			state: missing, record: LostNode{Held: HeldByBreaker, OptedOut: true}, last: lastSeen{name: "n", uid: "u", at: minute},
			want: LostNode{Node: "n", UID: "u", Held: HeldByBreaker, OptedOut: true, Since: now},
		},
		"a_hold_of_an_unknown_Node_that_is_being_deleted": {
			state: deleting, record: LostNode{Held: HeldByBreaker}, nodes: []*corev1.Node{deletingNode("n", "u", minute, p.NodeFinalizer)},
			want: LostNode{Node: "n", UID: "u", Held: HeldByBreaker},
		},
		"unparsable": {
			state: missing, record: unparsable, last: lastSeen{name: "n", uid: "u", at: minute}, want: unparsable,
		},
		"unparsable_while_it_is_being_deleted": {
			state: deleting, record: unparsable, nodes: []*corev1.Node{deletingNode("n", "u", minute, p.NodeFinalizer)},
			want: LostNode{Node: "n", UID: "u", Held: HeldByBreaker},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tc.record.Value, tc.want.Value = "n", "n"
			h := host{value: "n", state: tc.state, record: tc.record, recorded: true, last: tc.last, nodes: tc.nodes, drained: tc.drained}
			if tc.new.leaves() {
				h.recorded, h.volumes, h.resources = false, tc.new.volumes, tc.new.resources
			}
			if got, wanted := p.recordOf(h, cluster{now: now}); !wanted || got != tc.want {
				t.Errorf("the record is %+v (%v), want %+v", got, wanted, tc.want)
			}
		})
	}
}

func TestUnboundVolumeKeepsItsResource(t *testing.T) {
	pv := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete}}
	if why := (volume{pv: pv}).keepsResource(); !strings.Contains(why, "is not bound") {
		t.Errorf("it is kept because %q", why)
	}
}

// TestCheckAfterAGap: a check restarts the grace of a loss that may have ended, and ends its approval.
func TestCheckAfterAGap(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	hours := now.Add(-3 * time.Hour)
	approved := LostNode{Node: "n", UID: "u", Since: hours, Approved: hours, Planned: true, Held: HeldByBreaker}
	leaving := LostNode{Node: "n", UID: "u", Approved: hours, Planned: true}
	for name, tc := range map[string]struct {
		record LostNode
		last   time.Time
		listed *corev1.Node
		want   LostNode
	}{
		"checked":     {approved, now.Add(-time.Minute), nil, approved},
		"after_a_gap": {approved, hours, nil, LostNode{Node: "n", UID: "u", Since: now, Held: HeldByBreaker}},
		"the_Node_exists": {approved, now.Add(-time.Minute), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "v"}},
			LostNode{Node: "n", UID: "u", Held: HeldByBreaker}},
		"still_being_deleted":           {leaving, hours, deletingNode("n", "u", hours, "f"), leaving},
		"another_Node_is_being_deleted": {leaving, hours, deletingNode("n", "v", hours, "f"), LostNode{Node: "n", UID: "u"}},
		"was_being_deleted":             {leaving, hours, nil, LostNode{Node: "n", UID: "u"}},
		"was_being_deleted_lately":      {leaving, now.Add(-time.Minute), nil, leaving},
	} {
		t.Run(name, func(t *testing.T) {
			o := &observer{memories: &memories{policy: newPolicy(settingsOf(0), worldDriver)}, listed: newIndex(worldDriver, worldKey)}
			if tc.listed != nil {
				o.listed.setNode(tc.listed)
			}
			s := recordSet{map[string]LostNode{"n": tc.record}, map[string]string{}}
			if o.recordCheck(s, tc.last, now); s.lost["n"] != tc.want {
				t.Errorf("the record is %+v, want %+v", s.lost["n"], tc.want)
			}
			h := host{state: missing, record: tc.record, recorded: true}
			found := o.policy.mayClean(target{hosts: []host{h}}, cluster{now: now, checked: tc.last})
			unwatched := slices.ContainsFunc(found, func(r reason) bool { return r.name == "NotWatched" })
			if want := !tc.record.Since.IsZero() && tc.last.Equal(hours); unwatched != want {
				t.Errorf("before the check: %v, want NotWatched %v", found, want)
			}
		})
	}
	t.Run("while_another_worker_lists", func(t *testing.T) { // for the race detector
		r := newActors().begin(0)
		r.replicas[0].restart(r.w, r.settings)
		r.lead(r.replicas[0])
		done := make(chan error)
		go func() { done <- r.term.list(t.Context(), 0) }()
		r.term.recordCheck(recordSet{map[string]LostNode{"n": approved}, map[string]string{}}, now, now)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestClassOfAnotherClaim: a claim that has only the name of the claim of a volume gives no consent, nor does its class.
func TestClassOfAnotherClaim(t *testing.T) {
	w := &world{view: newView(), class: &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "c"}}}
	s := settingsOf(0)
	s.NodeCleanupScope = ScopeOptIn
	p := newPolicy(s, worldDriver)
	w.class.Annotations = map[string]string{p.annotation: enabled}
	w.bind("a", "h")
	w.volumes["pv-a"].Spec.StorageClassName = ""
	g := gatherer{policy: p, key: func() string { return worldKey }, src: cacheSource(w, w.view),
		record: func(string) (LostNode, bool) { return LostNode{}, false }}
	for _, another := range []bool{false, true} {
		if another {
			w.claims["a"].UID = "another"
		}
		if v, _, err := g.owned(t.Context(), "pv-a"); err != nil || (v.refusal != "") != another {
			t.Errorf("another claim: %v, refusal %q, %v", another, v.refusal, err)
		}
	}
}

// TestUnparsableRecords: a mistake in a record ends neither a hold nor an opt-out.
func TestUnparsableRecords(t *testing.T) {
	safe := LostNode{Value: "n", Held: HeldByBreaker, OptedOut: true, Unparsable: true}
	for text, want := range map[string]LostNode{
		``:                               safe,
		`garbage`:                        safe,
		`[]`:                             safe,
		`{"node":"n","approved":"soon"}`: safe,
		`{"node":"n","optedOut":"yes"}`:  safe,
		`{"node":"n","held":"breaker"`:   safe,
		`{}`:                             {Value: "n"},
		`{"node":"n","uid":"u","since":"yesterday","held":"breaker","optedOut":true}`: {Value: "n", Node: "n", UID: "u",
			Held: HeldByBreaker, OptedOut: true},
		`{"node":"n","since":"yesterday"}`: {Value: "n", Node: "n"},
		`{"node":"n","since":5,"held":7}`:  safe,
	} {
		if got := ParseLostNodes(&corev1.ConfigMap{Data: map[string]string{"n": text}}); len(got) != 1 || got[0] != want {
			t.Errorf("%q is parsed as %+v, want %+v", text, got, want)
		}
	}
	now := time.Now()
	s := recordSet{map[string]LostNode{"n": safe}, map[string]string{AnnotationApprove: "n"}}
	if problems := s.approve(now, true); s.lost["n"] != safe || len(problems) != 1 {
		t.Errorf("after an approval: %+v, %q", s.lost["n"], problems)
	}
	h := host{value: "n", state: missing, record: safe, recorded: true}
	found := newPolicy(settingsOf(0), worldDriver).mayClean(target{hosts: []host{h}}, cluster{now: now})
	if names := fmt.Sprint(found); !strings.Contains(names, "cannot be parsed") || strings.Contains(names, "had the annotation") {
		t.Errorf("the reasons are %s", names)
	}
}

// TestTextOfUnparsableRecords: neither a write of other records nor an approval replaces the text, so that a person can
// correct it.
func TestTextOfUnparsableRecords(t *testing.T) {
	const text = `{"node":"a","since":"2026-05-01T12:00:00Z","planned":true`
	r := newActors().begin(0)
	r.w.createNode("keep", "keep", false)
	r.w.bind("a", "a")
	p := r.replicas[0]
	p.restart(r.w, r.settings)
	r.lead(p)
	var said []string
	p.c.notify = newNotifier(func(_ runtime.Object, _, _, message string) { said = append(said, message) })
	edit := func(edit func(cm *corev1.ConfigMap)) {
		cm := r.w.stored.DeepCopy()
		cm.ObjectMeta = r.w.changed(cm.ObjectMeta)
		edit(cm)
		r.w.stored = cm
		r.checkLost(r.term)
		r.sync(r.term, "a")
	}
	r.checkLost(r.term)
	edit(func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"a": text} })
	r.w.bind("b", "b")
	p.catchUp(r.w)
	r.sync(r.term, "b")
	edit(func(cm *corev1.ConfigMap) { cm.Annotations[AnnotationApprove] = "a,b" })
	if b, _ := r.term.records.get("b"); r.w.stored.Data["a"] != text || b.Approved.IsZero() {
		t.Errorf("the text is %q, the other record %+v", r.w.stored.Data["a"], b)
	}
	for _, part := range []string{"lost node a cannot be parsed", "a has no effect: its record cannot be parsed"} {
		if !slices.ContainsFunc(said, func(m string) bool { return strings.Contains(m, part) }) {
			t.Errorf("no event has %q: %q", part, said)
		}
	}
	edit(func(cm *corev1.ConfigMap) { cm.Data["a"] = text + "}" })
	if a, _ := r.term.records.get("a"); !a.Planned || a.Since.IsZero() || a.OptedOut {
		t.Errorf("the corrected record is %+v", a)
	}
}

// TestWhatKeepsTheBreakerOpen: a host that waits for an approval does, and not one that has opted out.
func TestWhatKeepsTheBreakerOpen(t *testing.T) {
	for text, want := range map[string]struct {
		state RecordState
		open  bool
	}{
		`{"held":"breaker"}`:                 {RecordHeld, true},
		`{"held":"breaker","optedOut":true}`: {RecordOptedOutHeld, false},
		`{"optedOut":true}`:                  {RecordOptedOut, false},
		`{`:                                  {RecordUnparsable, true},
	} {
		r := newActors().begin(0)
		r.w.createNode("keep", "keep", false)
		r.w.bind("a", "a")
		r.w.stored = &corev1.ConfigMap{ObjectMeta: r.w.meta("records"), Data: map[string]string{"a": text}}
		r.replicas[0].restart(r.w, r.settings)
		r.lead(r.replicas[0])
		r.checkLost(r.term)
		r.as(r.term, func(ctx context.Context) (time.Time, error) {
			v := r.term.verdict(ctx)
			r.term.announce(ctx, !want.open) // by a worker that has read an earlier state
			if v.open != want.open || r.term.tripped.Load() != want.open {
				t.Errorf("%s: %+v, reported open: %v", text, v, r.term.tripped.Load())
			}
			return time.Time{}, nil
		})
		n, _ := r.term.records.get("a")
		n.Since = time.Now().Add(-time.Hour)
		h := host{value: "a", state: missing, recorded: true, record: n, volumes: []volume{{pv: r.w.volumes["pv-a"]}}}
		st := r.term.policy.decideHost(h, cluster{now: time.Now()}, true)
		if n.State() != want.state || (st.state == stateHeld) != want.open {
			t.Errorf("%s: the state is %q, want %q, decided %+v", text, n.State(), want.state, st)
		}
	}
}

// TestOptOutWithoutAKey: while the topology key cannot be used, a missing host has a record only if this process saw that its
// Node had opted out.
func TestOptOutWithoutAKey(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	r := newActors().begin(0)
	r.w.bind("a", "n")
	of := []volume{{pv: r.w.volumes["pv-a"]}}
	for name, tc := range map[string]struct {
		keyProblem string
		optedOut   bool
		volumes    []volume
		want       bool
	}{
		"opted_out":                     {"zones", true, of, true},
		"opted_out_without_volumes":     {"zones", true, nil, true},
		"not_opted_out":                 {"zones", false, of, false},
		"the_key_is_known":              {"", true, of, true},
		"known_key_and_without_volumes": {"", true, nil, false},
	} {
		h := host{value: "n", state: missing, last: lastSeen{name: "n", uid: "u", at: now, optedOut: tc.optedOut}, volumes: tc.volumes}
		p, c := newPolicy(settingsOf(0), worldDriver), cluster{now: now, keyProblem: tc.keyProblem}
		st := p.decideHost(h, c, false)
		if (st.action == hostRecord) != tc.want || !tc.want && st.action != hostNothing {
			t.Errorf("%s: decided to %s, want a record: %v", name, st.action, tc.want)
		}
		if !tc.want {
			continue
		}
		if h.record, h.recorded = p.recordOf(h, c); !h.recorded || !h.record.OptedOut || h.record.Node != "n" {
			t.Errorf("%s: the record is %+v (%v)", name, h.record, h.recorded)
		}
		if st = p.decideHost(h, c, false); tc.keyProblem != "" && st.action != hostNothing {
			t.Errorf("%s: with the record, decided to %s", name, st.action)
		}
	}
}

// TestSharedNodeIsReleased: a Node that waits for our finalizer is released at the timeout although another Node may
// have its volumes, and at once if nothing can be cleaned up.
func TestSharedNodeIsReleased(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	s := settingsOf(0)
	node, end := deletingNode("n", "u", now, s.NodeFinalizer), now.Add(s.NodeFinalizerTimeout)
	long := deletingNode("n", "u", now.Add(-s.NodeFinalizerTimeout), s.NodeFinalizer)
	optedOut := deletingNode("n", "u", now, s.NodeFinalizer)
	optedOut.Annotations = map[string]string{CleanupAnnotation(worldDriver): disabled}
	off := s
	off.NodeCleanup = ModeOff
	for name, tc := range map[string]struct {
		settings   Settings
		node       *corev1.Node
		keyProblem string
		want       hostAction
		next       time.Time
	}{
		"within_the_timeout":          {settings: s, node: node, want: hostNothing, next: end},
		"at_the_timeout":              {settings: s, node: long, want: hostRelease},
		"the_topology_key_is_unknown": {settings: s, node: node, keyProblem: "zones", want: hostNothing, next: end},
		"the_mode_is_off":             {settings: off, node: node, want: hostRelease},
		"an_opt_out":                  {settings: s, node: optedOut, keyProblem: "zones", want: hostNothing, next: end},
		"without_our_finalizer":       {settings: s, node: deletingNode("n", "u", now.Add(-time.Hour), "other"), want: hostNothing},
	} {
		for _, state := range []presence{present, unclear} {
			t.Run(name+"/"+string(state), func(t *testing.T) {
				other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "o", Finalizers: []string{s.NodeFinalizer}}}
				h := host{value: "n", state: state, nodes: []*corev1.Node{other, tc.node}}
				st := newPolicy(tc.settings, worldDriver).decideHost(h, cluster{now: now, keyProblem: tc.keyProblem}, false)
				if st.action != tc.want || !st.next.Equal(tc.next) {
					t.Errorf("decided to %s, next %v, want %s, next %v", st.action, st.next, tc.want, tc.next)
				}
			})
		}
	}
}

// TestVolumeOfTwoNodes: a lost node counts for the breaker once each node of a volume is lost, and the owners are told of a
// deletion then only.
func TestVolumeOfTwoNodes(t *testing.T) {
	const waits = "nothing is deleted while node m, which can also use the volume, exists"
	for name, tc := range map[string]struct {
		others []presence
		want   string
	}{
		"of_one_node":                     {nil, "the claim will be deleted"},
		"the_other_exists":                {[]presence{present}, waits},
		"one_of_two_others_exists":        {[]presence{missing, present}, waits},
		"the_other_is_being_deleted":      {[]presence{deleting}, "the claim will be deleted"},
		"the_CSINode_of_the_other_exists": {[]presence{unclear}, "the claim will be deleted"},
		"the_other_is_missing":            {[]presence{missing}, "the claim will be deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newActors().begin(0)
			r.w.bind("a", "n", "m")
			v := volume{pv: r.w.volumes["pv-a"], claim: r.w.claims["a"], hosts: []host{{value: "n", state: missing}}}
			for _, state := range tc.others {
				v.hosts = append(v.hosts, host{value: "m", state: state})
			}
			h, p := host{value: "n", state: missing, volumes: []volume{v}}, newPolicy(r.settings, worldDriver)
			if got := p.pending(h, time.Now()); got != (tc.want != waits) {
				t.Errorf("pending is %v", got)
			}
			var said string
			newNotifier(func(_ runtime.Object, _, _, message string) { said = message }).missing(p, h, v, time.Now())
			if !strings.Contains(said, tc.want) {
				t.Errorf("the owners are told: %s", said)
			}
		})
	}
	t.Run("lost_one_after_the_other", func(t *testing.T) {
		r := newActors().begin(0)
		p := r.replicas[0]
		for _, name := range []string{"n", "m", "keep"} {
			r.w.createNode(name, name, false)
		}
		r.w.bind("a", "n", "m")
		p.restart(r.w, r.settings)
		r.lead(p)
		for i, name := range []string{"n", "m"} {
			r.w.removeNode(name)
			r.w.removeCSINode(name)
			p.catchUp(r.w)
			if i == 0 {
				r.checkLost(r.term)
			}
			r.as(r.term, func(ctx context.Context) (time.Time, error) { // before any sync
				if v := r.term.verdict(ctx); v.lost != 2*i || v.open != (i > 0) {
					t.Errorf("after the loss of %s: %+v", name, v)
				}
				return time.Time{}, nil
			})
		}
	})
}

// TestHoldOfADrainedNode: a hold does not end because its Node is drained after the hold.
func TestHoldOfADrainedNode(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	p, c := newPolicy(settingsOf(0), worldDriver), cluster{now: now, readyNode: true, checked: now}
	h := host{value: "n", state: missing, recorded: true}
	h.record = LostNode{Value: "n", Since: now.Add(-time.Hour), Planned: true}
	for _, open := range []bool{false, true} {
		c.open = open
		if found := p.mayClean(target{hosts: []host{h}}, c); len(found) > 0 {
			t.Errorf("a planned removal, breaker open: %v: %v", open, found)
		}
	}
	h.record.Held = HeldByBreaker
	if found := p.mayClean(target{hosts: []host{h}}, c); len(found) != 1 || found[0].check != checkBreaker {
		t.Errorf("a held host: %v, want the breaker", found)
	}
}
