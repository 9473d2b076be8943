// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type config struct {
	root, name, node string
	nodes            map[string]map[string]string // topology by name; none: no topology, any node
	capacity         int64
	maxPerNode       int
	latency          time.Duration
	mount            bool // publish by bind mounts, block volumes as loop devices
}

// driver serves the CSI services. One call changes things at a time.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedNodeServer
	cfg config

	mu      sync.Mutex
	entries map[string]*entry
}

func newDriver(cfg config) (*driver, error) {
	entries, err := load(cfg.root)
	return &driver{cfg: cfg, entries: entries}, err
}

// minimum is the size of a volume for which none is asked.
const minimum = 1 << 20

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.cfg.name, VendorVersion: "1.0.0"}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (d *driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	services := []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE,
	}
	if d.topology() {
		services = append(services, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	response := &csi.GetPluginCapabilitiesResponse{}
	for _, s := range services {
		response.Capabilities = append(response.Capabilities,
			&csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: s}}})
	}
	return response, nil
}

func (d *driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse,
	error) {
	response := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS, csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	} {
		response.Capabilities = append(response.Capabilities,
			&csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{
				Rpc: &csi.ControllerServiceCapability_RPC{Type: t},
			}})
	}
	return response, nil
}

// topology tells whether volumes are somewhere rather than anywhere.
func (d *driver) topology() bool {
	for _, labels := range d.cfg.nodes {
		if len(labels) > 0 {
			return true
		}
	}
	return false
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func (d *driver) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if r.GetName() == "" {
		return nil, invalid("the name is missing")
	}
	block, err := checkCapabilities(r.GetVolumeCapabilities())
	if err != nil {
		return nil, err
	}
	if err := checkMutable(r.GetMutableParameters()); err != nil {
		return nil, err
	}
	size, limit := r.GetCapacityRange().GetRequiredBytes(), r.GetCapacityRange().GetLimitBytes()
	if size < 0 || limit < 0 || limit > 0 && size > limit {
		return nil, status.Errorf(codes.OutOfRange, "no size is between %d and %d bytes", size, limit)
	}
	source := cmp.Or(r.GetVolumeContentSource().GetSnapshot().GetSnapshotId(), r.GetVolumeContentSource().GetVolume().GetVolumeId())
	d.mu.Lock()
	defer d.mu.Unlock()
	id := idOf("vol", r.GetName())
	if e := d.entries[id]; e != nil {
		if e.Size < size || limit > 0 && e.Size > limit || e.Source != source || e.Block != block ||
			!maps.Equal(e.Parameters, r.GetParameters()) {
			return nil, status.Errorf(codes.AlreadyExists, "volume %q exists with other properties", r.GetName())
		}
		return d.created(e, r), nil
	}
	e := &entry{
		ID: id, Name: r.GetName(), Size: max(size, minimum), Block: block, Source: source, Parameters: r.GetParameters(),
		Mutable: r.GetMutableParameters(), Created: time.Now().Unix(), Number: d.nextNumber(), Published: map[string]publication{},
	}
	if source != "" {
		from := d.entries[source]
		if from == nil {
			return nil, status.Errorf(codes.NotFound, "source %q does not exist", source)
		}
		if e.Size < from.Size {
			return nil, status.Errorf(codes.OutOfRange, "%d bytes are less than the source %q has, which is %d", e.Size, source, from.Size)
		}
	}
	if e.Segment, err = d.place(e.Size, r.GetAccessibilityRequirements()); err != nil {
		return nil, err
	}
	if err := e.makeData(d.cfg.root); err != nil {
		return nil, status.Errorf(codes.Internal, "making volume %q: %v", r.GetName(), err)
	}
	if err := e.save(d.cfg.root); err != nil {
		return nil, status.Errorf(codes.Internal, "recording volume %q: %v", r.GetName(), err)
	}
	d.entries[id] = e
	return d.created(e, r), nil
}

func (d *driver) created(e *entry, r *csi.CreateVolumeRequest) *csi.CreateVolumeResponse {
	v := e.volume()
	v.ContentSource = r.GetVolumeContentSource()
	return &csi.CreateVolumeResponse{Volume: v}
}

func (d *driver) nextNumber() int {
	last := 0
	for _, e := range d.entries {
		last = max(last, e.Number)
	}
	return last + 1
}

func (e *entry) volume() *csi.Volume {
	v := &csi.Volume{VolumeId: e.ID, CapacityBytes: e.Size}
	if len(e.Segment) > 0 {
		v.AccessibleTopology = []*csi.Topology{{Segments: e.Segment}}
	}
	return v
}

