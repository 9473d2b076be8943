// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
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

	clients, watchClients clients
	snapshots             *kube.Optional[snapshotWatches]
	groups                *kube.Optional[groupWatches]

	// The loops of the current term, for metrics; nil without the Lease.
	contentLoop, groupLoop atomic.Pointer[gauges]
	// wakeMembers enqueues the members of a group; nil without the Lease.
	wakeMembers atomic.Pointer[func(handle string)]
}

// clients holds a client for each resource.
type clients struct {
	contents contentClient
	classes  classClient
	groups   map[string]groupClients // by version
}

type groupClients struct {
	contents groupClient
	classes  groupClassClient
}

func newClients(config *rest.Config) (c clients, err error) {
	if c.contents, err = newContentClient(config); err != nil {
		return c, fmt.Errorf("creating the client of VolumeSnapshotContents: %w", err)
	}
	if c.classes, err = newClassClient(config); err != nil {
		return c, fmt.Errorf("creating the client of VolumeSnapshotClasses: %w", err)
	}
	c.groups = map[string]groupClients{}
	for _, version := range append([]string{groupVersionOld}, groupVersions...) {
		var g groupClients
		if g.contents, err = newGroupClient(config, version); err != nil {
			return c, fmt.Errorf("creating the client of VolumeGroupSnapshotContents: %w", err)
		}
		if g.classes, err = newGroupClassClient(config, version); err != nil {
			return c, fmt.Errorf("creating the client of VolumeGroupSnapshotClasses: %w", err)
		}
		c.groups[version] = g
	}
	return c, nil
}

// New validates cfg and creates the clients. It starts nothing; see [Controller.Serve] and
// [Controller.Run].
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
	c.snapshots = optional(cfg.RecheckInterval, c.openSnapshots, "Idle: snapshot resources cannot be listed")
	c.groups = optional(cfg.RecheckInterval, c.openGroups, logGroupsOff)
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
	return c.snapshots.Do(ctx, func(ctx context.Context, w *snapshotWatches) error {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { c.runGroups(ctx) })
		return runLoop(ctx, c, loopDeps[*snapshotv1.VolumeSnapshotContent, *snapshotv1.VolumeSnapshotClass]{
			name: queueContents, kind: snapshotKind, gauges: &c.contentLoop, watches: w, calls: snapshotCalls{c},
			writer: c.clients.contents, status: c.clients.contents.status(), classes: c.clients.classes,
			content: snapshotContent, class: snapshotClass,
		})
	})
}

// runGroups reconciles VolumeGroupSnapshotContents while they are served, until ctx ends.
func (c *Controller) runGroups(ctx context.Context) {
	var err error
	for err == nil { // else ctx has ended, or the process exits and the informers have stopped
		c.groups.Wait(ctx)
		err = c.groups.Do(ctx, func(ctx context.Context, w *groupWatches) error {
			clients := c.clients.groups[w.version]
			return runLoop(ctx, c, loopDeps[*groupv1.VolumeGroupSnapshotContent, *groupv1.VolumeGroupSnapshotClass]{
				name: queueGroups, kind: groupKind, gauges: &c.groupLoop, watches: w, calls: groupCalls{c},
				writer: clients.contents, status: clients.contents.status(), classes: clients.classes,
				content: groupContent, class: groupClass,
			})
		})
	}
}
