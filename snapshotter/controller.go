// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/keylock"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Snapshots declares the RPCs of the controller service that the snapshotter calls.
type Snapshots interface {
	CreateSnapshot(context.Context, *csi.CreateSnapshotRequest, ...grpc.CallOption) (*csi.CreateSnapshotResponse, error)
	DeleteSnapshot(context.Context, *csi.DeleteSnapshotRequest, ...grpc.CallOption) (*csi.DeleteSnapshotResponse, error)
	ListSnapshots(context.Context, *csi.ListSnapshotsRequest, ...grpc.CallOption) (*csi.ListSnapshotsResponse, error)
	GetSnapshot(context.Context, *csi.GetSnapshotRequest, ...grpc.CallOption) (*csi.GetSnapshotResponse, error)
}

// GroupSnapshots declares the RPCs of the group controller service that the snapshotter calls.
type GroupSnapshots interface {
	CreateVolumeGroupSnapshot(context.Context, *csi.CreateVolumeGroupSnapshotRequest, ...grpc.CallOption) (
		*csi.CreateVolumeGroupSnapshotResponse, error)
	DeleteVolumeGroupSnapshot(context.Context, *csi.DeleteVolumeGroupSnapshotRequest, ...grpc.CallOption) (
		*csi.DeleteVolumeGroupSnapshotResponse, error)
	GetVolumeGroupSnapshot(context.Context, *csi.GetVolumeGroupSnapshotRequest, ...grpc.CallOption) (
		*csi.GetVolumeGroupSnapshotResponse, error)
}

// Deps holds the dependencies of a [Controller]. All fields but Locks are required.
type Deps struct {
	Driver csiclient.Driver
	Client kubernetes.Interface // of this role: see kube.ForRole
	// API and Watches are the connections of this role for requests and for watches.
	API, Watches *rest.Config
	CSI          Snapshots
	GroupCSI     GroupSnapshots
	// Ready blocks until the driver can be called.
	Ready    func(context.Context) error
	Events   record.EventRecorder
	Registry prometheus.Registerer
	Queues   *workloop.Metrics
	// Locks keeps the node controller from deleting a PersistentVolume during a CSI call for its volume.
	Locks *keylock.Locks[string]
}

// Controller creates and deletes the snapshots of a driver.
type Controller struct {
	cfg    Config
	deps   Deps
	driver driver

	clients, watchClients map[schema.GroupVersion]clients
	snapshots, groups     *kube.Optional[watches]

	// The loops of the current term; nil without the Lease.
	contentLoop, groupLoop atomic.Pointer[loop]
}

// New validates cfg and creates the clients. It starts nothing; see [Controller.Serve] and [Controller.Run].
func New(cfg Config, deps Deps) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	caps := deps.Driver.Controller
	if !caps.CreateDeleteSnapshot {
		return nil, fmt.Errorf("driver %q does not report the controller capability CREATE_DELETE_SNAPSHOT", deps.Driver.Name)
	}
	c := &Controller{
		cfg: cfg, deps: deps,
		driver: driver{Config: cfg, name: deps.Driver.Name, listSnapshots: caps.ListSnapshots, getSnapshot: caps.GetSnapshot},
	}
	c.snapshots, c.groups = c.optional(snapshotKind, "Idle: snapshot resources cannot be listed"), c.optional(groupKind, logGroupsOff)
	var err error
	if c.clients, err = newClients(deps.API); err != nil {
		return nil, err
	}
	if c.watchClients, err = newClients(deps.Watches); err != nil {
		return nil, err
	}
	c.registerMetrics(deps.Registry)
	return c, nil
}

// Run reconciles until ctx ends, and returns its cause, or until the snapshot resources cannot be
// listed any more. Then it returns nil, and [Controller.WaitAvailable] waits. It may be called again afterwards.
func (c *Controller) Run(ctx context.Context) error {
	return c.snapshots.Do(ctx, func(ctx context.Context, w *watches) error {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { c.runGroups(ctx) })
		return c.runLoop(ctx, snapshotKind, w, snapshotCalls{c}, &c.contentLoop)
	})
}

// runGroups reconciles VolumeGroupSnapshotContents while they are served, until ctx ends.
func (c *Controller) runGroups(ctx context.Context) {
	var err error
	for err == nil { // else ctx has ended, or the process exits and the informers have stopped
		c.groups.Wait(ctx)
		err = c.groups.Do(ctx, func(ctx context.Context, w *watches) error {
			return c.runLoop(ctx, groupKind, w, groupCalls{c}, &c.groupLoop)
		})
	}
}
