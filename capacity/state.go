// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// state holds the nodes, classes and objects that events have reported. The methods for
// events return the pairs to enqueue. It is safe for use by several goroutines.
type state struct {
	immediate bool // publish StorageClasses with the binding mode Immediate
	driver    string
	grace     time.Duration
	now       func() time.Time

	mu         sync.Mutex
	nodes      *nodes
	emptySince map[segment]time.Time              // segments whose last node was deleted
	classes    map[string]*storagev1.StorageClass // the published ones
	objects    map[pair]map[string]types.UID      // names and UIDs
	schedules  schedules
}

func newState(driver string, cfg Config, now func() time.Time) *state {
	return &state{
		immediate: cfg.ImmediateBinding, driver: driver, grace: cfg.RemovalGrace, now: now,
		nodes: newNodes(), emptySince: map[segment]time.Time{}, classes: map[string]*storagev1.StorageClass{},
		objects: map[pair]map[string]types.UID{}, schedules: schedules{},
	}
}

// nodeChanged records the labels of a Node, or its deletion if exists is false.
func (s *state) nodeChanged(name string, labels map[string]string, exists bool) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.segmentsChanged(s.nodes.setLabels(name, labels, exists))
}

// csiNodeChanged records whether the driver is registered on a node, and its topology keys.
// A nil node is a deleted CSINode.
func (s *state) csiNodeChanged(name string, node *storagev1.CSINode) []pair {
	var keys []string
	registered := false
	if d := kube.DriverOnNode(node, s.driver); d != nil {
		keys, registered = d.TopologyKeys, true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.segmentsChanged(s.nodes.setKeys(name, keys, registered))
}

// setSegment makes seg the only segment, with one permanent node.
func (s *state) setSegment(seg segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes.segments[seg] = 1
}

func (s *state) segmentsChanged(c segmentChange) []pair {
	var pairs []pair
	if c.added != nil {
		delete(s.emptySince, *c.added)
		pairs = append(pairs, s.pairsOfSegment(*c.added)...)
	}
	if c.removed != nil && len(s.classes) > 0 {
		s.emptySince[*c.removed] = s.now()
		pairs = append(pairs, s.pairsOfSegment(*c.removed)...)
	}
	return pairs
}

// classChanged records a StorageClass. A class of another driver counts as deleted: it may
// have replaced a published one of the same name.
func (s *state) classChanged(class *storagev1.StorageClass) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	immediate := class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingImmediate
	if class.Provisioner != s.driver || immediate && !s.immediate {
		return s.dropClass(class.Name)
	}
	s.classes[class.Name] = class
	pairs := s.pairsOfClass(class.Name)
	for _, p := range pairs {
		s.schedules.of(p).refresh = true
	}
	return pairs
}

func (s *state) classDeleted(name string) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropClass(name)
}

func (s *state) dropClass(name string) []pair {
	if s.classes[name] == nil {
		return nil
	}
	delete(s.classes, name)
	return s.pairsOfClass(name)
}

func (s *state) pairsOfSegment(seg segment) []pair {
	pairs := make([]pair, 0, len(s.classes))
	for class := range s.classes {
		pairs = append(pairs, pair{Class: class, Segment: seg})
	}
	return pairs
}

// pairsOfClass includes segments without nodes whose objects were not deleted yet.
func (s *state) pairsOfClass(class string) []pair {
	pairs := make([]pair, 0, len(s.nodes.segments)+len(s.emptySince))
	for seg := range s.nodes.segments {
		pairs = append(pairs, pair{Class: class, Segment: seg})
	}
	for seg := range s.emptySince {
		pairs = append(pairs, pair{Class: class, Segment: seg})
	}
	return pairs
}

// pairsOfPublishedClass returns nil if class is not published.
func (s *state) pairsOfPublishedClass(class string) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.classes[class] == nil {
		return nil
	}
	return s.pairsOfClass(class)
}

// pairsOfVolume returns the pairs of all classes in the segments from which pv is
// accessible, or nil if none of the segments is known.
func (s *state) pairsOfVolume(pv *corev1.PersistentVolume) []pair {
	required := pv.Spec.NodeAffinity.Required
	if required == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var pairs []pair
	for _, seg := range s.knownSegments(required.NodeSelectorTerms) {
		pairs = append(pairs, s.pairsOfSegment(seg)...)
	}
	return pairs
}

