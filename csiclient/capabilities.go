// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// Driver holds the identity and the capabilities of a driver. It is comparable.
type Driver struct {
	Name          string // never empty
	VendorVersion string
	Plugin        PluginCapabilities
	Controller    ControllerCapabilities
	Node          NodeCapabilities
	Group         GroupCapabilities
}

// PluginCapabilities holds the capabilities in use of GetPluginCapabilities.
type PluginCapabilities struct {
	ControllerService              bool
	VolumeAccessibilityConstraints bool
	ExpandOnline                   bool // VolumeExpansion ONLINE
	ExpandOffline                  bool // VolumeExpansion OFFLINE
	GroupControllerService         bool
}

// GroupCapabilities holds the capabilities in use of GroupControllerGetCapabilities. All are false
// for a driver without a group controller service.
type GroupCapabilities struct {
	CreateDeleteGetVolumeGroupSnapshot bool
	// Unknown: the call has failed. Then the others are false.
	Unknown bool
}

// ControllerCapabilities holds the capabilities in use of ControllerGetCapabilities. All are false
// for a driver without a controller service.
type ControllerCapabilities struct {
	CreateDeleteVolume        bool
	PublishUnpublishVolume    bool
	PublishReadonly           bool
	ListVolumes               bool
	ListVolumesPublishedNodes bool
	GetCapacity               bool
	CreateDeleteSnapshot      bool
	ListSnapshots             bool
	GetSnapshot               bool
	CloneVolume               bool
	ModifyVolume              bool
	SingleNodeMultiWriter     bool
	ExpandVolume              bool
}

// NodeCapabilities holds the capabilities in use of NodeGetCapabilities. All are false unless
// [Config.NodeExpansion] is set and the controller service does not expand volumes.
type NodeCapabilities struct {
	ExpandVolume bool
}

// identify reads the identity and the capabilities of the driver.
func (c *Client) identify(ctx context.Context) (Driver, error) {
	var d Driver
	info, err := call(ctx, c, c.identity.GetPluginInfo, &csi.GetPluginInfoRequest{})
	if err != nil {
		return d, fmt.Errorf("getting the name of the driver at %s: GetPluginInfo: %w", c.cfg.Address, err)
	}
	d.Name, d.VendorVersion = info.GetName(), Printable(info.GetVendorVersion())
	err = CheckID("name", d.Name)
	if d.Name == "" {
		err = errors.New("GetPluginInfo returned an empty name")
	}
	if err != nil {
		return d, fmt.Errorf("getting the name of the driver at %s: %w: %w", c.cfg.Address, errInvalidName, err)
	}
	c.recorder.setDriver(d.Name)
	if d.Plugin, err = c.pluginCapabilities(ctx); err != nil {
		return d, fmt.Errorf("getting the capabilities of driver %q: GetPluginCapabilities: %w", d.Name, err)
	}
	if d.Plugin.GroupControllerService {
		if d.Group, err = c.groupCapabilities(ctx); err != nil {
			return d, fmt.Errorf("getting the capabilities of driver %q: GroupControllerGetCapabilities: %w", d.Name, err)
		}
	}
	if d.Plugin.ControllerService {
		if d.Controller, err = c.controllerCapabilities(ctx); err != nil {
			return d, fmt.Errorf("getting the capabilities of driver %q: ControllerGetCapabilities: %w", d.Name, err)
		}
	}
	if c.cfg.NodeExpansion && !d.Controller.ExpandVolume {
		if d.Node, err = c.nodeCapabilities(ctx); err != nil {
			return d, fmt.Errorf("getting the capabilities of driver %q: NodeGetCapabilities: %w", d.Name, err)
		}
	}
	return d, nil
}

// nodeCapabilities calls NodeGetCapabilities. A driver without a node service has no capabilities.
func (c *Client) nodeCapabilities(ctx context.Context) (NodeCapabilities, error) {
	var caps NodeCapabilities
	response, err := call(ctx, c, c.node.NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return caps, nil
	}
	for _, item := range response.GetCapabilities() {
		if item.GetRpc().GetType() == csi.NodeServiceCapability_RPC_EXPAND_VOLUME {
			caps.ExpandVolume = true
		}
	}
	return caps, err
}

