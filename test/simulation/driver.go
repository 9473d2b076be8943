// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// calls are the methods of the driver that wait at the gate.
var calls = []string{
	"CreateVolume", "DeleteVolume", "ControllerPublishVolume", "ControllerUnpublishVolume",
	"ControllerExpandVolume", "ControllerModifyVolume", "CreateSnapshot", "DeleteSnapshot", "ListVolumes", "GetCapacity",
}

// socket is the socket of the driver: a listener for connections in memory.
type socket struct {
	accept chan net.Conn
	closed chan struct{}
	close  func()
}

func newSocket() *socket {
	s := &socket{accept: make(chan net.Conn), closed: make(chan struct{})}
	s.close = sync.OnceFunc(func() { close(s.closed) })
	return s
}

// dial connects a client of that name.
func (s *socket) dial(ctx context.Context, name string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case s.accept <- conn{server, address(name)}:
		return client, nil
	case <-s.closed:
	case <-ctx.Done():
	}
	return nil, net.ErrClosed
}

// Accept implements [net.Listener].
func (s *socket) Accept() (net.Conn, error) {
	select {
	case c := <-s.accept:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (s *socket) Close() error { s.close(); return nil }

// Addr implements [net.Listener].
func (s *socket) Addr() net.Addr { return address("driver") }

// conn is the end of a connection at the driver, with the name of its client.
type conn struct {
	net.Conn
	client address
}

func (c conn) RemoteAddr() net.Addr { return c.client }

type address string

func (address) Network() string  { return "pipe" }
func (a address) String() string { return string(a) }

// startDriver starts the driver with all its calls at the gate.
func (s *simulation) startDriver() {
	config := csitest.Config{Name: s.scale.driver(), NoNodeExpansion: !s.scale.nodeExpansion, DiscardCalls: true}
	config.Controller = []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	}
	if s.scale.lists {
		config.Controller = append(config.Controller, csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
			csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES)
	}
	if s.scale.features.Resize {
		config.Controller = append(config.Controller, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
			csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
	}
	if s.scale.features.Snapshots {
		config.Controller = append(config.Controller, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT)
	}
	if s.scale.features.Copies {
		config.Controller = append(config.Controller, csi.ControllerServiceCapability_RPC_CLONE_VOLUME)
	}
	if s.scale.features.Capacity {
		config.Capacity = driverCapacity
		config.Controller = append(config.Controller, csi.ControllerServiceCapability_RPC_GET_CAPACITY)
	}
	if s.scale.features.Topology {
		config.Plugin = []csi.PluginCapability_Service_Type{
			csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
		}
		for _, node := range s.cluster.Nodes {
			config.Segments = append(config.Segments, s.cluster.Zone(node))
		}
	}
	s.driver = csitest.New(config)
	for _, method := range calls {
		s.driver.Always(method, func(ctx context.Context, _ *csitest.Plugin, r any, do func() (any, error)) (any, error) {
			return s.call(ctx, s.caller(ctx), method, r, do)
		})
	}
	csitest.Serve(s.driver, s.openSocket())
}

// openSocket returns the socket to which clients connect from now on.
func (s *simulation) openSocket() *socket {
	listener := newSocket()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.socket = listener
	return listener
}

// errBroken is the error of a call whose connection breaks. A client that has ended the call does not get it.
var errBroken = status.Error(codes.Unavailable, "the connection breaks")

// restartDriver closes the connections of the driver, which keeps its volumes. Running calls end one after the other.
func (s *simulation) restartDriver() {
	for _, o := range s.gate.begin(s.step) {
		if (o.kind == call || o.kind == callResponse) && !o.canceled() {
			close(o.broken)
			s.settle()
		}
	}
	listener := s.openSocket() // before clients connect again, else they would wait for a random time
	s.driver.Stop()
	csitest.Serve(s.driver, listener)
}

// createVolume creates a volume of the size of new claims, without a call of a process.
func (s *simulation) createVolume(name string) (handle string, err error) {
	mode := &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
	response, err := s.driver.CreateVolume(context.Background(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: mode, AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		}},
	})
	return response.GetVolume().GetVolumeId(), err
}

// unpublish removes a publication from the storage system, if there is one. The attacher notices it with ListVolumes.
func (s *simulation) unpublish() bool {
	var published [][2]string
	for _, v := range s.volumes() {
		for _, node := range slices.Sorted(maps.Keys(v.Published)) {
			published = append(published, [2]string{v.ID, node})
		}
	}
	if len(published) == 0 {
		return false
	}
	p := published[s.choices.Pick(len(published))]
	s.record("an administrator unpublishes volume %s from %s at the storage system", p[0], p[1])
	s.driver.Unpublish(p[0], p[1])
	return true
}

