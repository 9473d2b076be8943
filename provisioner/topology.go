package provisioner

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
)

// segment is one key of a topology with its value.
type segment struct{ key, value string }

// topologyTerm is a set of segments, sorted by key, that says where a volume is accessible.
type topologyTerm []segment

// nodeTerm is the term of a node with these labels; false when one of keys is not
// among them. keys must be sorted.
func nodeTerm(labels map[string]string, keys []string) (topologyTerm, bool) {
	t := make(topologyTerm, 0, len(keys))
	for _, k := range keys {
		v, ok := labels[k]
		if !ok {
			return nil, false
		}
		t = append(t, segment{k, v})
	}
	return t, true
}

// compareTerms puts terms with fewer segments first, then orders by key and value.
func compareTerms(a, b topologyTerm) int {
	if c := cmp.Compare(len(a), len(b)); c != 0 {
		return c
	}
	return slices.CompareFunc(a, b, func(x, y segment) int {
		return cmp.Or(strings.Compare(x.key, y.key), strings.Compare(x.value, y.value))
	})
}

// subset tells whether every segment of t is in of.
func (t topologyTerm) subset(of topologyTerm) bool {
	for _, s := range t {
		if !slices.Contains(of, s) {
			return false
		}
	}
	return true
}

// flatten is the terms that allowedTopologies of a class admit: of each selector
// the product of the values of its expressions.
func flatten(allowed []corev1.TopologySelectorTerm) []topologyTerm {
	var terms []topologyTerm
	for _, selector := range allowed {
		product := []topologyTerm{nil}
		for _, e := range selector.MatchLabelExpressions {
			var longer []topologyTerm
			for _, t := range product {
				for _, v := range e.Values {
					longer = append(longer, append(slices.Clone(t), segment{e.Key, v}))
				}
			}
			product = longer
		}
		for _, t := range product {
			if len(t) > 0 {
				slices.SortFunc(t, func(a, b segment) int {
					return cmp.Or(strings.Compare(a.key, b.key), strings.Compare(a.value, b.value))
				})
				terms = append(terms, t)
			}
		}
	}
	return terms
}

// topologies is what is known of where the driver runs.
type topologies interface {
	// node is the labels of a Node; false when there is none of that name.
	node(name string) (labels map[string]string, ok bool)
	// keys is the sorted topology keys of the driver on a node; false when there
	// is no CSINode of that name. They are empty when the driver is not on it.
	keys(node string) (keys []string, ok bool)
	// commonKeys is the topology keys that most nodes have; empty when the driver
	// is on no node.
	commonKeys() []string
	// terms is those of all nodes that have keys as labels, sorted, without duplicates.
	terms(keys []string) []topologyTerm
}

var (
	// errNodeGone is the reason to ask the scheduler for another node.
	errNodeGone = errors.New("is not there any more")
	// errTopology is a requirement that cannot be made, until a Node, a CSINode or the class changes.
	errTopology = errors.New("no topology")
)

// topologyRequest is what a requirement depends on besides [topologies].
type topologyRequest struct {
	strict, immediate bool
	allowed           []corev1.TopologySelectorTerm
	node              string // selected by the scheduler; "" for immediate binding
	claim             string // name, which spreads the claims of a StatefulSet
}

