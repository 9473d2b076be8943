// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
)

// requirement holds the topology values in which a volume may be, the preferred ones first. Nil means all.
type requirement []string

// requirementOf returns the values of the topology key in r. It returns false if r has segments, but none with the key.
func requirementOf(key string, r *csi.TopologyRequirement) (requirement, bool) {
	var values requirement
	segments := slices.Concat(r.GetPreferred(), r.GetRequisite())
	for _, segment := range segments {
		if value := segment.GetSegments()[key]; value != "" {
			values = append(values, value)
		}
	}
	return values, values != nil || len(segments) == 0
}

// allows reports whether a volume may be in value.
func (r requirement) allows(value string) bool { return r == nil || slices.Contains(r, value) }

// nodeState is the Node with a topology value, as the service knows it.
type nodeState struct {
	value string
	// object is nil if there is no such Node.
	object *corev1.Node
	// read reports that the API server has confirmed that there is none.
	read bool
}

// ready reports whether the Node exists and is [Ready].
func (n nodeState) ready() bool { return n.object != nil && Ready(n.object) }

// Ready reports whether topolvm-node can work on node. A Node without the condition Ready is ready: tools may create it.
func Ready(node *corev1.Node) bool {
	return !slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
	})
}

// roomiest returns the Node with the most available bytes of class, and these. Of equal Nodes it is the first by name. It is nil if no Node
// has any, apart from those that are being deleted.
func (n names) roomiest(nodes []*corev1.Node, class string) (best *corev1.Node, free Bytes) {
	for _, candidate := range nodes {
		available, _ := n.available(candidate, class)
		if available > free || available == free && best != nil && candidate.Name < best.Name {
			best, free = candidate, available
		}
	}
	return best, free
}
