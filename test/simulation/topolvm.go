// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
	"github.com/storage-controller/storage-controller/topolvm"
)

// driver returns the name of the driver.
func (c scale) driver() string {
	if c.features.Topolvm {
		return topolvm.Driver
	}
	return "drv.example.com"
}

// nodeLease returns the name of the Lease of the node controller.
func (c scale) nodeLease() string {
	if c.features.Topolvm {
		return "topolvm"
	}
	return nodecontroller.LeaseName(c.driver())
}

// pickTopolvm chooses the size of a history in which the processes serve the driver of TopoLVM.
func (s *simulation) pickTopolvm() scale {
	pick := s.choices.Pick
	c := scale{
		replicas: 1 + pick(3), nodes: 2 + pick(2), claims: 1 + pick(3), steps: 40 + pick(120), faults: []int{0, 2, 6, 15}[pick(4)],
		disasters: []int{0, 2, 2, 6}[pick(4)], nodeExpansion: true, prepared: pick(3) == 2, impatient: pick(4) == 3,
		protection: []string{"always", "always", "on-retry"}[pick(3)],
		features:   cluster.Features{Topolvm: true, Topology: true, Resize: pick(2) == 1, Capacity: pick(3) == 2},
	}
	if pick(2) == 1 {
		c.features.Nodes, c.nodes, c.steps = true, 3, c.steps+60
		c.cleanup = []nodecleanup.Mode{nodecleanup.ModeClaims, nodecleanup.ModeVolumes}[pick(2)]
		c.nodeFinalizer = []nodecleanup.FinalizerMode{nodecleanup.FinalizerOff, nodecleanup.FinalizerRemove}[pick(2)]
		c.features.NodeFinalizer = c.nodeFinalizer == nodecleanup.FinalizerRemove
	} else {
		c.features.Snapshots = pick(2) == 1
		c.features.Copies = !c.features.Resize && pick(3) > 0
	}
	c.clock, c.oldServers = pick(4) == 3, pick(3) == 2
	return c
}

// driverCalls lets the calls of the roles of a process wait at the gate before the process serves them.
func (s *simulation) driverCalls(from *replica) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, r any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		method := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
		if !slices.Contains(calls, method) {
			return handler(ctx, r)
		}
		logger := logr.New(keySink{loop: method, key: volumeOf(r)})
		return s.call(ctx, from, method, r, func() (any, error) { return handler(klog.NewContext(ctx, logger), r) })
	}
}

// serving is a call that a process serves for its roles.
type serving struct {
	*operation
	ctx context.Context
}

// serves records that the process of o serves it, until ended is called with the result.
func (s *simulation) serves(o *operation, ctx context.Context) (ended func(r, answer any, err error)) {
	if s.driver != nil {
		return func(any, any, error) {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serving = append(s.serving, serving{o, ctx})
	return func(r, answer any, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.serving = slices.DeleteFunc(s.serving, func(other serving) bool { return other.operation == o })
		if create, ok := r.(*csi.CreateVolumeRequest); ok && err == nil {
			s.created(o.replica, create, answer.(*csi.CreateVolumeResponse).GetVolume())
		}
		if err == nil && (o.method == "DeleteVolume" || o.method == "DeleteSnapshot") {
			s.deleted(o)
		}
	}
}

// stillServing returns the calls that running processes serve and whose roles wait for the response.
func (s *simulation) stillServing() []*operation {
	s.mu.Lock()
	defer s.mu.Unlock()
	var running []*operation
	for _, o := range s.serving {
		if o.term != "" && o.ctx.Err() == nil && !o.replica.killed() {
			running = append(running, o.operation)
		}
	}
	return running
}

// servesCall reports whether r serves a call of method for a volume or snapshot. The lock must be held.
func (s *simulation) servesCall(r *replica, method, id string) bool {
	return slices.ContainsFunc(s.serving, func(o serving) bool { return o.replica == r && o.method == method && o.volume == id })
}

// happens counts a situation.
func (s *simulation) happens(situation string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.happensLocked(situation)
}

func (s *simulation) happensLocked(situation string) { s.history.Situations[situation]++ }

// volumes returns the volumes of the driver.
func (s *simulation) volumes() []csitest.Volume {
	if s.driver != nil {
		return s.driver.Volumes()
	}
	var all []csitest.Volume
	for _, v := range s.cluster.LVMVolumes() {
		if !v.Snapshot {
			all = append(all, csitest.Volume{ID: v.ID, Name: v.Name, Capacity: v.Size, Segment: s.cluster.Zone(v.Node)})
		}
	}
	return all
}

// snapshots returns the snapshots of the driver.
func (s *simulation) snapshots() []csitest.Snapshot {
	if s.driver != nil {
		return s.driver.Snapshots()
	}
	var all []csitest.Snapshot
	for _, v := range s.cluster.LVMVolumes() {
		if v.Snapshot {
			all = append(all, csitest.Snapshot{ID: v.ID, Name: v.Name, Size: v.Size})
		}
	}
	return all
}
