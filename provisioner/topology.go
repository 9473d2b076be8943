// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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

// maxSegments bounds the combinations of allowedTopologies. A request that names so many is near the limit of gRPC.
const maxSegments = 10_000

// flatten returns the segments that allowedTopologies of a class admit: for each selector
// the product of the values of its expressions.
func flatten(allowed []corev1.TopologySelectorTerm) ([]topology.Segment, error) {
	var segments []topology.Segment
	for _, selector := range allowed {
		product := []topology.Segment{nil}
		for _, e := range selector.MatchLabelExpressions {
			if len(segments)+len(product)*len(e.Values) > maxSegments {
				return nil, fmt.Errorf("%w: allowedTopologies of the class have more than %d combinations", errTopology, maxSegments)
			}
			var longer []topology.Segment
			for _, s := range product {
				for _, v := range e.Values {
					longer = append(longer, append(slices.Clone(s), topology.Label{Key: e.Key, Value: v}))
				}
			}
			product = longer
		}
		for _, s := range product {
			if len(s) > 0 {
				slices.SortFunc(s, topology.CompareLabels)
				segments = append(segments, s)
			}
		}
	}
	return segments, nil
}

// admits reports whether allowedTopologies of a class admit a segment with these labels: whether it contains one of flatten.
func admits(allowed []corev1.TopologySelectorTerm, labels map[string]string) bool {
	lacks := func(e corev1.TopologySelectorLabelRequirement) bool {
		value, ok := labels[e.Key]
		return !ok || !slices.Contains(e.Values, value)
	}
	return slices.ContainsFunc(allowed, func(t corev1.TopologySelectorTerm) bool {
		return len(t.MatchLabelExpressions) > 0 && !slices.ContainsFunc(t.MatchLabelExpressions, lacks)
	})
}

var (
	// errNodeNotFound makes the scheduler select another node.
	errNodeNotFound = errors.New("not found")
	// errTopology lasts until a Node, a CSINode or the class changes.
	errTopology = errors.New("no topology available")
)

// topologyRequest holds what a requirement depends on besides the nodes of the driver.
type topologyRequest struct {
	strict, immediate bool
	allowed           []corev1.TopologySelectorTerm
	node              string // selected by the scheduler; "" for immediate binding
	claim             string // its name spreads the claims of a StatefulSet
}

// requirement returns the requisite and preferred topologies of a volume (CSI spec,
// "TopologyRequirement"; KEP-557). It is nil if every topology is acceptable. Errors wrap
// errNodeNotFound or errTopology.
func requirement(r topologyRequest, known *topology.Aggregate) (*csi.TopologyRequirement, error) {
	var keys []string
	var selected topology.Segment
	if r.node != "" {
		var err error
		if keys, selected, err = segmentOfNode(r.node, known); err != nil {
			return nil, err
		}
	}
	requisite, err := flatten(r.allowed)
	if err != nil {
		return nil, err
	}
	switch {
	case r.node != "" && r.strict:
		if len(r.allowed) > 0 && !admits(r.allowed, selected.Labels()) {
			return nil, fmt.Errorf("%w: node %q is in none of the allowedTopologies of the class", errTopology, r.node)
		}
		requisite = []topology.Segment{selected}
	case len(r.allowed) > 0:
	case r.node == "" && !r.immediate:
		return nil, nil
	case r.node != "":
		requisite = known.Segments(keys)
	default:
		requisite = known.AllSegments()
		if len(requisite) == 0 {
			return nil, noSegments(known.Missing())
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
		first = slices.IndexFunc(requisite, func(s topology.Segment) bool { return s.SubsetOf(selected) })
		if first < 0 {
			return nil, fmt.Errorf("%w: node %q is in none of the allowed topologies %v", errTopology, r.node, requisite)
		}
	}
	return &csi.TopologyRequirement{
		Requisite: protoTopologies(requisite),
		Preferred: protoTopologies(append(slices.Clone(requisite[first:]), requisite[:first]...)),
	}, nil
}

// Hints at what makes a topology available.
const (
	registerDriver = "Check that the node plugin is registered and that NodeGetInfo returns accessible_topology. " +
		"If the driver has no topology, set --feature-gates=Topology=false"
	restartPlugin = "Restart the node plugin there"
)

// maxNamedNodes bounds the nodes that an error names.
const maxNamedNodes = 3

// noSegments returns the error for a cluster where no node is in a segment. missing has the labels that Nodes lack, by the name of the
// node; it is empty if the driver has no topology keys anywhere.
func noSegments(missing map[string][]string) error {
	if len(missing) == 0 {
		return fmt.Errorf("%w: no CSINode has topology keys of the driver. %s", errTopology, registerDriver)
	}
	var named []string
	for _, node := range slices.Sorted(maps.Keys(missing)) {
		if len(named) == maxNamedNodes {
			named = append(named, fmt.Sprintf("%d more", len(missing)-maxNamedNodes))
			break
		}
		named = append(named, fmt.Sprintf("node %q lacks %q", node, missing[node]))
	}
	return fmt.Errorf("%w: the driver reports topology keys, and no Node has all of them as labels: %s. %s",
		errTopology, strings.Join(named, ", "), restartPlugin)
}

// segmentOfNode returns the topology keys of the driver on a node, and the segment of the node.
func segmentOfNode(node string, known *topology.Aggregate) (keys []string, segment topology.Segment, err error) {
	keys, ok := known.Keys(node)
	if !ok {
		return nil, nil, fmt.Errorf("CSINode %q %w", node, errNodeNotFound)
	}
	labels, ok := known.Labels(node)
	if !ok {
		return nil, nil, fmt.Errorf("node %q %w", node, errNodeNotFound)
	}
	if len(keys) == 0 {
		return nil, nil, fmt.Errorf("%w: the driver has no topology keys on the selected node %q. %s", errTopology, node, registerDriver)
	}
	segment, missing := topology.OfNode(labels, keys)
	if missing != nil {
		return nil, nil, fmt.Errorf("%w: the selected node %q lacks the labels %q. %s", errTopology, node, missing, restartPlugin)
	}
	return keys, segment, nil
}

func protoTopologies(segments []topology.Segment) []*csi.Topology {
	var out []*csi.Topology
	for _, s := range segments {
		out = append(out, &csi.Topology{Segments: s.Labels()})
	}
	return out
}

// spread returns the index below n of the most preferred topology of a claim. Claims of one
// StatefulSet, whose names end in their ordinal, get consecutive indices.
func spread(claim string, n int) int {
	base, index := claim, uint32(0)
	if dash := strings.LastIndexByte(claim, '-'); dash >= 0 {
		if i, err := strconv.ParseUint(claim[dash+1:], 10, 32); err == nil {
			index, base = uint32(i), claim[:dash]
			base = base[strings.LastIndexByte(base, '-')+1:]
		}
	}
	h := fnv.New32()
	_, _ = h.Write([]byte(base)) // never fails
	return int((h.Sum32() + index) % uint32(n))
}

// affinityOf returns the node affinity of the PersistentVolume of v, or nil without topology or if the volume is accessible
// everywhere. It ignores topologies without labels.
func (d driver) affinityOf(v *csi.Volume) *corev1.VolumeNodeAffinity {
	if !d.topology {
		return nil
	}
	var terms []corev1.NodeSelectorTerm
	for _, t := range v.GetAccessibleTopology() {
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
