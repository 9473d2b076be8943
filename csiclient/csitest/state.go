// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Volume is a volume of the driver.
type Volume struct {
	ID, Name   string
	Capacity   int64
	Parameters map[string]string
	Mutable    map[string]string // of the latest ControllerModifyVolume
	Segment    map[string]string // where it is accessible; nil without topology
	Source     *csi.VolumeContentSource
	// Published is by node ID.
	Published map[string]Publication

	number       int
	capabilities []*csi.VolumeCapability
	attributes   map[string]string
}

// Publication describes a volume that is published to a node.
type Publication struct {
	Readonly   bool
	Capability *csi.VolumeCapability
}

// Snapshot is a snapshot of the driver.
type Snapshot struct {
	ID, Name, VolumeID string
	Size               int64
	GroupID            string // empty: in no group

	number  int
	created *timestamppb.Timestamp
}

type state struct {
	number    int // of the latest volume or snapshot
	volumes   map[string]*Volume
	byName    map[string]*Volume
	snapshots map[string]*Snapshot
	groups    map[string]*snapshotGroup
	used      map[string]int64 // bytes by segment
	onNode    map[string]int   // publications
}

func newState(numbered int) state {
	return state{
		number:  numbered,
		volumes: map[string]*Volume{}, byName: map[string]*Volume{}, snapshots: map[string]*Snapshot{},
		groups: map[string]*snapshotGroup{},
		used:   map[string]int64{}, onNode: map[string]int{},
	}
}

// next returns the number of a new volume or snapshot, which orders them.
func (s *state) next() int {
	s.number++
	return s.number
}

func (s *state) add(v *Volume) {
	v.number = s.next()
	v.ID = fmt.Sprintf("vol-%06d", v.number)
	s.volumes[v.ID], s.byName[v.Name] = v, v
	s.used[segmentKey(v.Segment)] += v.Capacity
}

func (s *state) remove(v *Volume) {
	delete(s.volumes, v.ID)
	delete(s.byName, v.Name)
	s.used[segmentKey(v.Segment)] -= v.Capacity
}

func segmentKey(segment map[string]string) string { return fmt.Sprint(segment) } // maps print sorted

// Volumes returns the volumes in the order of their creation.
func (p *Plugin) Volumes() []Volume {
	p.mu.Lock()
	defer p.mu.Unlock()
	var volumes []Volume
	for _, v := range p.state.sorted() {
		c := *v
		c.Published = maps.Clone(v.Published)
		volumes = append(volumes, c)
	}
	return volumes
}

// VolumeCount returns the number of volumes.
func (p *Plugin) VolumeCount() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.state.volumes)
}

// Publications returns the number of publications of all volumes.
func (p *Plugin) Publications() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, v := range p.state.volumes {
		n += len(v.Published)
	}
	return n
}

// AddVolume adds a volume without a call, and returns its ID.
func (p *Plugin) AddVolume(name string, capacity int64) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := &Volume{Name: name, Capacity: capacity, Published: map[string]Publication{}}
	p.state.add(v)
	return v.ID
}

// Unpublish removes a publication without a call, as an administrator of the storage system does.
func (p *Plugin) Unpublish(volumeID, nodeID string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if v := p.state.volumes[volumeID]; v != nil {
		delete(v.Published, nodeID)
	}
}

func (s *state) sorted() []*Volume {
	return slices.SortedFunc(maps.Values(s.volumes), func(a, b *Volume) int { return cmp.Compare(a.number, b.number) })
}

func (s *state) sortedSnapshots() []*Snapshot {
	return slices.SortedFunc(maps.Values(s.snapshots), func(a, b *Snapshot) int { return cmp.Compare(a.number, b.number) })
}

// compatible reports whether v satisfies request.
func (v *Volume) compatible(request *csi.CreateVolumeRequest) bool {
	r := request.GetCapacityRange()
	switch {
	case v.Capacity < r.GetRequiredBytes(), r.GetLimitBytes() > 0 && v.Capacity > r.GetLimitBytes():
		return false
	case !maps.Equal(v.Parameters, request.GetParameters()), !proto.Equal(v.Source, request.GetVolumeContentSource()):
		return false
	}
	return slices.EqualFunc(v.capabilities, request.GetVolumeCapabilities(),
		func(a, b *csi.VolumeCapability) bool { return proto.Equal(a, b) })
}
