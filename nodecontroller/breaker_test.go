package nodecontroller

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

func nodeNames(prefix string, n int) []string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("%s%d", prefix, i))
	}
	return names
}

func TestBreaker(t *testing.T) {
	tenth := breaker{minNodes: 1, maxFraction: 0.1}
	for name, tt := range map[string]struct {
		b           breaker
		c           census
		open        bool
		lost, limit int
	}{
		"nothing is lost":                        {tenth, census{drivers: nodeNames("n", 10)}, false, 0, 1},
		"one of two, which is the least":         {tenth, census{pending: []string{"a"}, drivers: []string{"b"}}, false, 1, 1},
		"two of ten":                             {tenth, census{pending: []string{"a", "b"}, drivers: nodeNames("n", 8)}, true, 2, 1},
		"two of twenty":                          {tenth, census{pending: []string{"a", "b"}, drivers: nodeNames("n", 18)}, false, 2, 2},
		"three of twenty-nine":                   {tenth, census{pending: nodeNames("a", 3), drivers: nodeNames("n", 26)}, true, 3, 2},
		"what was done lately counts":            {tenth, census{pending: []string{"a"}, acted: []string{"b"}, drivers: nodeNames("n", 8)}, true, 2, 1},
		"a node counts once":                     {tenth, census{pending: []string{"a"}, acted: []string{"a"}, drivers: append(nodeNames("n", 8), "a")}, false, 1, 1},
		"no fraction and no least":               {breaker{}, census{pending: []string{"a"}, drivers: nodeNames("n", 99)}, true, 1, 0},
		"a fraction that is inexact in binary":   {breaker{maxFraction: 0.29}, census{pending: nodeNames("a", 29), drivers: nodeNames("n", 71)}, false, 29, 29},
		"a node that is held keeps it open":      {tenth, census{pending: []string{"a"}, held: []string{"a"}, drivers: nodeNames("n", 100)}, true, 1, 10},
		"all nodes, and all of them may be lost": {breaker{maxFraction: 1}, census{pending: nodeNames("a", 5)}, false, 5, 5},
	} {
		t.Run(name, func(t *testing.T) {
			v := tt.b.judge(tt.c)
			if v.open != tt.open || v.lost != tt.lost || v.limit != tt.limit {
				t.Errorf("got %+v", v)
			}
		})
	}
}

func TestLedgerCountsNodesNotVolumes(t *testing.T) {
	now := testNow
	l := newLedger(breaker{minNodes: 1}, time.Hour, func() []string { return nil })
	open := func(at time.Time) bool { v, _ := l.judge(at); return v.open }
	l.set("v1", entry{nodes: []string{"a"}, pending: true})
	l.set("v2", entry{nodes: []string{"a"}, pending: true})
	if open(now) {
		t.Error("open with two volumes of one node")
	}
	l.set("v3", entry{nodes: []string{"b"}, pending: true})
	if !open(now) {
		t.Error("not open with two nodes")
	}
	l.set("v3", entry{nodes: []string{"b"}})
	if open(now) {
		t.Error("open with one node for which there is something to do")
	}
	l.act([]string{"b"}, now)
	if !open(now) || open(now.Add(time.Hour)) {
		t.Error("what was done counts for the window, and no longer")
	}
	l.set("v3", entry{nodes: []string{"b"}, held: true})
	if _, held := l.judge(now.Add(100 * time.Hour)); !held || !open(now.Add(100*time.Hour)) {
		t.Error("time ends what is held")
	}
	l.drop("v3")
	if _, held := l.judge(now.Add(100 * time.Hour)); held || l.isHeld("b") {
		t.Error("held by nothing")
	}
}

func TestBucket(t *testing.T) {
	b := bucket{qps: 0.5, burst: 3}
	for i := range 3 {
		if _, ok := b.take(testNow); !ok {
			t.Fatalf("token %d was refused", i)
		}
	}
	first, ok := b.take(testNow)
	second, _ := b.take(testNow)
	if ok || !first.Equal(testNow.Add(2*time.Second)) || !second.Equal(testNow.Add(4*time.Second)) {
		t.Errorf("come again at %v and %v", first.Sub(testNow), second.Sub(testNow))
	}
	if _, ok := b.take(first); !ok {
		t.Error("refused at the time that was given")
	}
	b.giveBack()
	if _, ok := b.take(first); !ok {
		t.Error("a token that was given back is gone")
	}
	if none, ok := (&bucket{}).take(testNow); ok || !none.Equal(testNow.Add(longestWait)) {
		t.Error("a bucket without a rate has a token")
	}
}

