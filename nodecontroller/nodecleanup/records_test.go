// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestRecordsAreKept checks that a ConfigMap has the same content after it was read and written, also what a person must correct,
// and what other people have added.
func TestRecordsAreKept(t *testing.T) {
	stored := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: ConfigMapName("Local.Example.com"), Annotations: map[string]string{
		AnnotationTopologyKey: testKey, AnnotationLastLook: "2026-11-22T10:05:00Z", AnnotationMode: "claims", AnnotationHolder: "term-1",
		AnnotationApprove: "h1,h2,h3=all", annotationApproveUntil: "2026-11-23T00:00:00Z", "example.com/note": "kept",
	}}, Data: map[string]string{
		"h1": `{"node":"w1","uid":"u","since":"2026-11-22T09:51:03.25Z","planned":true,"held":"breaker","optedOut":true,` +
			`"acted":"2026-11-22T10:05:02Z","next":"Held"}`,
		"h2": `{"approved":"2026-11-22T10:05:02Z","approvedAll":true}`, "h3": "garbage", "h4": `{"held":7}`,
	}}
	got, err := parseRecords(stored).configMap(stored, "ns", testDriver)
	if err != nil || !maps.Equal(got.Data, stored.Data) || !maps.Equal(got.Annotations, stored.Annotations) {
		t.Errorf("got %v %q %q", err, got.Data, got.Annotations)
	}
	for value, want := range map[string]RecordState{"h1": RecordOptedOutHeld, "h2": RecordApproved, "h3": RecordUnparsable,
		"h4": RecordUnparsable} {
		n := parseRecords(stored).Lost[value]
		if n.State() != want || n.opens() != (want == RecordUnparsable) {
			t.Errorf("%s: got %s, opens %v, want %s", value, n.State(), n.opens(), want)
		}
	}
	fresh, err := Records{Lost: map[string]LostNode{"h": {Value: "h", Since: noon}}, Holder: "x"}.configMap(nil, "ns", testDriver)
	if err != nil || fresh.Name != "lost-nodes."+testDriver || fresh.Namespace != "ns" || fresh.Labels[LabelDriver] != testDriver ||
		fresh.Data["h"] != `{"since":"2026-11-22T12:00:00Z"}` || len(fresh.Annotations) != 1 {
		t.Errorf("got %v %+v", err, fresh)
	}
}