// unattached returns the publications that VolumeAttachments name and the driver does not have. A volume that is being deleted
// is not published again.
func (s *simulation) unattached() []string {
	missing := map[string]bool{}
	for _, pv := range cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes) {
		if s.scale.lists && pv.DeletionTimestamp != nil {
			continue
		}
		for _, va := range cluster.List[*storagev1.VolumeAttachment](s.api, cluster.Attachments) {
			if *va.Spec.Source.PersistentVolumeName == pv.Name && va.Status.Attached {
				missing[pv.Spec.CSI.VolumeHandle+" id-of-"+va.Spec.NodeName] = true
			}
		}
	}
	for _, v := range s.volumes() {
		for node := range v.Published {
			delete(missing, v.ID+" "+node)
		}
	}
	return slices.Sorted(maps.Keys(missing))
}

// call lets a call of the driver wait, and answers it as the schedule decides.
func (s *simulation) call(ctx context.Context, from *replica, method string, r any, do func() (any, error)) (any, error) {
	if from == nil || from.killed() {
		return nil, status.Error(codes.Canceled, "killed")
	}
	defer outlast(ctx, time.Now())
	o := &operation{replica: from, kind: call, name: method + " " + volumeOf(r), method: method, volume: volumeOf(r)}
	if s.driver != nil {
		o.late = func() { _, _ = do() }
	}
	if method != "ListVolumes" && method != "GetCapacity" {
		s.checker.calls.Add(1)
	}
	o.term = s.began(from, method, r)
	v, ok := s.gate.wait(ctx, o)
	switch {
	case !ok:
		s.answered(from, r, errBroken)
		return nil, errBroken
	case v.err == nil && s.driver != nil && method == "DeleteVolume" && s.unreachable(volumeOf(r)):
		v.err = status.Error(codes.Unavailable, "the node of the volume does not exist")
		s.checker.calls.Add(-1) // a fault that lasts
	}
	if v.err != nil {
		s.answered(from, r, v.err)
		return nil, v.err
	}
	s.executes(from, r)
	ended := s.serves(o, ctx)
	answer, err := do()
	ended(r, answer, err)
	switch lasts := err != nil && s.driver == nil; {
	case lasts && s.unreachable(volumeOf(r)):
		s.checker.calls.Add(-1)
	case lasts && (s.cluster.KeepsLogicalVolume(volumeOf(r)) || method == "CreateVolume" && s.refusedAgain(volumeOf(r))):
		// The claim is protected during the call.
		s.checker.calls.Add(-1)
		s.checker.writes.Add(-2)
	}
	if created, ok := answer.(*csi.CreateSnapshotResponse); ok && err == nil && v.unready {
		created.Snapshot.ReadyToUse = false
	}
	if v.delay {
		late := &operation{replica: from, kind: callResponse, name: "response to " + method + " " + volumeOf(r)}
		v, ok = s.gate.wait(ctx, late)
		if !ok {
			err = errBroken
		}
	}
	if err == nil {
		err = v.lost
	}
	s.answered(from, r, err)
	if err != nil {
		return nil, err
	}
	return answer, nil
}

// unreachable reports whether the driver cannot delete a volume: its node does not exist, and the driver needs it.
func (s *simulation) unreachable(handle string) bool {
	needed := s.driver == nil || s.scale.cleanup == nodecleanup.ModeVolumes
	return needed && slices.ContainsFunc(s.volumesWith(handle), func(pv *corev1.PersistentVolume) bool {
		return s.cluster.Node(cluster.NodeOf(pv)) == nil
	})
}

// longestBackOff is the --retry-interval-max of all processes.
const longestBackOff = 8 * time.Second

// refusedAgain reports whether a creation is refused after the longest back-off since the last refusal.
func (s *simulation) refusedAgain(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, now := s.checker.refused[name], time.Now()
	s.checker.refused[name] = now
	return !last.IsZero() && now.Sub(last) >= longestBackOff
}

// volumeOf returns the name or the ID of the volume or snapshot that a call is about, or the class and the node.
func volumeOf(r any) string {
	switch r := r.(type) {
	case *csi.CreateVolumeRequest:
		return r.GetName()
	case *csi.CreateSnapshotRequest:
		return r.GetName()
	case *csi.GetCapacityRequest:
		return fmt.Sprint(r.GetParameters()["type"], " ", cluster.NodeIn(r.GetAccessibleTopology().GetSegments()))
	case *csi.DeleteSnapshotRequest:
		return r.GetSnapshotId()
	case *csi.ControllerPublishVolumeRequest:
		return r.GetVolumeId() + " " + r.GetNodeId()
	case *csi.ControllerUnpublishVolumeRequest:
		return r.GetVolumeId() + " " + r.GetNodeId()
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	}
	return ""
}