// pairsOf returns the pairs of all classes in seg, or nil if it has no nodes.
func (s *state) pairsOf(seg segment) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes.segments[seg] == 0 {
		return nil
	}
	return s.pairsOfSegment(seg)
}

// knownSegments returns the segments of terms that have nodes or are in the removal grace,
// without duplicates.
func (s *state) knownSegments(terms []corev1.NodeSelectorTerm) []segment {
	var known []segment
	for _, term := range terms {
		seg, ok := segmentOfTerm(term)
		_, empty := s.emptySince[seg]
		if ok && (empty || s.nodes.segments[seg] > 0) && !slices.Contains(known, seg) {
			known = append(known, seg)
		}
	}
	return known
}

// objectAdded records an object. It returns nothing if that is the only object of a pair
// that needs one.
func (s *state) objectAdded(obj *storagev1.CSIStorageCapacity) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := pairOf(obj)
	if s.objects[p] == nil {
		s.objects[p] = map[string]types.UID{}
	}
	s.objects[p][obj.Name] = obj.UID
	if p.UnmatchedUID == "" && s.nodes.segments[p.Segment] == 0 {
		if _, known := s.emptySince[p.Segment]; !known {
			s.emptySince[p.Segment] = s.now() // its last node may have been deleted before this term
		}
	}
	if len(s.objects[p]) == 1 && s.desired(p) {
		return nil
	}
	return []pair{p}
}

// objectDeleted records that another client deleted an object of p. It ignores objects
// that [state.forgetObject] removed.
func (s *state) objectDeleted(p pair, name string, uid types.UID) []pair {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects[p][name] != uid {
		return nil
	}
	s.dropObject(p, name)
	if sched := s.schedules[p]; sched != nil {
		sched.refresh = true // also in the removal grace: a node may return
	}
	if !s.desired(p) {
		return nil
	}
	s.schedules.of(p).refresh = true
	return []pair{p}
}

// forgetObject removes an object that this process deleted.
func (s *state) forgetObject(p pair, name string, uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects[p][name] == uid {
		s.dropObject(p, name)
	}
}

func (s *state) dropObject(p pair, name string) {
	delete(s.objects[p], name)
	if len(s.objects[p]) == 0 {
		delete(s.objects, p)
	}
}

// desired reports whether p needs an object: its class is published and its segment has
// nodes.
func (s *state) desired(p pair) bool {
	return p.UnmatchedUID == "" && s.classes[p.Class] != nil && s.nodes.segments[p.Segment] > 0
}

// read returns the names and UIDs of the objects of p, and a pairState without objects.
func (s *state) read(p pair) (objects map[string]types.UID, ps pairState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ps = pairState{unmatched: p.UnmatchedUID != "", class: s.classes[p.Class], hasNodes: s.nodes.segments[p.Segment] > 0, now: s.now()}
	if since, ok := s.emptySince[p.Segment]; ok {
		ps.removeAt = since.Add(s.grace)
	}
	if sched := s.schedules[p]; sched != nil && s.desired(p) {
		ps.schedule = *sched
	}
	return maps.Clone(s.objects[p]), ps
}

// prune drops the schedule of p, and its segment, once they are not needed anymore.
func (s *state) prune(p pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, empty := s.emptySince[p.Segment]
	inGrace := empty && s.now().Before(since.Add(s.grace))
	if !s.desired(p) && (s.classes[p.Class] == nil || !inGrace) {
		delete(s.schedules, p)
	}
	if !empty || inGrace {
		return
	}
	for class := range s.classes {
		if len(s.objects[pair{Class: class, Segment: p.Segment}]) > 0 {
			return
		}
	}
	delete(s.emptySince, p.Segment)
}

// counts holds the values of the metrics.
type counts struct {
	goal, current, obsolete, failing int
	oldest                           time.Time // last successful call of the pair that waits longest; zero: none
}

func (s *state) counts() counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := counts{goal: len(s.nodes.segments) * len(s.classes)}
	for p, names := range s.objects {
		if s.desired(p) {
			c.current++
		} else {
			c.obsolete += len(names)
		}
	}
	for p, sched := range s.schedules {
		if !s.desired(p) {
			continue
		}
		if sched.failing {
			c.failing++
		}
		if !sched.answered.IsZero() && (c.oldest.IsZero() || sched.answered.Before(c.oldest)) {
			c.oldest = sched.answered
		}
	}
	return c
}
