// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// The group controller service. A group exists while snapshots refer to it.

func (d *driver) GroupControllerGetCapabilities(context.Context,
	*csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// members returns the snapshots of a group, in the order of their creation.
func (d *driver) members(group string) (members []*entry) {
	for _, e := range d.entries {
		if e.Group == group && group != "" {
			members = append(members, e)
		}
	}
	slices.SortFunc(members, func(a, b *entry) int { return cmp.Compare(a.Number, b.Number) })
	return members
}

func groupSnapshot(members []*entry) *csi.VolumeGroupSnapshot {
	g := &csi.VolumeGroupSnapshot{GroupSnapshotId: members[0].Group, ReadyToUse: true,
		CreationTime: &timestamppb.Timestamp{Seconds: members[0].Created}}
	for _, e := range members {
		g.Snapshots = append(g.Snapshots, e.snapshot())
	}
	return g
}

func (d *driver) CreateVolumeGroupSnapshot(_ context.Context,
	r *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	if r.GetName() == "" || len(r.GetSourceVolumeIds()) == 0 {
		return nil, invalid("the name or the sources are missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	id := idOf("group", r.GetName())
	if members := d.members(id); len(members) > 0 {
		var sources []string
		for _, e := range members {
			sources = append(sources, e.Source)
		}
		if !slices.Equal(slices.Sorted(slices.Values(sources)), slices.Sorted(slices.Values(r.GetSourceVolumeIds()))) {
			return nil, status.Errorf(codes.AlreadyExists, "group %q exists with the volumes %v", r.GetName(), sources)
		}
		return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: groupSnapshot(members)}, nil
	}
	for _, source := range r.GetSourceVolumeIds() {
		err := d.addMember(id, r.GetName(), source)
		if err != nil {
			for _, e := range d.members(id) {
				_ = d.remove(e) // the next attempt finds what cannot be removed
			}
			return nil, err
		}
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: groupSnapshot(d.members(id))}, nil
}

// addMember creates the snapshot of a volume for a group.
func (d *driver) addMember(group, name, source string) error {
	from, err := d.find(source)
	if err != nil {
		return err
	}
	name += "/" + source
	e := &entry{ID: idOf("snap", name), Name: name, Size: from.Size, Snapshot: true, Block: from.Block, Source: source, Group: group,
		Created: time.Now().Unix(), Number: d.nextNumber()}
	return d.createSnapshot(e)
}

func (d *driver) DeleteVolumeGroupSnapshot(_ context.Context,
	r *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("the ID of the group is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.members(r.GetGroupSnapshotId()) {
		if err := d.remove(e); err != nil {
			return nil, err
		}
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

func (d *driver) GetVolumeGroupSnapshot(_ context.Context,
	r *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("the ID of the group is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	members := d.members(r.GetGroupSnapshotId())
	if len(members) == 0 {
		return nil, status.Errorf(codes.NotFound, "group %q does not exist", r.GetGroupSnapshotId())
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: groupSnapshot(members)}, nil
}
