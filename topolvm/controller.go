// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/klog/v2"
)

// CreateVolume creates a LogicalVolume and waits until topolvm-node has created the LVM volume.
func (s *Service) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	request, err := s.requestOf(ctx, r)
	if err != nil {
		return nil, err
	}
	lv, err := s.create(ctx, "CreateVolume", request)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: lv.Status.VolumeID, CapacityBytes: int64(lv.Status.CurrentSize), ContentSource: r.GetVolumeContentSource(),
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{s.names.topologyKey(): lv.Spec.NodeName}}},
	}}, nil
}

// CreateSnapshot creates a LogicalVolume that is a thin snapshot of another.
func (s *Service) CreateSnapshot(ctx context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	request, err := named(r.GetName())
	if err != nil {
		return nil, err
	}
	request.snapshot, request.sourceID = true, r.GetSourceVolumeId()
	if request.sourceID == "" {
		return nil, request.subject().errorf(codes.InvalidArgument, "source_volume_id must not be empty. Check the VolumeSnapshotContent")
	}
	lv, err := s.create(ctx, "CreateSnapshot", request)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{
		SnapshotId: lv.Status.VolumeID, SourceVolumeId: request.sourceID, SizeBytes: int64(lv.Status.CurrentSize),
		CreationTime: timestamppb.New(lv.CreationTimestamp.Time), ReadyToUse: true,
	}}, nil
}

// create returns the LogicalVolume of a creation, with its LVM volume.
func (s *Service) create(ctx context.Context, operation string, r creation) (*LogicalVolume, error) {
	release, ok := s.nameLocks.TryExclusive(r.name)
	if !ok {
		return nil, r.subject().errorf(codes.Aborted, "another call for it is running. Repeat the call")
	}
	defer release()
	if r.sourceID != "" {
		release, ok := s.idLocks.TryShare(r.sourceID)
		if !ok {
			return nil, r.subject().errorf(codes.Aborted, "its source with ID %s is being deleted or expanded. Repeat the call", r.sourceID)
		}
		defer release()
	}
	lv, err := s.run(ctx, operation, func(ctx context.Context, k *call) (step, error) {
		state, err := k.gatherCreation(ctx, r)
		if err != nil {
			return step{}, err
		}
		return decideCreation(s.names, r, state), nil
	})
	if err == nil || isIndeterminate(err) {
		return lv, err
	}
	// The caller takes the code for final, so that no LogicalVolume may appear after it.
	if s.unanswered.has(r.name, s.now()) {
		err = r.subject().errorf(codes.Aborted, "an earlier request to create it had no response, and may still take effect. Repeat the "+
			"call, which has failed: %s", status.Convert(err).Message())
	}
	return nil, err
}

// DeleteVolume deletes a LogicalVolume and returns after topolvm-node has removed the LVM volume. It does not delete a snapshot.
func (s *Service) DeleteVolume(ctx context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, s.remove(ctx, "DeleteVolume", r.GetVolumeId(), false)
}

// DeleteSnapshot deletes a snapshot like DeleteVolume a volume. It does not delete a volume.
func (s *Service) DeleteSnapshot(ctx context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, s.remove(ctx, "DeleteSnapshot", r.GetSnapshotId(), true)
}

func (s *Service) remove(ctx context.Context, operation, id string, snapshot bool) error {
	kept, err := s.withVolume(ctx, operation, id, func(state volumeState) step {
		if state.lv != nil && s.unanswered.has(state.lv.Name, state.now) { // no LogicalVolume may appear after the deletion
			return subjectOf(state.lv).fail(codes.Aborted, "an earlier request to create it had no response, and may still take effect. "+
				"Repeat the call")
		}
		return decideDeletion(state, snapshot)
	})
	if err == nil && kept != nil {
		klog.FromContext(ctx).Info("Not deleted: a volume is not a snapshot, and a snapshot is not a volume", "operation", operation,
			"logicalVolume", klog.KRef("", kept.Name), "volumeHandle", id)
	}
	return err
}

// ControllerExpandVolume requests a larger size and waits until topolvm-node has expanded the LVM volume. If topolvm-node fails, it
// withdraws the request.
func (s *Service) ControllerExpandVolume(
	ctx context.Context, r *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	if r.GetCapacityRange() == nil {
		return nil, subject{lv: "with ID " + r.GetVolumeId()}.errorf(codes.InvalidArgument, "capacity_range must be set. Request a size")
	}
	decide := func(state volumeState) step { return decideExpansion(s.names, r, state) }
	lv, err := s.withVolume(ctx, "ControllerExpandVolume", r.GetVolumeId(), decide)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{
		CapacityBytes: int64(lv.size()), NodeExpansionRequired: r.GetVolumeCapability().GetBlock() == nil,
	}, nil
}

// withVolume runs a call that changes the LogicalVolume with that ID.
func (s *Service) withVolume(
	ctx context.Context, operation, id string, decide func(volumeState) step,
) (*LogicalVolume, error) {
	if id == "" {
		return nil, status.Errorf(codes.InvalidArgument, "%s: the ID must not be empty. Check the volume handle", operation)
	}
	release, ok := s.idLocks.TryExclusive(id)
	if ok {
		defer release()
	}
	return s.run(ctx, operation, func(ctx context.Context, k *call) (step, error) {
		lv, err := k.find(ctx, id)
		switch {
		case err != nil:
			return step{}, err
		case lv != nil && !ok: // a LogicalVolume that does not exist needs no lock, which repeated calls about it may hold again and again
			return subject{lv: "with ID " + id}.fail(codes.Aborted, "another call uses it. Repeat the call"), nil
		}
		return decide(k.state(lv)), nil
	})
}

// ValidateVolumeCapabilities confirms the capabilities that CreateVolume accepts.
func (s *Service) ValidateVolumeCapabilities(
	ctx context.Context, r *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if r.GetVolumeId() == "" || len(r.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "volume_id and volume_capabilities must not be empty")
	}
	lv, err := s.run(ctx, "ValidateVolumeCapabilities", func(ctx context.Context, k *call) (step, error) {
		lv, err := k.find(ctx, r.GetVolumeId())
		return step{action: doAnswer, lv: lv}, err
	})
	if err != nil {
		return nil, err
	}
	if lv == nil || !lv.exists() {
		return nil, subject{lv: "with ID " + r.GetVolumeId()}.errorf(codes.NotFound, "there is none. Check that the volume exists")
	}
	if why := unsupported(r.GetVolumeCapabilities()); why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters(),
	}}, nil
}
