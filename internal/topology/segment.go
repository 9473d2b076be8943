// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package topology computes from the labels of Nodes and the topology keys of CSINodes
// where the nodes of a driver are (CSI spec, "Topology"; KEP-557).
//
// A [Segment] is a set of labels, for example zone=a and rack=1. A volume or a capacity
// belongs to a segment; a node is in the segment that [OfNode] computes. [Aggregate] keeps
// the segments of all nodes up to date, so that a lookup does not depend on the number of
// nodes.
package topology

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// Label is one topology key with its value.
type Label struct{ Key, Value string }

// CompareLabels orders labels by key and value.
func CompareLabels(a, b Label) int {
	return cmp.Or(strings.Compare(a.Key, b.Key), strings.Compare(a.Value, b.Value))
}

// Segment is a topology segment: labels with different keys, sorted by key.
type Segment []Label

// SegmentOf returns the segment with these labels.
func SegmentOf(labels map[string]string) Segment {
	s := make(Segment, 0, len(labels))
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		s = append(s, Label{k, labels[k]})
	}
	return s
}

// OfNode returns the segment of a node with these labels, where the driver has registered
// keys. A node without all of the keys is in no segment: OfNode then returns the missing
// keys, which the kubelet sets when the driver registers.
func OfNode(labels map[string]string, keys []string) (s Segment, missing []string) {
	s = make(Segment, 0, len(keys))
	for _, k := range keys {
		v, ok := labels[k]
		if !ok {
			missing = append(missing, k)
		}
		s = append(s, Label{k, v})
	}
	if missing != nil {
		return nil, missing
	}
	slices.SortFunc(s, CompareLabels)
	return s, nil
}

// String returns key=value,key=value. It differs for different segments of nodes: keys and
// values of labels contain neither a comma nor an equals sign.
func (s Segment) String() string {
	var b strings.Builder
	for i, l := range s {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(l.Key)
		b.WriteByte('=')
		b.WriteString(l.Value)
	}
	return b.String()
}

// Compare orders segments with fewer labels first, then by key and value.
func Compare(a, b Segment) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), slices.CompareFunc(a, b, CompareLabels))
}

// SubsetOf reports whether every label of s is in other.
func (s Segment) SubsetOf(other Segment) bool {
	return !slices.ContainsFunc(s, func(l Label) bool { return !slices.Contains(other, l) })
}

// Labels returns the labels of s as a map, which is never nil.
func (s Segment) Labels() map[string]string {
	labels := make(map[string]string, len(s))
	for _, l := range s {
		labels[l.Key] = l.Value
	}
	return labels
}
