// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// defaultSize is the capacity of a volume without a required capacity.
const defaultSize = 1 << 30

// controllerService is the controller service of a plugin.
type controllerService struct {
	csi.UnimplementedControllerServer
	p *Plugin
}

// ControllerGetCapabilities implements the controller service.
func (c *controllerService) ControllerGetCapabilities(context.Context,
	*csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	response := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range c.p.config().Controller {
		response.Capabilities = append(response.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return response, nil
}

// CreateVolume implements the controller service.
func (c *controllerService) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if r.GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "the name is missing")
	}
	if err := checkCapabilities(r.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	v, exists := c.p.state.byName[r.GetName()]
	if exists && !v.compatible(r) {
		return nil, status.Errorf(codes.AlreadyExists, "volume %q exists with other properties", r.GetName())
	}
	if !exists {
		var err error
		if v, err = c.newVolume(r); err != nil {
			return nil, err
		}
		c.p.state.add(v)
	}
	return &csi.CreateVolumeResponse{Volume: v.proto()}, nil
}

// newVolume returns a volume for r. It must be called with mu held.
func (c *controllerService) newVolume(r *csi.CreateVolumeRequest) (*Volume, error) {
	v := &Volume{
		Name: r.GetName(), Capacity: max(r.GetCapacityRange().GetRequiredBytes(), 0), Parameters: maps.Clone(r.GetParameters()),
		Source: r.GetVolumeContentSource(), Published: map[string]Publication{}, capabilities: r.GetVolumeCapabilities(),
		attributes: maps.Clone(c.p.cfg.VolumeContext),
	}
	if v.Capacity == 0 {
		v.Capacity = defaultSize
	}
	if err := c.checkSource(r.GetVolumeContentSource()); err != nil {
		return nil, err
	}
	limit := r.GetCapacityRange().GetLimitBytes()
	if limit > 0 && v.Capacity > limit {
		return nil, status.Errorf(codes.OutOfRange, "%d bytes are more than the limit of %d", v.Capacity, limit)
	}
	segment, err := c.segment(r.GetAccessibilityRequirements())
	if err != nil {
		return nil, err
	}
	v.Segment = segment
	if limit := c.p.cfg.Capacity; limit > 0 && c.p.state.used[segmentKey(segment)]+v.Capacity > limit {
		return nil, status.Errorf(codes.ResourceExhausted, "not enough capacity for %d bytes in %v", v.Capacity, segment)
	}
	return v, nil
}

func (c *controllerService) checkSource(source *csi.VolumeContentSource) error {
	if s := source.GetSnapshot(); s != nil && c.p.state.snapshots[s.GetSnapshotId()] == nil {
		return status.Errorf(codes.NotFound, "no snapshot %q", s.GetSnapshotId())
	}
	if s := source.GetVolume(); s != nil && c.p.state.volumes[s.GetVolumeId()] == nil {
		return status.Errorf(codes.NotFound, "no volume %q to clone", s.GetVolumeId())
	}
	return nil
}

// segment returns the first preferred topology segment that the driver has, else the first requisite
// one.
func (c *controllerService) segment(r *csi.TopologyRequirement) (map[string]string, error) {
	if c.p.cfg.Segments == nil {
		return nil, nil
	}
	wanted := append(slices.Clone(r.GetPreferred()), r.GetRequisite()...)
	if len(wanted) == 0 {
		return c.p.cfg.Segments[0], nil
	}
	for _, w := range wanted {
		for _, s := range c.p.cfg.Segments {
			if includes(s, w.GetSegments()) {
				return s, nil
			}
		}
	}
	return nil, status.Errorf(codes.ResourceExhausted, "nothing in %v", wanted)
}

// includes reports whether all contains every label of some.
func includes(all, some map[string]string) bool {
	for k, v := range some {
		if all[k] != v {
			return false
		}
	}
	return true
}

func (v *Volume) proto() *csi.Volume {
	out := &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Capacity, VolumeContext: v.attributes, ContentSource: v.Source}
	if v.Segment != nil {
		out.AccessibleTopology = []*csi.Topology{{Segments: v.Segment}}
	}
	return out
}