func (c *Client) pluginCapabilities(ctx context.Context) (PluginCapabilities, error) {
	var caps PluginCapabilities
	response, err := call(ctx, c, c.identity.GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	for _, item := range response.GetCapabilities() { // other kinds of entries count as UNKNOWN
		switch item.GetService().GetType() {
		case csi.PluginCapability_Service_CONTROLLER_SERVICE:
			caps.ControllerService = true
		case csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS:
			caps.VolumeAccessibilityConstraints = true
		case csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE:
			caps.GroupControllerService = true
		}
		switch item.GetVolumeExpansion().GetType() {
		case csi.PluginCapability_VolumeExpansion_ONLINE:
			caps.ExpandOnline = true
		case csi.PluginCapability_VolumeExpansion_OFFLINE:
			caps.ExpandOffline = true
		}
	}
	return caps, err
}

func (c *Client) controllerCapabilities(ctx context.Context) (ControllerCapabilities, error) {
	var caps ControllerCapabilities
	response, err := call(ctx, c, c.controller.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{})
	field := map[csi.ControllerServiceCapability_RPC_Type]*bool{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME:         &caps.CreateDeleteVolume,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME:     &caps.PublishUnpublishVolume,
		csi.ControllerServiceCapability_RPC_PUBLISH_READONLY:             &caps.PublishReadonly,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES:                 &caps.ListVolumes,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES: &caps.ListVolumesPublishedNodes,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY:                 &caps.GetCapacity,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT:       &caps.CreateDeleteSnapshot,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS:               &caps.ListSnapshots,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT:                 &caps.GetSnapshot,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME:                 &caps.CloneVolume,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME:                &caps.ModifyVolume,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER:     &caps.SingleNodeMultiWriter,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME:                &caps.ExpandVolume,
	}
	for _, item := range response.GetCapabilities() {
		if has, known := field[item.GetRpc().GetType()]; known {
			*has = true
		}
	}
	return caps, err
}

// groupCapabilities returns no capabilities for a driver that does not implement the call. They are
// unknown after another final error, which csi-snapshotter tolerates: nothing but groups needs them.
func (c *Client) groupCapabilities(ctx context.Context) (GroupCapabilities, error) {
	var caps GroupCapabilities
	response, err := call(ctx, c, c.group.GroupControllerGetCapabilities, &csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil && OutcomeOf(err) == Final {
		klog.FromContext(ctx).Info("GroupControllerGetCapabilities failed. Group snapshots are disabled",
			"address", c.cfg.Address, "err", err)
		return GroupCapabilities{Unknown: status.Code(err) != codes.Unimplemented}, nil
	}
	for _, item := range response.GetCapabilities() {
		if item.GetRpc().GetType() == csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT {
			caps.CreateDeleteGetVolumeGroupSnapshot = true
		}
	}
	return caps, err
}

// difference returns an error that describes a change of the name or the capabilities. It ignores
// the version, and group capabilities that are unknown or were unknown and are missing.
func difference(before, now Driver) error {
	switch {
	case before.Name != now.Name:
		return fmt.Errorf("the name changed from %q to %q", before.Name, now.Name)
	case before.Plugin != now.Plugin:
		return fmt.Errorf("the plugin capabilities changed from %+v to %+v", before.Plugin, now.Plugin)
	case before.Controller != now.Controller:
		return fmt.Errorf("the controller capabilities changed from %+v to %+v", before.Controller, now.Controller)
	case before.Node != now.Node:
		return fmt.Errorf("the node capabilities changed from %+v to %+v", before.Node, now.Node)
	case before.Group != now.Group && !now.Group.Unknown &&
		(!before.Group.Unknown || now.Group.CreateDeleteGetVolumeGroupSnapshot):
		return fmt.Errorf("the group controller capabilities changed from %+v to %+v", before.Group, now.Group)
	}
	return nil
}

var (
	errInvalidName = errors.New("invalid name")
	// ErrDriverChanged is returned by [Client.Run] if the name or the capabilities of the driver change, or the topology of
	// the node after [Client.NodeInfo].
	ErrDriverChanged = errors.New("the driver has changed")
	// ErrConnectionLost is returned by [Client.Run] with [Config.ExitOnConnectionLoss].
	ErrConnectionLost = errors.New("lost the connection to the driver")
)

// CapabilityNames returns the names of the capabilities of d from the CSI spec, in its order.
func (d Driver) CapabilityNames() []string {
	var names []string
	for _, c := range []struct {
		has  bool
		name string
	}{
		{d.Plugin.ControllerService, "CONTROLLER_SERVICE"},
		{d.Plugin.VolumeAccessibilityConstraints, "VOLUME_ACCESSIBILITY_CONSTRAINTS"},
		{d.Plugin.GroupControllerService, "GROUP_CONTROLLER_SERVICE"},
		{d.Controller.CreateDeleteVolume, "CREATE_DELETE_VOLUME"},
		{d.Controller.PublishUnpublishVolume, "PUBLISH_UNPUBLISH_VOLUME"},
		{d.Controller.ListVolumes, "LIST_VOLUMES"},
		{d.Controller.GetCapacity, "GET_CAPACITY"},
		{d.Controller.CreateDeleteSnapshot, "CREATE_DELETE_SNAPSHOT"},
		{d.Controller.ListSnapshots, "LIST_SNAPSHOTS"},
		{d.Controller.CloneVolume, "CLONE_VOLUME"},
		{d.Controller.PublishReadonly, "PUBLISH_READONLY"},
		{d.Controller.ExpandVolume, "EXPAND_VOLUME"},
		{d.Node.ExpandVolume, "EXPAND_VOLUME (node)"},
		{d.Controller.ListVolumesPublishedNodes, "LIST_VOLUMES_PUBLISHED_NODES"},
		{d.Controller.SingleNodeMultiWriter, "SINGLE_NODE_MULTI_WRITER"},
		{d.Controller.ModifyVolume, "MODIFY_VOLUME"},
		{d.Plugin.ExpandOnline, "VolumeExpansion ONLINE"},
		{d.Plugin.ExpandOffline, "VolumeExpansion OFFLINE"},
		{d.Controller.GetSnapshot, "GET_SNAPSHOT"},
		{d.Group.CreateDeleteGetVolumeGroupSnapshot, "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"},
	} {
		if c.has {
			names = append(names, c.name)
		}
	}
	return names
}
