// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// groupControllerService is the group controller service of a plugin.
type groupControllerService struct {
	csi.UnimplementedGroupControllerServer
	p *Plugin
}

// snapshotGroup is a group of snapshots of the driver.
type snapshotGroup struct {
	id, name  string
	volumes   []string
	snapshots []*Snapshot
	created   *timestamppb.Timestamp
}

func (g *snapshotGroup) proto() *csi.VolumeGroupSnapshot {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: g.id, CreationTime: g.created, ReadyToUse: true}
	for _, s := range g.snapshots {
		out.Snapshots = append(out.Snapshots, s.proto())
	}
	return out
}

// GroupControllerGetCapabilities implements the group controller service.
func (g *groupControllerService) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (
	*csi.GroupControllerGetCapabilitiesResponse, error) {
	p := g.p
	response := &csi.GroupControllerGetCapabilitiesResponse{}
	if p.config().Groups {
		response.Capabilities = []*csi.GroupControllerServiceCapability{{Type: &csi.GroupControllerServiceCapability_Rpc{
			Rpc: &csi.GroupControllerServiceCapability_RPC{
				Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
			},
		}}}
	}
	return response, nil
}

// CreateVolumeGroupSnapshot implements the group controller service.
func (g *groupControllerService) CreateVolumeGroupSnapshot(_ context.Context, r *csi.CreateVolumeGroupSnapshotRequest) (
	*csi.CreateVolumeGroupSnapshotResponse, error) {
	p := g.p
	if r.GetName() == "" || len(r.GetSourceVolumeIds()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the name or the sources are missing")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, group := range p.state.groups {
		if group.name == r.GetName() {
			if !slices.Equal(group.volumes, r.GetSourceVolumeIds()) {
				return nil, status.Errorf(codes.AlreadyExists, "group %q exists of other volumes", group.name)
			}
			return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: group.proto()}, nil
		}
	}
	for _, id := range r.GetSourceVolumeIds() {
		if p.state.volumes[id] == nil {
			return nil, status.Errorf(codes.NotFound, "no volume %q", id)
		}
	}
	group := &snapshotGroup{name: r.GetName(), volumes: r.GetSourceVolumeIds(), created: timestamppb.Now()}
	group.id = fmt.Sprintf("group-%06d", p.state.next())
	for i, id := range group.volumes {
		s := p.state.addSnapshot(fmt.Sprintf("%s-%d", group.name, i), p.state.volumes[id])
		s.GroupID = group.id
		group.snapshots = append(group.snapshots, s)
	}
	p.state.groups[group.id] = group
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: group.proto()}, nil
}

// DeleteVolumeGroupSnapshot implements the group controller service.
func (g *groupControllerService) DeleteVolumeGroupSnapshot(_ context.Context, r *csi.DeleteVolumeGroupSnapshotRequest) (
	*csi.DeleteVolumeGroupSnapshotResponse, error) {
	p := g.p
	if r.GetGroupSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the ID of the group is missing")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if group := p.state.groups[r.GetGroupSnapshotId()]; group != nil {
		for _, s := range group.snapshots {
			delete(p.state.snapshots, s.ID)
		}
		delete(p.state.groups, group.id)
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot implements the group controller service.
func (g *groupControllerService) GetVolumeGroupSnapshot(_ context.Context, r *csi.GetVolumeGroupSnapshotRequest) (
	*csi.GetVolumeGroupSnapshotResponse, error) {
	p := g.p
	p.mu.Lock()
	defer p.mu.Unlock()
	group := p.state.groups[r.GetGroupSnapshotId()]
	if group == nil {
		return nil, status.Errorf(codes.NotFound, "no group %q", r.GetGroupSnapshotId())
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: group.proto()}, nil
}