// place is the segment for a new volume: the first of those that are asked for,
// the preferred ones first, that has room.
func (d *driver) place(size int64, r *csi.TopologyRequirement) (map[string]string, error) {
	segments := d.segments()
	wanted := append(slices.Clone(r.GetPreferred()), r.GetRequisite()...)
	if len(wanted) == 0 {
		wanted = []*csi.Topology{{}}
	}
	for _, w := range wanted {
		for _, s := range segments {
			if includes(s, w.GetSegments()) && d.free(s) >= size {
				return s, nil
			}
		}
	}
	return nil, status.Errorf(codes.ResourceExhausted, "no room for %d bytes in any of %v", size, wanted)
}

// segments is the different topologies of the nodes, in a fixed order.
func (d *driver) segments() []map[string]string {
	if !d.topology() {
		return []map[string]string{nil}
	}
	var out []map[string]string
	for _, name := range slices.Sorted(maps.Keys(d.cfg.nodes)) {
		labels := d.cfg.nodes[name]
		if !slices.ContainsFunc(out, func(s map[string]string) bool { return maps.Equal(s, labels) }) {
			out = append(out, labels)
		}
	}
	return out
}

func includes(all, some map[string]string) bool {
	for k, v := range some {
		if all[k] != v {
			return false
		}
	}
	return true
}

// free is how many bytes a segment has left.
func (d *driver) free(segment map[string]string) int64 {
	left := d.cfg.capacity
	for _, e := range d.entries {
		if !e.Snapshot && maps.Equal(e.Segment, segment) {
			left -= e.Size
		}
	}
	return max(left, 0)
}

func checkCapabilities(caps []*csi.VolumeCapability) (block bool, err error) {
	if len(caps) == 0 {
		return false, invalid("the volume capabilities are missing")
	}
	for _, c := range caps {
		if c.GetAccessType() == nil || c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN {
			return false, invalid("a volume capability lacks its access type or mode")
		}
		block = block || c.GetBlock() != nil
	}
	return block, nil
}

func (d *driver) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("the volume ID is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[r.GetVolumeId()]
	if e == nil || e.Snapshot {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if len(e.Published) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is published to %v", e.ID, slices.Sorted(maps.Keys(e.Published)))
	}
	if d.cfg.mount && e.Block {
		if err := detachLoop(e.blockPath(d.cfg.root)); err != nil {
			return nil, status.Errorf(codes.Internal, "detaching the device of volume %q: %v", e.ID, err)
		}
	}
	return &csi.DeleteVolumeResponse{}, d.remove(e)
}

func (d *driver) remove(e *entry) error {
	if err := e.remove(d.cfg.root); err != nil {
		return status.Errorf(codes.Internal, "deleting %q: %v", e.ID, err)
	}
	delete(d.entries, e.ID)
	return nil
}

// find is the volume of an ID.
func (d *driver) find(id string) (*entry, error) {
	if id == "" {
		return nil, invalid("the volume ID is missing")
	}
	if e := d.entries[id]; e != nil && !e.Snapshot {
		return e, nil
	}
	return nil, status.Errorf(codes.NotFound, "volume %q does not exist", id)
}

func (d *driver) ControllerPublishVolume(_ context.Context, r *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse,
	error) {
	node := r.GetNodeId()
	if r.GetVolumeId() == "" || node == "" {
		return nil, invalid("the volume ID or the node ID is missing")
	}
	if _, err := checkCapabilities([]*csi.VolumeCapability{r.GetVolumeCapability()}); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.find(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	labels, known := d.cfg.nodes[node]
	if !known && len(d.cfg.nodes) > 0 {
		return nil, status.Errorf(codes.NotFound, "node %q does not exist", node)
	}
	if !includes(labels, e.Segment) {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is in %v and cannot be reached from node %q in %v", e.ID, e.Segment,
			node, labels)
	}
	mode := r.GetVolumeCapability().GetAccessMode().GetMode()
	wanted := publication{Readonly: r.GetReadonly(), Mode: int(mode)}
	if before, published := e.Published[node]; published {
		if before != wanted {
			return nil, status.Errorf(codes.AlreadyExists, "volume %q is published to node %q in another way", e.ID, node)
		}
		return &csi.ControllerPublishVolumeResponse{}, nil
	}
	multi := mode == csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
	if len(e.Published) > 0 && !multi {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is published to %v", e.ID, slices.Sorted(maps.Keys(e.Published)))
	}
	if m := d.cfg.maxPerNode; m > 0 && d.publishedTo(node) >= m {
		return nil, status.Errorf(codes.ResourceExhausted, "node %q has %d volumes already", node, m)
	}
	return &csi.ControllerPublishVolumeResponse{}, d.publish(e, func() { e.Published[node] = wanted })
}

