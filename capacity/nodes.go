// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import "github.com/storage-controller/storage-controller/internal/topology"

// nodes counts the nodes of each segment. The cost of an event does not depend on the
// number of nodes.
type nodes struct {
	known    map[string]*node
	segments map[segment]int // number of nodes, never 0
}

// node holds what a Node and a CSINode contain; one of them may be missing.
type node struct {
	labels     map[string]string
	keys       []string // topology keys of the driver
	exists     bool     // the Node
	registered bool     // the driver, in the CSINode
	segment    segment
	counted    bool // in segments
}

// segmentChange holds the segment that got its first node and the one that lost its last
// node; nil for none.
type segmentChange struct{ added, removed *segment }

func newNodes() *nodes { return &nodes{known: map[string]*node{}, segments: map[segment]int{}} }

// setLabels records the labels of a Node, or its deletion if exists is false.
func (n *nodes) setLabels(name string, labels map[string]string, exists bool) segmentChange {
	return n.change(name, func(node *node) { node.labels, node.exists = labels, exists })
}

// setKeys records the topology keys of the driver on a node, or that it is not registered.
func (n *nodes) setKeys(name string, keys []string, registered bool) segmentChange {
	return n.change(name, func(node *node) { node.keys, node.registered = keys, registered })
}

func (n *nodes) change(name string, change func(*node)) (c segmentChange) {
	known := n.known[name]
	if known == nil {
		known = &node{}
		n.known[name] = known
	}
	change(known)
	if !known.exists && !known.registered {
		delete(n.known, name)
	}
	now, counted := segment(""), false
	if known.exists && known.registered {
		s, missing := topology.OfNode(known.labels, known.keys)
		now, counted = segment(s.String()), missing == nil
	}
	before := known.segment
	if known.counted == counted && before == now {
		return segmentChange{}
	}
	if counted {
		n.segments[now]++
		if n.segments[now] == 1 {
			c.added = &now
		}
	}
	if known.counted {
		n.segments[before]--
		if n.segments[before] == 0 {
			delete(n.segments, before)
			c.removed = &before
		}
	}
	known.segment, known.counted = now, counted
	return c
}