// requirement says where a volume may be, and where best (CSI spec,
// "TopologyRequirement"; KEP-557). It is nil when anywhere will do. Errors wrap
// errNodeGone or errTopology.
func requirement(r topologyRequest, known topologies) (*csi.TopologyRequirement, error) {
	var keys []string
	var selected topologyTerm
	if r.node != "" {
		var err error
		if keys, selected, err = selectedTerm(r.node, known); err != nil {
			return nil, err
		}
	}
	allowed := flatten(r.allowed)
	requisite := allowed
	switch {
	case r.node != "" && r.strict:
		if len(r.allowed) > 0 && !slices.ContainsFunc(allowed, func(t topologyTerm) bool { return t.subset(selected) }) {
			return nil, fmt.Errorf("%w: node %q is in none of the allowedTopologies of the class", errTopology, r.node)
		}
		requisite = []topologyTerm{selected}
	case len(r.allowed) > 0:
	case r.node == "" && !r.immediate:
		return nil, nil
	default:
		if r.node == "" {
			keys = known.commonKeys()
		}
		if requisite = known.terms(keys); len(keys) == 0 || len(requisite) == 0 {
			return nil, fmt.Errorf("%w: no topology available: the driver is registered on no node whose labels have its topology keys %q", errTopology, keys)
		}
	}
	if len(requisite) == 0 {
		return nil, nil
	}
	slices.SortFunc(requisite, compareTerms)
	requisite = slices.CompactFunc(requisite, func(a, b topologyTerm) bool { return slices.Equal(a, b) })
	first := 0
	switch {
	case r.node == "":
		first = spread(r.claim, len(requisite))
	case !r.strict:
		first = slices.IndexFunc(requisite, func(t topologyTerm) bool { return t.subset(selected) })
		if first < 0 {
			return nil, fmt.Errorf("%w: node %q is in none of the allowed topologies %v", errTopology, r.node, requisite)
		}
	}
	return &csi.TopologyRequirement{
		Requisite: protoTopologies(requisite),
		Preferred: protoTopologies(append(slices.Clone(requisite[first:]), requisite[:first]...)),
	}, nil
}

// selectedTerm is where the selected node is.
func selectedTerm(node string, known topologies) (keys []string, term topologyTerm, err error) {
	keys, ok := known.keys(node)
	if !ok {
		return nil, nil, fmt.Errorf("CSINode %q %w", node, errNodeGone)
	}
	labels, ok := known.node(node)
	if !ok {
		return nil, nil, fmt.Errorf("node %q %w", node, errNodeGone)
	}
	if len(keys) == 0 {
		return nil, nil, fmt.Errorf("%w: the driver has no topology keys on the selected node %q", errTopology, node)
	}
	if term, ok = nodeTerm(labels, keys); !ok {
		return nil, nil, fmt.Errorf("%w: the selected node %q lacks some of the labels %q", errTopology, node, keys)
	}
	return keys, term, nil
}

func protoTopologies(terms []topologyTerm) []*csi.Topology {
	var out []*csi.Topology
	for _, t := range terms {
		segments := make(map[string]string, len(t))
		for _, s := range t {
			segments[s.key] = s.value
		}
		out = append(out, &csi.Topology{Segments: segments})
	}
	return out
}

// spread is the index, below n, at which the preferences of a claim begin. Claims
// of one StatefulSet, whose names end in a number, begin one after the other.
func spread(claim string, n int) int {
	base, index := claim, uint32(0)
	if dash := strings.LastIndexByte(claim, '-'); dash >= 0 {
		if i, err := strconv.ParseUint(claim[dash+1:], 10, 32); err == nil {
			index, base = uint32(i), claim[:dash]
			base = base[strings.LastIndexByte(base, '-')+1:]
		}
	}
	h := fnv.New32()
	_, _ = h.Write([]byte(base)) // a hash cannot fail
	return int((h.Sum32() + index) % uint32(n))
}

// affinity is where a volume is accessible, for its PersistentVolume; nil means
// everywhere. A topology without segments says nothing and is left out.
func affinity(accessible []*csi.Topology) *corev1.VolumeNodeAffinity {
	var terms []corev1.NodeSelectorTerm
	for _, t := range accessible {
		var term corev1.NodeSelectorTerm
		for _, k := range slices.Sorted(maps.Keys(t.GetSegments())) {
			term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{
				Key: k, Operator: corev1.NodeSelectorOpIn, Values: []string{t.GetSegments()[k]},
			})
		}
		if term.MatchExpressions != nil {
			terms = append(terms, term)
		}
	}
	if terms == nil {
		return nil
	}
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
}
