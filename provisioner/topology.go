package provisioner

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/topology"
)

// flatten returns the segments that allowedTopologies of a class admit: for each selector
// the product of the values of its expressions.
func flatten(allowed []corev1.TopologySelectorTerm) []topology.Segment {
	var terms []topology.Segment
	for _, selector := range allowed {
		product := []topology.Segment{nil}
		for _, e := range selector.MatchLabelExpressions {
			var longer []topology.Segment
			for _, t := range product {
				for _, v := range e.Values {
					longer = append(longer, append(slices.Clone(t), topology.Label{Key: e.Key, Value: v}))
				}
			}
			product = longer
		}
		for _, t := range product {
			if len(t) > 0 {
				slices.SortFunc(t, topology.CompareLabels)
				terms = append(terms, t)
			}
		}
	}
	return terms
}

var (
	// errNodeGone is the reason to ask the scheduler for another node.
	errNodeGone = errors.New("is not there any more")
	// errTopology is a requirement that cannot be made, until a Node, a CSINode or the class changes.
	errTopology = errors.New("no topology")
)

// topologyRequest holds what a requirement depends on besides the nodes of the driver.
type topologyRequest struct {
	strict, immediate bool
	allowed           []corev1.TopologySelectorTerm
	node              string // selected by the scheduler; "" for immediate binding
	claim             string // name, which spreads the claims of a StatefulSet
}

// requirement says where a volume may be, and where best (CSI spec,
// "TopologyRequirement"; KEP-557). It is nil when anywhere will do. Errors wrap
// errNodeGone or errTopology.
func requirement(r topologyRequest, known *topology.Aggregate) (*csi.TopologyRequirement, error) {
	var keys []string
	var selected topology.Segment
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
		if len(r.allowed) > 0 && !slices.ContainsFunc(allowed, func(t topology.Segment) bool { return t.SubsetOf(selected) }) {
			return nil, fmt.Errorf("%w: node %q is in none of the allowedTopologies of the class", errTopology, r.node)
		}
		requisite = []topology.Segment{selected}
	case len(r.allowed) > 0:
	case r.node == "" && !r.immediate:
		return nil, nil
	default:
		if r.node == "" {
			keys = known.CommonKeys()
		}
		if requisite = known.Segments(keys); len(keys) == 0 || len(requisite) == 0 {
			return nil, fmt.Errorf("%w: no topology available: the driver is registered on no node whose labels have its topology keys %q", errTopology, keys)
		}
	}
	if len(requisite) == 0 {
		return nil, nil
	}
	slices.SortFunc(requisite, topology.Compare)
	requisite = slices.CompactFunc(requisite, slices.Equal[topology.Segment])
	first := 0
	switch {
	case r.node == "":
		first = spread(r.claim, len(requisite))
	case !r.strict:
		first = slices.IndexFunc(requisite, func(t topology.Segment) bool { return t.SubsetOf(selected) })
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
func selectedTerm(node string, known *topology.Aggregate) (keys []string, term topology.Segment, err error) {
	keys, ok := known.Keys(node)
	if !ok {
		return nil, nil, fmt.Errorf("CSINode %q %w", node, errNodeGone)
	}
	labels, ok := known.Labels(node)
	if !ok {
		return nil, nil, fmt.Errorf("node %q %w", node, errNodeGone)
	}
	if len(keys) == 0 {
		return nil, nil, fmt.Errorf("%w: the driver has no topology keys on the selected node %q", errTopology, node)
	}
	segment, missing := topology.OfNode(labels, keys)
	if missing != nil {
		return nil, nil, fmt.Errorf("%w: the selected node %q lacks some of the labels %q", errTopology, node, keys)
	}
	return keys, segment, nil
}

func protoTopologies(terms []topology.Segment) []*csi.Topology {
	var out []*csi.Topology
	for _, t := range terms {
		out = append(out, &csi.Topology{Segments: t.Labels()})
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
