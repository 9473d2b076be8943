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

// CreateSnapshot implements the controller service.
func (c *controllerService) CreateSnapshot(_ context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if r.GetName() == "" || r.GetSourceVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the name or the source is missing")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	for _, s := range c.p.state.snapshots {
		if s.Name == r.GetName() {
			if s.VolumeID != r.GetSourceVolumeId() {
				return nil, status.Errorf(codes.AlreadyExists, "snapshot %q exists of another volume", s.Name)
			}
			return &csi.CreateSnapshotResponse{Snapshot: s.proto()}, nil
		}
	}
	v := c.p.state.volumes[r.GetSourceVolumeId()]
	if v == nil {
		return nil, status.Errorf(codes.NotFound, "no volume %q", r.GetSourceVolumeId())
	}
	return &csi.CreateSnapshotResponse{Snapshot: c.p.state.addSnapshot(r.GetName(), v).proto()}, nil
}

func (s *state) addSnapshot(name string, v *Volume) *Snapshot {
	snapshot := &Snapshot{Name: name, VolumeID: v.ID, Size: v.Capacity, number: s.next(), created: timestamppb.Now()}
	snapshot.ID = fmt.Sprintf("snap-%06d", snapshot.number)
	s.snapshots[snapshot.ID] = snapshot
	return snapshot
}

// Snapshots returns the snapshots in the order of their creation.
func (p *Plugin) Snapshots() []Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	var snapshots []Snapshot
	for _, s := range p.state.sortedSnapshots() {
		snapshots = append(snapshots, *s)
	}
	return snapshots
}

func (s *Snapshot) proto() *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: s.ID, SourceVolumeId: s.VolumeID, SizeBytes: s.Size, CreationTime: s.created, ReadyToUse: true,
		GroupSnapshotId: s.GroupID,
	}
}

// DeleteSnapshot implements the controller service.
func (c *controllerService) DeleteSnapshot(_ context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if r.GetSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "the snapshot ID is missing")
	}
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	delete(c.p.state.snapshots, r.GetSnapshotId())
	return &csi.DeleteSnapshotResponse{}, nil
}

// GetSnapshot implements the controller service.
func (c *controllerService) GetSnapshot(_ context.Context, r *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	s := c.p.state.snapshots[r.GetSnapshotId()]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "no snapshot %q", r.GetSnapshotId())
	}
	return &csi.GetSnapshotResponse{Snapshot: s.proto()}, nil
}

// ListSnapshots implements the controller service.
func (c *controllerService) ListSnapshots(_ context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	all := slices.DeleteFunc(c.p.state.sortedSnapshots(), func(s *Snapshot) bool {
		return r.GetSnapshotId() != "" && s.ID != r.GetSnapshotId() || r.GetSourceVolumeId() != "" && s.VolumeID != r.GetSourceVolumeId()
	})
	page, next, err := page(all, r.GetStartingToken(), r.GetMaxEntries(), func(s *Snapshot) int { return s.number })
	if err != nil {
		return nil, err
	}
	response := &csi.ListSnapshotsResponse{NextToken: next}
	for _, s := range page {
		response.Entries = append(response.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: s.proto()})
	}
	return response, nil
}
