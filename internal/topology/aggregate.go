// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"maps"
	"slices"
	"strings"
	"sync"
)

// Aggregate holds the nodes of a cluster and counts them by segment, so that a lookup
// costs the same in a cluster of any size. See [NewAggregate] for a usable value. It is safe
// for use by several goroutines.
type Aggregate struct {
	mu     sync.Mutex
	labels map[string]map[string]string // of Nodes
	keys   map[string][]string          // of CSINodes, sorted; empty without the driver
	sets   map[string]*keySet           // by their keys, joined
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
	return &Aggregate{labels: map[string]map[string]string{}, keys: map[string][]string{}, sets: map[string]*keySet{}}
}

// Labels returns the labels of a Node, or false if there is no Node of that name.
func (a *Aggregate) Labels(name string) (map[string]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	labels, ok := a.labels[name]
	return labels, ok
}

// Keys returns the sorted topology keys of the driver on a node, or false if there is no
// CSINode of that name. Without the driver on the node the keys are empty.
func (a *Aggregate) Keys(node string) ([]string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	keys, ok := a.keys[node]
	return keys, ok
}

// CommonKeys returns the topology keys that most nodes have, or nil if the driver is on no node.
func (a *Aggregate) CommonKeys() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var best *keySet
	for _, text := range slices.Sorted(maps.Keys(a.sets)) {
		if s := a.sets[text]; best == nil || s.csiNodes > best.csiNodes {
			best = s
		}
	}
	if best == nil {
		return nil
	}
	return best.keys
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

// Segments returns the segments of all Nodes that have keys as labels, sorted by [Compare].
func (a *Aggregate) Segments(keys []string) []Segment {
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok := a.sets[joined(keys)]
	if !ok {
		return nil
	}
	if s.sorted == nil {
		s.sorted = make([]Segment, 0, len(s.counts))
		for _, c := range s.counts {
			s.sorted = append(s.sorted, c.segment)
		}
		slices.SortFunc(s.sorted, Compare)
	}
	return slices.Clone(s.sorted)
}

// SetNode records the labels of a Node, or its deletion if exists is false. It reports
// whether the segment of the node changed for any of the key sets.
func (a *Aggregate) SetNode(name string, labels map[string]string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before, existed := a.labels[name]
	if exists {
		a.labels[name] = labels
	} else {
		delete(a.labels, name)
	}
	for _, s := range a.sets {
		was, is := "", ""
		if existed {
			was = s.add(before, -1)
		}
		if exists {
			is = s.add(labels, 1)
		}
		changed = changed || was != is
	}
	return changed || existed != exists
}

// SetKeys records the topology keys of the driver on a node, or the deletion of the CSINode if
// exists is false. Without the driver on the node the keys are empty. It reports whether
// anything changed.
func (a *Aggregate) SetKeys(name string, keys []string, exists bool) (changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	keys = slices.Sorted(slices.Values(keys))
	before, existed := a.keys[name]
	if existed == exists && slices.Equal(before, keys) {
		return false
	}
	if exists {
		a.keys[name] = keys
	} else {
		delete(a.keys, name)
	}
	if len(before) > 0 {
		text := joined(before)
		if a.sets[text].csiNodes--; a.sets[text].csiNodes == 0 {
			delete(a.sets, text)
		}
	}
	if exists && len(keys) > 0 {
		a.set(keys).csiNodes++
	}
	return true
}

// set returns the key set of keys. A new key set counts all nodes once.
func (a *Aggregate) set(keys []string) *keySet {
	text := joined(keys)
	if s, ok := a.sets[text]; ok {
		return s
	}
	s := &keySet{keys: keys, counts: map[string]*counted{}}
	for _, labels := range a.labels {
		s.add(labels, 1)
	}
	a.sets[text] = s
	return s
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
	if c.nodes += n; c.nodes == 0 {
		delete(s.counts, text)
		s.sorted = nil
	}
	return text
}

func joined(keys []string) string { return strings.Join(keys, "\x00") }
