package provisioner

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// naive computes from scratch what aggregate keeps up to date.
type naive struct {
	labels map[string]map[string]string
	keys   map[string][]string
}

func (n naive) terms(keys []string) []topologyTerm {
	byText := map[string]topologyTerm{}
	for _, labels := range n.labels {
		if term, ok := nodeTerm(labels, keys); ok {
			byText[term.text()] = term
		}
	}
	return slices.SortedFunc(maps.Values(byText), compareTerms)
}

// TestAggregateIsWhatACountFromScratchGives has nodes come, change and go at random.
func TestAggregateIsWhatACountFromScratchGives(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	a, n := newAggregate(), naive{map[string]map[string]string{}, map[string][]string{}}
	keySets := [][]string{{"zone"}, {"rack", "zone"}, {"host"}, nil}
	for step := range 5000 {
		name := fmt.Sprint("node-", random.IntN(12))
		switch random.IntN(4) {
		case 0:
			delete(n.labels, name)
			a.setNode(name, nil, false)
		case 1:
			labels := map[string]string{}
			for _, k := range []string{"zone", "rack", "host"} {
				if random.IntN(4) > 0 {
					labels[k] = fmt.Sprint(random.IntN(3))
				}
			}
			n.labels[name] = labels
			a.setNode(name, labels, true)
		case 2:
			delete(n.keys, name)
			a.setKeys(name, nil, false)
		default:
			keys := keySets[random.IntN(len(keySets))]
			n.keys[name] = keys
			a.setKeys(name, keys, true)
		}
		most := map[string]int{}
		for _, keys := range n.keys {
			if len(keys) > 0 {
				most[joined(keys)]++
			}
		}
		common := a.commonKeys()
		for text, count := range most {
			if count > most[joined(common)] {
				t.Fatalf("step %d: %q is more common than %q", step, text, common)
			}
			keys := keySets[slices.IndexFunc(keySets, func(k []string) bool { return joined(k) == text })]
			if diff := cmp.Diff(n.terms(keys), a.terms(keys), cmp.AllowUnexported(segment{})); diff != "" {
				t.Fatalf("step %d, keys %v: %s", step, keys, diff)
			}
		}
		if len(most) == 0 && common != nil || len(a.sets) != len(most) {
			t.Fatalf("step %d: common keys %v, %d sets for %v", step, common, len(a.sets), most)
		}
	}
}

func TestAggregateTellsWhatChanges(t *testing.T) {
	a := world([]string{"zone"}, map[string]string{"zone": "a"}, map[string]string{"zone": "a"})
	steps := []struct {
		name string
		do   func() bool
		want bool
	}{
		{"same keys", func() bool { return a.setKeys("node-0", []string{"zone"}, true) }, false},
		{"other keys", func() bool { return a.setKeys("node-0", []string{"rack"}, true) }, true},
		{"new zone", func() bool { return a.setNode("node-0", map[string]string{"zone": "b"}, true) }, true},
		{"zone where another node is", func() bool { return a.setNode("node-0", map[string]string{"zone": "a"}, true) }, true},
		{"no zone", func() bool { return a.setNode("node-0", nil, true) }, true},
		{"label that is no topology", func() bool { return a.setNode("node-0", map[string]string{"other": "a"}, true) }, false},
		{"node goes", func() bool { return a.setNode("node-0", nil, false) }, true},
		{"CSINode goes", func() bool { return a.setKeys("node-0", nil, false) }, true},
		{"CSINode is gone already", func() bool { return a.setKeys("node-0", nil, false) }, false},
	}
	for _, s := range steps {
		if got := s.do(); got != s.want {
			t.Errorf("%s: changed=%t", s.name, got)
		}
	}
}

func BenchmarkRequirement(b *testing.B) {
	for _, nodes := range []int{10, 5000} {
		a := newAggregate()
		for i := range nodes {
			name := fmt.Sprint("node-", i)
			a.setNode(name, map[string]string{"zone": fmt.Sprint(i % 3)}, true)
			a.setKeys(name, []string{"zone"}, true)
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