// TestEarlierRecords checks records of earlier versions, and those that people have written.
func TestEarlierRecords(t *testing.T) {
	for text, want := range map[string]LostNode{
		`{"node":"w","cordoned":true,"planned":true}`: {Node: "w", Planned: true},
		`{"acted":"2026-11-22T12:00:00Z"}`:            {Acted: noon},
		`{"since":"yesterday","held":"breaker"}`:      {Held: HeldByBreaker},
		`{"since":5}`:                                 {},
		`{}`:                                          {},
		``:                                            {Held: HeldByBreaker, OptedOut: true, Unparsable: true},
		`{"approved":"soon"}`:                         {Held: HeldByBreaker, OptedOut: true, Unparsable: true, text: `{"approved":"soon"}`},
		`{"optedOut":"yes"}`:                          {Held: HeldByBreaker, OptedOut: true, Unparsable: true, text: `{"optedOut":"yes"}`},
		`{"since":"2026-11-22T12:00:00Z","optedOut":true}`: {Since: noon, OptedOut: true},
	} {
		want.Value = "h"
		if want.Unparsable {
			want.Next = "Nothing is deleted, and further lost nodes are held. Correct or remove the record"
		}
		got := ParseLostNodes(&corev1.ConfigMap{Data: map[string]string{"h": text}})
		if len(got) != 1 || got[0] != want {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}

// TestNextIsOmitted checks that many records omit their text for people, so that they fit in a ConfigMap.
func TestNextIsOmitted(t *testing.T) {
	r := Records{Lost: map[string]LostNode{}}
	for i := range maxNext + 1 {
		r.Lost[strings.Repeat("h", 1+i)] = LostNode{Next: "Held"}
	}
	cm, err := r.configMap(nil, "ns", testDriver)
	if err != nil || slices.ContainsFunc(slices.Collect(maps.Values(cm.Data)), func(s string) bool { return s != "{}" }) {
		t.Errorf("a record has more than it needs: %v", err)
	}
}

// TestApprovals checks what becomes of an approval.
func TestApprovals(t *testing.T) {
	s, _ := permitted(KindClaim, false)
	at := noon
	for _, c := range []struct {
		name     string
		records  Records
		report   bool
		want     LostNode // the record h
		approved int
		problems int
	}{
		{"by value", Records{Approve: []string{"h"}}, false, LostNode{Node: "w", Approved: at}, 1, 0},
		{"by name", Records{Approve: []string{"w"}}, false, LostNode{Node: "w", Approved: at}, 1, 0},
		{"of all", Records{Approve: []string{"h=all"}}, false, LostNode{Node: "w", Approved: at, ApprovedAll: true}, 1, 0},
		{"of another node", Records{Approve: []string{"other"}}, false, LostNode{Node: "w"}, 0, 1},
		{"of any node", Records{Approve: []string{"*"}, ApproveUntil: true}, false, LostNode{Node: "w"}, 0, 1},
		{"in mode report", Records{Approve: []string{"h"}}, true, LostNode{Node: "w"}, 0, 1},
		{"of a held node", Records{Lost: map[string]LostNode{"h": {Node: "w", Held: HeldByBreaker, Approved: ago(time.Hour)}},
			Approve: []string{"h"}}, false, LostNode{Node: "w", Approved: at}, 1, 0},
		{"of a node that is approved", Records{Lost: map[string]LostNode{"h": {Node: "w", Approved: ago(time.Hour)}},
			Approve: []string{"h"}}, false, LostNode{Node: "w", Approved: ago(time.Hour)}, 1, 0},
		{"of a record that cannot be parsed", Records{Lost: map[string]LostNode{"h": {Unparsable: true}}, Approve: []string{"h"}}, false,
			LostNode{Unparsable: true}, 0, 1},
		{"of a node that has returned", Records{Lost: map[string]LostNode{"h": {Value: "h", Acted: at}}, Approve: []string{"h"}}, false,
			LostNode{Value: "h", Acted: at}, 0, 1},
	} {
		s := s
		if c.report {
			s.NodeCleanup = ModeReport
		}
		r := c.records
		if r.Lost == nil {
			r.Lost = map[string]LostNode{"h": {Node: "w"}}
		}
		approved, problems := r.approve(s, noon)
		if r.Lost["h"] != c.want || len(approved) != c.approved || len(problems) != c.problems || len(r.Approve) > 0 {
			t.Errorf("%s: got %+v, %q, %v", c.name, r, approved, problems)
		}
	}
}

// TestVerdict checks which lost nodes open the breaker.
func TestVerdict(t *testing.T) {
	recent, old := ago(9*time.Minute), ago(11*time.Minute)
	for _, c := range []struct {
		name    string
		lost    map[string]LostNode
		pending string
		nodes   int
		open    bool
		count   int
	}{
		{"none", nil, "", 10, false, 0},
		{"one of ten", nil, "a", 10, false, 1},
		{"two of ten", nil, "a b", 10, true, 2},
		{"two of 20", nil, "a b", 20, false, 2},
		{"the window", map[string]LostNode{"a": {Acted: recent}}, "b", 10, true, 2},
		{"after the window", map[string]LostNode{"a": {Acted: old}}, "b", 10, false, 1},
		{"a planned removal", map[string]LostNode{"a": {Planned: true}, "c": {Planned: true, Acted: recent}}, "a b", 10, false, 1},
		{"a recent loss without anything to delete", map[string]LostNode{"a": {Since: recent}}, "b", 10, true, 2},
		{"an earlier loss without anything to delete", map[string]LostNode{"a": {Since: old}}, "b", 10, false, 1},
		{"a recent loss that was planned", map[string]LostNode{"a": {Since: recent, Planned: true}}, "b", 10, false, 1},
		{"a Node that is being deleted, without anything to delete", map[string]LostNode{"a": {UID: "u"}}, "b", 10, true, 2},
		{"an approved loss counts", map[string]LostNode{"a": {Approved: noon}}, "a b", 10, true, 2},
		{"held", map[string]LostNode{"a": {Held: HeldByBreaker}}, "", 10, true, 0},
		{"held, and opted out", map[string]LostNode{"a": {Held: HeldByBreaker, OptedOut: true}}, "", 10, false, 0},
		{"a record that cannot be parsed", map[string]LostNode{"a": {Unparsable: true, OptedOut: true, Held: HeldByBreaker}}, "", 10, true,
			0},
	} {
		s, _ := permitted(KindClaim, false)
		w, pending := world{objects: objects{Now: noon}, Hosts: map[string]*host{}}, map[string]bool{}
		for value, n := range c.lost {
			if w.Hosts[value] = (&host{Presence: missing}); n.UID == "u" {
				w.Hosts[value] = &host{Presence: deleting, Leaving: []*corev1.Node{leavingNode("u")}}
			}
		}
		for _, value := range strings.Fields(c.pending) {
			pending[value] = true
		}
		for i := range c.nodes - len(pending) {
			w.Drivers = append(w.Drivers, strings.Repeat("n", i+1))
		}
		v := verdict(s, w, Records{Lost: c.lost}, pending)
		if v.Open != c.open || v.Lost != c.count {
			t.Errorf("%s: got %+v", c.name, v)
		}
		s.NodeCleanup = ModeReport
		if v = verdict(s, w, Records{Lost: c.lost}, pending); v.Open {
			t.Errorf("%s: it is open in mode report", c.name)
		}
	}
}

// TestTopologyKey checks when the topology key can be used.
func TestTopologyKey(t *testing.T) {
	node := func(labels ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}}}
		for i := 0; i < len(labels); i += 2 {
			n.Labels[labels[i]] = labels[i+1]
		}
		return n
	}
	csiNode := func(driver string, keys ...string) *storagev1.CSINode {
		c := &storagev1.CSINode{}
		c.Spec.Drivers = []storagev1.CSINodeDriver{{Name: driver, NodeID: "id", TopologyKeys: keys}}
		return c
	}
	for _, c := range []struct {
		name, set, remembered string
		node                  *corev1.Node
		csiNode               *storagev1.CSINode
		key                   string
		usable                bool
	}{
		{"reported", "", "", node("k", "n"), csiNode(testDriver, "k"), "k", true},
		{"the value is the node ID", "", "", node("k", "id"), csiNode(testDriver, "k"), "k", true},
		{"reported, not remembered", "", "old", node(), csiNode(testDriver, "k"), "k", true},
		{"remembered", "", "old", node(), csiNode("other", "k"), "old", true},
		{"unknown", "", "", node(), csiNode("other", "k"), "", false},
		{"several", "", "old", node(), csiNode(testDriver, "k", "l"), "old", false},
		{"zones", "", "", node("k", "zone-1"), csiNode(testDriver, "k"), "k", false},
		{"zones that the operator has set", "k", "", node("k", "zone-1"), csiNode(testDriver, "k", "l"), "k", true},
		{"zones of another driver", "", "old", node("k", "zone-1"), csiNode("other", "k"), "old", true},
	} {
		s := Settings{Driver: testDriver, TopologyNodeKey: c.set}
		o := objects{Nodes: map[string]*corev1.Node{"n": c.node}, CSINodes: map[string]*storagev1.CSINode{"n": c.csiNode}}
		if key, problem := topologyKey(s, o, c.remembered); key != c.key || (problem == "") != c.usable {
			t.Errorf("%s: got %q, %q", c.name, key, problem)
		}
	}
}