func TestApproval(t *testing.T) {
	a := annotationsOf(testDriver)
	later, before := testNow.Add(time.Hour).Format(time.RFC3339), testNow.Add(-time.Hour).Format(time.RFC3339)
	for name, tt := range map[string]struct {
		names, until string
		nodes        []string
		want, wrong  bool
	}{
		"nothing":                       {"", "", []string{"a"}, false, false},
		"by name":                       {"x, a", "", []string{"a"}, true, false},
		"one of two nodes":              {"a", "", []string{"a", "b"}, false, false},
		"no node":                       {"a", "", nil, false, false},
		"all until later":               {"*", later, []string{"a"}, true, false},
		"all without an end":            {"*", "", []string{"a"}, false, true},
		"all until before":              {"*", before, []string{"a"}, false, true},
		"all until something else":      {"*", "tomorrow", []string{"a"}, false, true},
		"by name until later":           {"a", later, []string{"a"}, true, false},
		"by name until before":          {"a", before, []string{"a"}, false, true},
		"by name until something else":  {"a", "tomorrow", []string{"a"}, false, true},
		"a name beside a star too many": {"a,*", "", []string{"a"}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := a.parseApproval(map[string]string{a.approve: tt.names, a.until: tt.until}, testNow)
			if got.covers(tt.nodes) != tt.want || (err != nil) != tt.wrong {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

func TestIndexFindsWhatBelongsTogether(t *testing.T) {
	i := newIndex(testDriver, testKey, annotationsOf(testDriver))
	pv := localVolume(affinityTerm(testKey, "a"))
	if !i.setVolume(pv) {
		t.Fatal("it is node-local")
	}
	if got := i.setNode(testNode("x", "a")); !slices.Equal(got, []string{"pv"}) || !slices.Equal(i.nodesNamed([]string{"a"}), []string{"x"}) {
		t.Errorf("the node has %v", got)
	}
	if got := i.setNode(testNode("x", "b")); !slices.Equal(got, []string{"pv"}) || len(i.nodesNamed([]string{"a"})) > 0 {
		t.Errorf("a node that loses the label has had %v", got)
	}
	if got := i.formerly([]string{"a"}); !slices.Equal(got, []string{"x"}) {
		t.Errorf("formerly it was %v", got)
	}
	i.setNode(testNode("x", "a"))
	if got := i.formerly([]string{"a"}); len(got) > 0 {
		t.Errorf("it has the label again, and formerly it was %v", got)
	}
	if got := i.dropNode(testNode("x", "a")); !slices.Equal(got, []string{"pv"}) {
		t.Errorf("the node that goes had %v", got)
	}
	if names, last := i.lost(pv, []string{"a"}); !slices.Equal(names, []string{"x"}) || last == nil || last.uid != "uid" {
		t.Errorf("lost are %v, and %v is remembered", names, last)
	}
	if got := i.volumesOf("x"); !slices.Equal(got, []string{"pv"}) {
		t.Errorf("the node that is gone has %v", got)
	}
	i.setNode(testNode("y", "a"))
	if got := i.volumesOf("x"); !slices.Equal(got, []string{"pv"}) {
		t.Errorf("another node has the value now, and the first one is forgotten: it has %v", got)
	}
	i.setNode(testNode("x", "a"))
	if _, last := i.lost(pv, []string{"a"}); last != nil {
		t.Error("the node is back")
	}
	i.dropVolume("pv")
	if len(i.volumes.names)+len(i.volumes.objects)+len(i.mention.objects)+len(i.graves) > 0 {
		t.Errorf("kept %+v", i.volumes)
	}
}

// TestIndexKnowsWhatANodeWasCalled has a node lose its label, its driver and its Node.
func TestIndexKnowsWhatANodeWasCalled(t *testing.T) {
	id := []string{"id"}
	begin := func() *index {
		i := newIndex(testDriver, testKey, annotationsOf(testDriver))
		i.setVolume(localVolume(affinityTerm(testKey, "id")))
		i.setCSINode("x", testCSINode("x", "id", testKey))
		i.setNode(testNode("x", "id"))
		return i
	}
	want := func(i *index, what string, named, formerly, bare bool) {
		t.Helper()
		for list, have := range map[string]struct {
			got  []string
			want bool
		}{"named": {i.nodesNamed(id), named}, "formerly": {i.formerly(id), formerly}, "without a label": {i.unlabelled(), bare}} {
			if slices.Equal(have.got, []string{"x"}) != have.want {
				t.Errorf("%s: %s is %v", what, list, have.got)
			}
		}
		if got := i.volumesOf("x"); !slices.Equal(got, []string{"pv"}) {
			t.Errorf("%s: it has %v", what, got)
		}
	}
	i := begin()
	want(i, "at first", true, false, false)
	i.setNode(testNode("x", ""))
	want(i, "without its label", true, false, true)
	i.setCSINode("x", nil)
	want(i, "without label and driver", false, true, false)
	i.dropNode(testNode("x", ""))
	want(i, "gone", false, true, false)
	i = begin()
	i.setCSINode("x", nil)
	want(i, "without its driver", true, false, false)
	i.setNode(testNode("x", "id2"))
	i.setCSINode("x", testCSINode("x", "id2", testKey))
	want(i, "with another ID", false, true, false)
	i.dropNode(testNode("x", "id2"))
	if got := i.volumesOf("x"); !slices.Equal(got, []string{"pv"}) {
		t.Errorf("gone with another ID, it has %v", got)
	}
	i = begin()
	i.dropNode(testNode("x", "id"))
	want(i, "only its CSINode is left", true, true, false)
}
