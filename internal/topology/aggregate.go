// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"slices"
	"strings"
	"sync"
)

// Aggregate holds the nodes of a cluster and counts them by segment, so that a lookup
// costs the same in a cluster of any size. See [NewAggregate] for a usable value. It is safe
// for use by several goroutines.
//
// The nodes of a driver may have different sets of topology keys. A node is in the segment that the keys of its CSINode give it. As long
// as its keys are not known, because the driver is not registered or a label is missing, it is in a segment of each set whose labels it
// has.
type Aggregate struct {
	mu    sync.Mutex
	nodes map[string]node
	sets  map[string]*keySet // by their keys, joined
}

// node holds the Node and the CSINode of one name.
type node struct {
	labels             map[string]string // of the Node
	keys               []string          // of the CSINode, sorted; empty without the driver
	exists, registered bool              // the Node, and the CSINode
}

// keySet counts the nodes by the segment that one set of topology keys gives them.
type keySet struct {
	keys     []string
	csiNodes int                 // that have these keys
	counts   map[string]*counted // by Segment.String
	sorted   []Segment           // nil: not computed since the last change
}

// counted is a segment with its number of nodes.
type counted struct {
	segment Segment
	nodes   int
}

// NewAggregate returns an Aggregate without nodes.
func NewAggregate() *Aggregate {
	return &Aggregate{nodes: map[string]node{}, sets: map[string]*keySet{}}
}

// Labels returns the labels of a Node, or false if there is no Node of that name.
func (a *Aggregate) Labels(name string) (map[string]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nodes[name]
	return n.labels, n.exists
}

// Keys returns the sorted topology keys of the driver on a node, or false if there is no
// CSINode of that name. Without the driver on the node the keys are empty.
func (a *Aggregate) Keys(name string) ([]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nodes[name]
	return n.keys, n.registered
}

// AllKeys returns the topology keys that the driver has on at least one node.
func (a *Aggregate) AllKeys() map[string]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := map[string]bool{}
	for _, s := range a.sets {
		for _, k := range s.keys {
			all[k] = true
		}
	}
	return all
}

// Segments returns the segments of the nodes with keys, sorted by [Compare].
func (a *Aggregate) Segments(keys []string) []Segment {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s, ok := a.sets[joined(keys)]; ok {
		return slices.Clone(s.segments())
	}
	return nil
}

// AllSegments returns the segments of the nodes with any set of topology keys, in no particular order. There may be none.
func (a *Aggregate) AllSegments() (all []Segment) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sets {
		all = append(all, s.segments()...)
	}
	return all
}

// Missing returns the labels that a Node lacks although they are topology keys of its CSINode, by the name of the node.
func (a *Aggregate) Missing() map[string][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := map[string][]string{}
	for name, n := range a.nodes {
		if _, missing := OfNode(n.labels, n.keys); missing != nil {
			all[name] = missing
		}
	}
	return all
}

// SetNode records the labels of a Node, or its deletion if exists is false. It reports
// whether a segment of the node changed.
func (a *Aggregate) SetNode(name string, labels map[string]string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nodes[name]
	existed := n.exists
	before := a.add(n, -1)
	n.labels, n.exists = labels, exists
	if !exists {
		n.labels = nil
	}
	a.store(name, n)
	return !slices.Equal(before, a.add(n, 1)) || existed != exists
}

// SetKeys records the topology keys of the driver on a node, or the deletion of the CSINode if
// exists is false. Without the driver on the node the keys are empty. It reports whether
// anything changed.
func (a *Aggregate) SetKeys(name string, keys []string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	keys = slices.Sorted(slices.Values(keys))
	n := a.nodes[name]
	if n.registered == exists && slices.Equal(n.keys, keys) {
		return false
	}
	a.add(n, -1)
	if text := joined(n.keys); len(n.keys) > 0 {
		a.sets[text].csiNodes--
		if a.sets[text].csiNodes == 0 {
			delete(a.sets, text)
		}
	}
	n.keys, n.registered = keys, exists
	a.store(name, n) // before a new key set counts the nodes
	if exists && len(keys) > 0 {
		a.set(keys).csiNodes++
	}
	a.add(n, 1)
	return true
}

// store does not count the node. The caller holds mu.
func (a *Aggregate) store(name string, n node) {
	if !n.exists && !n.registered {
		delete(a.nodes, name)
		return
	}
	a.nodes[name] = n
}

// set returns the key set of keys. A new key set counts the nodes once that are in a segment of each set.
func (a *Aggregate) set(keys []string) *keySet {
	text := joined(keys)
	if s, ok := a.sets[text]; ok {
		return s
	}
	s := &keySet{keys: keys, counts: map[string]*counted{}}
	for _, n := range a.nodes {
		if n.exists && n.own() == "" {
			s.add(n.labels, 1)
		}
	}
	a.sets[text] = s
	return s
}

// own returns the key set that alone counts the node, or "" if each set does.
func (n node) own() string {
	if _, missing := OfNode(n.labels, n.keys); missing != nil {
		return ""
	}
	return joined(n.keys)
}

// add adds count to the nodes of the segments of n, and returns these segments as sorted texts. The caller holds mu.
func (a *Aggregate) add(n node, count int) (segments []string) {
	if !n.exists {
		return nil
	}
	if s, ok := a.sets[n.own()]; ok {
		return []string{s.add(n.labels, count)}
	}
	for _, s := range a.sets {
		if text := s.add(n.labels, count); text != "" {
			segments = append(segments, text)
		}
	}
	slices.Sort(segments)
	return segments
}

// add adds n to the nodes of the segment of a node with these labels, and returns that segment as
// text, or "" if a label is missing.
func (s *keySet) add(labels map[string]string, n int) string {
	segment, missing := OfNode(labels, s.keys)
	if missing != nil {
		return ""
	}
	text := segment.String()
	c := s.counts[text]
	if c == nil {
		c = &counted{segment: segment}
		s.counts[text], s.sorted = c, nil
	}
	c.nodes += n
	if c.nodes == 0 {
		delete(s.counts, text)
		s.sorted = nil
	}
	return text
}

// segments returns the segments of s, sorted by [Compare]. The slice is shared.
func (s *keySet) segments() []Segment {
	if s.sorted == nil {
		s.sorted = make([]Segment, 0, len(s.counts))
		for _, c := range s.counts {
			s.sorted = append(s.sorted, c.segment)
		}
		slices.SortFunc(s.sorted, Compare)
	}
	return s.sorted
}

func joined(keys []string) string { return strings.Join(keys, "\x00") }