// TestSettings checks the validation of the flags.
func TestSettings(t *testing.T) {
	if err := DefaultSettings().Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Settings){
		"--node-cleanup=dry-run was removed": func(s *Settings) { s.NodeCleanup = "dry-run" },
		"--node-cleanup: must be one of":     func(s *Settings) { s.NodeCleanup = "all" },
		"--node-cleanup-scope":               func(s *Settings) { s.NodeCleanupScope = "" },
		"--node-cleanup-retain":              func(s *Settings) { s.NodeCleanupRetain = "delete" },
		"--node-finalizer-mode":              func(s *Settings) { s.NodeFinalizerMode = "on" },
		"--node-missing-grace":               func(s *Settings) { s.NodeMissingGrace = time.Second },
		"--node-delete-grace":                func(s *Settings) { s.NodeDeleteGrace = -1 },
		"--node-cleanup-max-fraction":        func(s *Settings) { s.NodeCleanupMaxFraction = 1.5 },
		"--node-cleanup-min-nodes":           func(s *Settings) { s.NodeCleanupMinNodes = -1 },
		"--node-cleanup-qps":                 func(s *Settings) { s.NodeCleanupQPS = 0 },
		"--node-cleanup-burst":               func(s *Settings) { s.NodeCleanupBurst = 0 },
	} {
		s := DefaultSettings()
		change(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
