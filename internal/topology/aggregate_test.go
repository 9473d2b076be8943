// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// naive computes from scratch what aggregate keeps up to date.
type naive struct {
	labels map[string]map[string]string
	keys   map[string][]string
}

func (n naive) segments(keys []string) []Segment {
	byText := map[string]Segment{}
	for name, labels := range n.labels {
		_, missing := OfNode(labels, n.keys[name])
		if len(n.keys[name]) > 0 && missing == nil && joined(n.keys[name]) != joined(keys) {
			continue
		}
		if s, missing := OfNode(labels, keys); missing == nil {
			byText[s.String()] = s
		}
	}
	return slices.SortedFunc(maps.Values(byText), Compare)
}

// TestAggregateIsWhatACountFromScratchGives creates, changes and deletes nodes at random.
func TestAggregateIsWhatACountFromScratchGives(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	a, n := NewAggregate(), naive{map[string]map[string]string{}, map[string][]string{}}
	keySets := [][]string{{"zone"}, {"rack", "zone"}, {"host"}, nil}
	for step := range 5000 {
		name := fmt.Sprint("node-", random.IntN(12))
		switch random.IntN(4) {
		case 0:
			delete(n.labels, name)
			a.SetNode(name, nil, false)
		case 1:
			labels := map[string]string{}
			for _, k := range []string{"zone", "rack", "host"} {
				if random.IntN(4) > 0 {
					labels[k] = fmt.Sprint(random.IntN(3))
				}
			}
			n.labels[name] = labels
			a.SetNode(name, labels, true)
		case 2:
			delete(n.keys, name)
			a.SetKeys(name, nil, false)
		default:
			keys := keySets[random.IntN(len(keySets))]
			n.keys[name] = keys
			a.SetKeys(name, keys, true)
		}
		var all []Segment
		missing := map[string][]string{}
		for i, keys := range keySets {
			equal := func(k []string) bool { return slices.Equal(k, keys) }
			if keys == nil || !slices.ContainsFunc(slices.Collect(maps.Values(n.keys)), equal) {
				continue
			}
			want := n.segments(keys)
			all = append(all, want...)
			if diff := gocmp.Diff(want, a.Segments(keys), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("step %d, key set %d: %s", step, i, diff)
			}
		}
		for name, keys := range n.keys {
			if _, m := OfNode(n.labels[name], keys); m != nil {
				missing[name] = m
			}
		}
		got := a.AllSegments()
		slices.SortFunc(got, Compare)
		slices.SortFunc(all, Compare)
		if diff := gocmp.Diff(all, got, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("step %d, all segments: %s", step, diff)
		}
		if diff := gocmp.Diff(missing, a.Missing()); diff != "" {
			t.Fatalf("step %d, missing labels: %s", step, diff)
		}
	}
}

func TestAggregateTellsWhatChanges(t *testing.T) {
	a := NewAggregate()
	for _, name := range []string{"node-0", "node-1"} {
		a.SetNode(name, map[string]string{"zone": "a"}, true)
		a.SetKeys(name, []string{"zone"}, true)
	}
	steps := []struct {
		name string
		do   func() bool
		want bool
	}{
		{"same keys", func() bool { return a.SetKeys("node-0", []string{"zone"}, true) }, false},
		{"other keys", func() bool { return a.SetKeys("node-0", []string{"rack"}, true) }, true},
		{"new zone", func() bool { return a.SetNode("node-0", map[string]string{"zone": "b"}, true) }, true},
		{"zone where another node is", func() bool { return a.SetNode("node-0", map[string]string{"zone": "a"}, true) }, true},
		{"no zone", func() bool { return a.SetNode("node-0", nil, true) }, true},
		{"label that is no topology", func() bool { return a.SetNode("node-0", map[string]string{"other": "a"}, true) }, false},
		{"Node deleted", func() bool { return a.SetNode("node-0", nil, false) }, true},
		{"CSINode deleted", func() bool { return a.SetKeys("node-0", nil, false) }, true},
		{"CSINode deleted already", func() bool { return a.SetKeys("node-0", nil, false) }, false},
	}
	for _, s := range steps {
		if got := s.do(); got != s.want {
			t.Errorf("%s: changed=%t", s.name, got)
		}
	}
}

func TestOfNode(t *testing.T) {
	labels := map[string]string{"t/zone": "a", "t/rack": "", "other": "x"}
	for _, tt := range []struct {
		keys, missing []string
		want          string
	}{
		{},
		{keys: []string{"t/zone"}, want: "t/zone=a"},
		{keys: []string{"t/zone", "t/rack"}, want: "t/rack=,t/zone=a"},
		{keys: []string{"t/missing", "t/zone", "t/absent"}, missing: []string{"t/missing", "t/absent"}},
	} {
		got, missing := OfNode(labels, tt.keys)
		if got.String() != tt.want || !slices.Equal(missing, tt.missing) {
			t.Errorf("with keys %q it is %q, missing %q", tt.keys, got, missing)
		}
		if missing == nil && Compare(got, SegmentOf(got.Labels())) != 0 {
			t.Errorf("%v came back as %v", got, SegmentOf(got.Labels()))
		}
	}
}

func TestCompare(t *testing.T) {
	ordered := []Segment{{}, {{"b", "1"}}, {{"b", "1-1"}}, {{"c", "0"}}, {{"a", "1"}, {"b", "1"}}, {{"a", "1"}, {"b", "1.1"}}}
	for i, a := range ordered {
		for j, b := range ordered {
			if got := Compare(a, b); got != cmp.Compare(i, j) {
				t.Errorf("%v against %v: %d", a, b, got)
			}
		}
	}
	if s := ordered[4]; !(Segment{}).SubsetOf(s) || !ordered[1].SubsetOf(s) || s.SubsetOf(ordered[1]) || ordered[3].SubsetOf(s) {
		t.Error("SubsetOf")
	}
}
