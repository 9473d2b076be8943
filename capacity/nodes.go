package capacity

import "github.com/storage-controller/storage-controller/internal/topology"

// nodes knows in which segment each node is, and how many nodes a segment has. An event
// of a node costs the same however many nodes there are.
type nodes struct {
	known    map[string]*node
	segments map[segment]int // how many nodes; never 0
}

// node is what is known of one, from its Node and its CSINode, either of which may be
// missing.
type node struct {
	labels     map[string]string
	keys       []string // sorted topology keys of the driver
	labelled   bool     // there is a Node
	registered bool     // there is a CSINode, and the driver is on it
	segment    segment
	counted    bool // in segments
}

// move tells which segments changed: appeared, with its first node, or vanished with its
// last. Both are nil when the set of segments is as before.
type move struct{ appeared, vanished *segment }

func newNodes() *nodes { return &nodes{known: map[string]*node{}, segments: map[segment]int{}} }

// setLabels takes the labels of a Node, or its end.
func (n *nodes) setLabels(name string, labels map[string]string, exists bool) move {
	return n.change(name, func(node *node) { node.labels, node.labelled = labels, exists })
}

// setKeys takes the topology keys of the driver on a node, or that it is not there.
func (n *nodes) setKeys(name string, keys []string, registered bool) move {
	return n.change(name, func(node *node) { node.keys, node.registered = keys, registered })
}

func (n *nodes) change(name string, change func(*node)) (m move) {
	known := n.known[name]
	if known == nil {
		known = &node{}
		n.known[name] = known
	}
	change(known)
	if !known.labelled && !known.registered {
		delete(n.known, name)
	}
	now, counted := segment(""), false
	if known.labelled && known.registered {
		s, missing := topology.OfNode(known.labels, known.keys)
		now, counted = segment(s.String()), missing == nil
	}
	before := known.segment
	if known.counted == counted && before == now {
		return move{}
	}
	if counted {
		n.segments[now]++
		if n.segments[now] == 1 {
			m.appeared = &now
		}
	}
	if known.counted {
		n.segments[before]--
		if n.segments[before] == 0 {
			delete(n.segments, before)
			m.vanished = &before
		}
	}
	known.segment, known.counted = now, counted
	return m
}