// publish changes the publications of e, and its record before anybody hears of it.
func (d *driver) publish(e *entry, change func()) error {
	before := maps.Clone(e.Published)
	change()
	if err := e.save(d.cfg.root); err != nil {
		e.Published = before
		return status.Errorf(codes.Internal, "recording where volume %q is published: %v", e.ID, err)
	}
	return nil
}

func (d *driver) publishedTo(node string) (n int) {
	for _, e := range d.entries {
		if _, ok := e.Published[node]; ok {
			n++
		}
	}
	return n
}

func (d *driver) ControllerUnpublishVolume(_ context.Context,
	r *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("the volume ID is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[r.GetVolumeId()]
	if e == nil {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	return &csi.ControllerUnpublishVolumeResponse{}, d.publish(e, func() {
		if r.GetNodeId() == "" {
			clear(e.Published)
		}
		delete(e.Published, r.GetNodeId())
	})
}

func (d *driver) ValidateVolumeCapabilities(_ context.Context,
	r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.find(r.GetVolumeId()); err != nil {
		return nil, err
	}
	if _, err := checkCapabilities(r.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters(),
	}}, nil
}

func (d *driver) GetCapacity(_ context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	response := &csi.GetCapacityResponse{}
	var largest int64
	for _, s := range d.segments() {
		if includes(s, r.GetAccessibleTopology().GetSegments()) {
			response.AvailableCapacity += d.free(s)
			largest = max(largest, d.free(s))
		}
	}
	response.MaximumVolumeSize = wrapperspb.Int64(largest)
	return response, nil
}

func (d *driver) ControllerExpandVolume(_ context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse,
	error) {
	if r.GetVolumeId() == "" || r.GetCapacityRange() == nil {
		return nil, invalid("the volume ID or the capacity range is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.find(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if more := r.GetCapacityRange().GetRequiredBytes() - e.Size; more > 0 {
		if d.free(e.Segment) < more {
			return nil, status.Errorf(codes.ResourceExhausted, "no room for %d more bytes in %v", more, e.Segment)
		}
		e.Size += more
		if err := errors.Join(e.growData(d.cfg.root), e.save(d.cfg.root)); err != nil {
			e.Size -= more
			return nil, status.Errorf(codes.Internal, "recording the size of volume %q: %v", e.ID, err)
		}
	}
	if d.cfg.mount && e.Block {
		if err := growLoop(e.blockPath(d.cfg.root)); err != nil {
			return nil, status.Errorf(codes.Internal, "extending the device of volume %q: %v", e.ID, err)
		}
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: e.Size}, nil
}

// checkMutable accepts the parameter tier of a VolumeAttributesClass, with any value.
func checkMutable(parameters map[string]string) error {
	for name := range parameters {
		if name != "tier" {
			return invalid("the mutable parameter %q is not supported", name)
		}
	}
	return nil
}

// ControllerModifyVolume records the mutable parameters, which change nothing else.
func (d *driver) ControllerModifyVolume(_ context.Context, r *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse,
	error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.find(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := checkMutable(r.GetMutableParameters()); err != nil {
		return nil, err
	}
	e.Mutable = r.GetMutableParameters()
	if err := e.save(d.cfg.root); err != nil {
		return nil, status.Errorf(codes.Internal, "recording the parameters of volume %q: %v", e.ID, err)
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// list is a page of the entries of a kind, in the order of their making. A token
// is the number of the last entry of the page before.
func (d *driver) list(snapshots bool, keep func(*entry) bool, token string, size int32) (page []*entry, next string, err error) {
	after := 0
	if token != "" {
		if after, err = strconv.Atoi(token); err != nil {
			return nil, "", status.Errorf(codes.Aborted, "token %q is not one of this driver", token)
		}
	}
	for _, e := range d.entries {
		if e.Snapshot == snapshots && e.Number > after && keep(e) {
			page = append(page, e)
		}
	}
	slices.SortFunc(page, func(a, b *entry) int { return cmp.Compare(a.Number, b.Number) })
	if size > 0 && len(page) > int(size) {
		page = page[:size]
		next = strconv.Itoa(page[size-1].Number)
	}
	return page, next, nil
}

func (d *driver) ListVolumes(_ context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	page, next, err := d.list(false, func(*entry) bool { return true }, r.GetStartingToken(), r.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	response := &csi.ListVolumesResponse{NextToken: next}
	for _, e := range page {
		response.Entries = append(response.Entries, &csi.ListVolumesResponse_Entry{
			Volume: e.volume(), Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: slices.Sorted(maps.Keys(e.Published))},
		})
	}
	return response, nil
}

func (d *driver) CreateSnapshot(_ context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if r.GetName() == "" || r.GetSourceVolumeId() == "" {
		return nil, invalid("the name or the source is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	id := idOf("snap", r.GetName())
	if e := d.entries[id]; e != nil {
		if e.Source != r.GetSourceVolumeId() {
			return nil, status.Errorf(codes.AlreadyExists, "snapshot %q exists of volume %q", r.GetName(), e.Source)
		}
		return &csi.CreateSnapshotResponse{Snapshot: e.snapshot()}, nil
	}
	from, err := d.find(r.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	e := &entry{ID: id, Name: r.GetName(), Size: from.Size, Snapshot: true, Block: from.Block, Source: from.ID, Created: time.Now().Unix(),
		Number: d.nextNumber()}
	if err := d.createSnapshot(e); err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: e.snapshot()}, nil
}

// createSnapshot copies the source of e and records e.
func (d *driver) createSnapshot(e *entry) error {
	if err := e.makeData(d.cfg.root); err != nil {
		return status.Errorf(codes.Internal, "making snapshot %q: %v", e.Name, err)
	}
	if err := e.save(d.cfg.root); err != nil {
		return status.Errorf(codes.Internal, "recording snapshot %q: %v", e.Name, err)
	}
	d.entries[e.ID] = e
	return nil
}

func (e *entry) snapshot() *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: e.ID, SourceVolumeId: e.Source, SizeBytes: e.Size, GroupSnapshotId: e.Group,
		CreationTime: &timestamppb.Timestamp{Seconds: e.Created}, ReadyToUse: true}
}

func (d *driver) DeleteSnapshot(_ context.Context, r *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if r.GetSnapshotId() == "" {
		return nil, invalid("the snapshot ID is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if e := d.entries[r.GetSnapshotId()]; e != nil && e.Snapshot {
		return &csi.DeleteSnapshotResponse{}, d.remove(e)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

func (d *driver) ListSnapshots(_ context.Context, r *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	page, next, err := d.list(true, func(e *entry) bool {
		return (r.GetSnapshotId() == "" || e.ID == r.GetSnapshotId()) && (r.GetSourceVolumeId() == "" || e.Source == r.GetSourceVolumeId())
	}, r.GetStartingToken(), r.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	response := &csi.ListSnapshotsResponse{NextToken: next}
	for _, e := range page {
		response.Entries = append(response.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: e.snapshot()})
	}
	return response, nil
}

// The node service. By default, a published volume is a symbolic link at the target to its directory, which
// needs no privileges. A kubelet requires --mount.

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	response := &csi.NodeGetInfoResponse{NodeId: d.cfg.node, MaxVolumesPerNode: int64(d.cfg.maxPerNode)}
	if labels := d.cfg.nodes[d.cfg.node]; len(labels) > 0 {
		response.AccessibleTopology = &csi.Topology{Segments: labels}
	}
	return response, nil
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{
		Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{
			Type: csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		}},
	}}}, nil
}

func (d *driver) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if r.GetTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("the target path or the volume capability is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.find(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if r.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		if e.target != "" && e.target != r.GetTargetPath() {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %q is published at %s and has a single writer", e.ID, e.target)
		}
		e.target = r.GetTargetPath()
	}
	path := dataPath(d.cfg.root, e.ID)
	if e.Block {
		path += "/" + blockFile
	}
	if now, err := os.Readlink(r.GetTargetPath()); err == nil && now == path {
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if d.cfg.mount {
		if err := mount(path, r.GetTargetPath(), e.Block, r.GetReadonly()); err != nil {
			return nil, status.Errorf(codes.Internal, "mounting volume %q: %v", e.ID, err)
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if err := os.Symlink(path, r.GetTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "publishing volume %q: %v", e.ID, err)
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (d *driver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if r.GetTargetPath() == "" {
		return nil, invalid("the target path is missing")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.find(r.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if d.cfg.mount {
		if err := unmount(r.GetTargetPath()); err != nil {
			return nil, status.Errorf(codes.Internal, "unmounting volume %q: %v", r.GetVolumeId(), err)
		}
		e.unpublished(r.GetTargetPath())
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	// Only a link is removed, never its target, nor a directory that the driver did not create.
	if info, err := os.Lstat(r.GetTargetPath()); err == nil && info.Mode()&os.ModeSymlink != 0 {
		if err := os.Remove(r.GetTargetPath()); err != nil {
			return nil, status.Errorf(codes.Internal, "unpublishing volume %q: %v", r.GetVolumeId(), err)
		}
	}
	e.unpublished(r.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