func checkCapabilities(caps []*csi.VolumeCapability) error {
	if len(caps) == 0 {
		return status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	for _, c := range caps {
		if c.GetAccessType() == nil || c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN {
			return status.Error(codes.InvalidArgument, "a volume capability lacks its access type or mode")
		}
	}
	return nil
}

// DeleteVolume implements the controller service.
func (c *controllerService) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID is missing")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if v := c.p.state.volumes[r.GetVolumeId()]; v != nil {
		if len(v.Published) > 0 {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %q is published", v.ID)
		}
		c.p.state.remove(v)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ControllerPublishVolume implements the controller service.
func (c *controllerService) ControllerPublishVolume(_ context.Context,
	r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetNodeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID or the node ID is missing")
	}
	if err := checkCapabilities([]*csi.VolumeCapability{r.GetVolumeCapability()}); err != nil {
		return nil, err
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	v := c.p.state.volumes[r.GetVolumeId()]
	switch {
	case v == nil:
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetVolumeId())
	case c.p.cfg.Nodes != nil && !slices.Contains(c.p.cfg.Nodes, r.GetNodeId()):
		return nil, status.Errorf(codes.NotFound, "no node %q", r.GetNodeId())
	}
	now := Publication{Readonly: r.GetReadonly(), Capability: r.GetVolumeCapability()}
	if before, published := v.Published[r.GetNodeId()]; published {
		if before.Readonly != now.Readonly || !proto.Equal(before.Capability, now.Capability) {
			return nil, status.Errorf(codes.AlreadyExists, "volume %q is published to %q in another way", v.ID, r.GetNodeId())
		}
		return &csi.ControllerPublishVolumeResponse{PublishContext: c.p.cfg.PublishContext}, nil
	}
	if len(v.Published) > 0 && singleNode(now.Capability) {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is published to another node", v.ID)
	}
	if m := c.p.cfg.MaxVolumesPerNode; m > 0 && c.p.state.onNode[r.GetNodeId()] >= m {
		return nil, status.Errorf(codes.ResourceExhausted, "node %q has %d volumes already", r.GetNodeId(), m)
	}
	v.Published[r.GetNodeId()] = now
	c.p.state.onNode[r.GetNodeId()]++
	return &csi.ControllerPublishVolumeResponse{PublishContext: c.p.cfg.PublishContext}, nil
}

func singleNode(c *csi.VolumeCapability) bool {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER:
		return false
	}
	return true
}

// ControllerUnpublishVolume implements the controller service.
func (c *controllerService) ControllerUnpublishVolume(_ context.Context,
	r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID is missing")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if v := c.p.state.volumes[r.GetVolumeId()]; v != nil {
		for node := range v.Published {
			if r.GetNodeId() == "" || r.GetNodeId() == node {
				delete(v.Published, node)
				c.p.state.onNode[node]--
			}
		}
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// ValidateVolumeCapabilities implements the controller service.
func (c *controllerService) ValidateVolumeCapabilities(_ context.Context,
	r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID is missing")
	}
	if err := checkCapabilities(r.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.p.state.volumes[r.GetVolumeId()] == nil {
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetVolumeId())
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters(),
	}}, nil
}

// GetCapacity implements the controller service.
func (c *controllerService) GetCapacity(_ context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.p.cfg.Capacity == 0 {
		return &csi.GetCapacityResponse{AvailableCapacity: 1 << 50}, nil
	}
	segments := c.p.cfg.Segments
	if segments == nil {
		segments = []map[string]string{nil}
	}
	var free int64
	for _, s := range segments {
		if includes(s, r.GetAccessibleTopology().GetSegments()) {
			free += c.p.cfg.Capacity - c.p.state.used[segmentKey(s)]
		}
	}
	return &csi.GetCapacityResponse{AvailableCapacity: free}, nil
}

// ListVolumes implements the controller service.
func (c *controllerService) ListVolumes(_ context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	all := c.p.state.sorted()
	page, next, err := page(all, r.GetStartingToken(), r.GetMaxEntries(), func(v *Volume) int { return v.number })
	if err != nil {
		return nil, err
	}
	response := &csi.ListVolumesResponse{NextToken: next}
	for _, v := range page {
		response.Entries = append(response.Entries, &csi.ListVolumesResponse_Entry{
			Volume: v.proto(),
			Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: slices.Sorted(maps.Keys(v.Published))},
		})
	}
	return response, nil
}

// page returns the entries of all, which is sorted by number, after token. A token is the number of
// the last entry of the previous page.
func page[T any](all []T, token string, size int32, number func(T) int) (part []T, next string, err error) {
	after := 0
	if token != "" {
		if after, err = strconv.Atoi(token); err != nil {
			return nil, "", status.Errorf(codes.Aborted, "token %q is not one of ours", token)
		}
	}
	begin := slices.IndexFunc(all, func(t T) bool { return number(t) > after })
	if begin < 0 {
		return nil, "", nil
	}
	part = all[begin:]
	if size > 0 && len(part) > int(size) {
		part = part[:size]
		next = strconv.Itoa(number(part[size-1]))
	}
	return part, next, nil
}

// ControllerGetVolume implements the controller service.
func (c *controllerService) ControllerGetVolume(_ context.Context,
	r *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	v := c.p.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetVolumeId())
	}
	return &csi.ControllerGetVolumeResponse{Volume: v.proto(), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{
		PublishedNodeIds: slices.Sorted(maps.Keys(v.Published)),
	}}, nil
}

// ControllerModifyVolume implements the controller service.
func (c *controllerService) ControllerModifyVolume(_ context.Context,
	r *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	v := c.p.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetVolumeId())
	}
	v.Mutable = maps.Clone(r.GetMutableParameters())
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// ControllerExpandVolume implements the controller service.
func (c *controllerService) ControllerExpandVolume(_ context.Context,
	r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetCapacityRange() == nil {
		return nil, status.Error(codes.InvalidArgument, "the volume ID or the capacity range is missing")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	v := c.p.state.volumes[r.GetVolumeId()]
	if v == nil {
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetVolumeId())
	}
	if more := r.GetCapacityRange().GetRequiredBytes() - v.Capacity; more > 0 {
		v.Capacity += more
		c.p.state.used[segmentKey(v.Segment)] += more
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Capacity, NodeExpansionRequired: !c.p.cfg.NoNodeExpansion}, nil
}
