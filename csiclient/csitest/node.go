// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// identityService is the identity service of a plugin.
type identityService struct {
	csi.UnimplementedIdentityServer
	p *Plugin
}

// nodeService is the node service of a plugin.
type nodeService struct {
	csi.UnimplementedNodeServer
	p *Plugin
}

// Probe implements the identity service.
func (i *identityService) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// GetPluginInfo implements the identity service.
func (i *identityService) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	cfg := i.p.config()
	return &csi.GetPluginInfoResponse{Name: cfg.Name, VendorVersion: cfg.Version}, nil
}

// GetPluginCapabilities implements the identity service.
func (i *identityService) GetPluginCapabilities(context.Context,
	*csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	response := &csi.GetPluginCapabilitiesResponse{}
	for _, t := range i.p.config().Plugin {
		response.Capabilities = append(response.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}},
		})
	}
	for _, t := range i.p.config().Expansion {
		response.Capabilities = append(response.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: t}},
		})
	}
	return response, nil
}

// NodeGetInfo implements the node service.
func (n *nodeService) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	cfg := n.p.config()
	response := &csi.NodeGetInfoResponse{NodeId: cfg.NodeID, MaxVolumesPerNode: int64(cfg.MaxVolumesPerNode)}
	if len(cfg.Segments) > 0 {
		response.AccessibleTopology = &csi.Topology{Segments: cfg.Segments[0]}
	}
	return response, nil
}

// NodeGetCapabilities implements the node service.
func (n *nodeService) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := n.p.config().Node
	if types == nil {
		types = []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}
	}
	response := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range types {
		response.Capabilities = append(response.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return response, nil
}

// known returns NotFound for a volume that does not exist.
func (n *nodeService) known(id string) error {
	n.p.mu.Lock()
	defer n.p.mu.Unlock()
	if n.p.state.volumes[id] == nil {
		return status.Errorf(codes.NotFound, "no volume %q", id)
	}
	return nil
}

// NodeStageVolume implements the node service.
func (n *nodeService) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetStagingTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, status.Error(codes.InvalidArgument, "the volume ID, the path or the capability is missing")
	}
	return &csi.NodeStageVolumeResponse{}, n.known(r.GetVolumeId())
}

// NodeUnstageVolume implements the node service.
func (n *nodeService) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID or the path is missing")
	}
	return &csi.NodeUnstageVolumeResponse{}, n.known(r.GetVolumeId())
}

// NodePublishVolume implements the node service.
func (n *nodeService) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, status.Error(codes.InvalidArgument, "the volume ID, the path or the capability is missing")
	}
	if err := n.known(r.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(r.GetTargetPath(), 0o755); err != nil {
		return nil, status.Errorf(codes.Internal, "making the target: %v", err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume implements the node service.
func (n *nodeService) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if r.GetVolumeId() == "" || r.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume ID or the path is missing")
	}
	if err := n.known(r.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(r.GetTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "removing the target: %v", err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
