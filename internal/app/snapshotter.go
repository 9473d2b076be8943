// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"os"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/snapshotter"
)

const snapshotterName = "snapshotter"

var snapshotterRole = Role{
	Name:           snapshotterName,
	sidecar:        "csi-snapshotter",
	options:        snapshotterOptions,
	config:         func() any { return &snapshotter.Config{} },
	validate:       func(s settings.Settings) error { return snapshotterConfig(s).Validate() },
	timeout:        func(s settings.Settings) time.Duration { return snapshotterConfig(s).Timeout },
	slow:           true,
	nodeDeployment: func(s settings.Settings) bool { return snapshotterConfig(s).NodeDeployment },
	lease:          func(_ settings.Settings, driver string) string { return snapshotter.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "CREATE_DELETE_SNAPSHOT", d.Controller.CreateDeleteSnapshot)
	},
	ineffective: func(s settings.Settings, d *csiclient.Driver) []condition {
		groups := d == nil || d.Group.CreateDeleteGetVolumeGroupSnapshot
		return []condition{{groups, "the driver does not report CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",
			[]string{"snapshotter.groupsnapshot-name-prefix", "snapshotter.groupsnapshot-name-uuid-length"}}}
	},
	grants: snapshotterGrants,
	apis:   snapshotterAPIs,
	check:  snapshotterName,
	build:  buildSnapshotter,
}

func snapshotterOptions(bool) []settings.Option {
	d := snapshotter.DefaultConfig()
	return append(retryOptions(d.Timeout, d.RetryIntervalStart, d.RetryIntervalMax, "timeout of each CSI call"), []settings.Option{
		{Name: "worker-threads", Default: uint(d.WorkerThreads),
			Usage: "number of VolumeSnapshotContents, and separately of VolumeGroupSnapshotContents, that are reconciled at the same time"},
		{Name: "resync-period", Default: d.ResyncPeriod,
			Usage: "time between two resyncs of all contents that are not in their final state; 0 means never"},
		{Name: "snapshot-name-prefix", Default: d.SnapshotNamePrefix, Usage: "prefix of snapshot names"},
		{Name: "snapshot-name-uuid-length", Default: d.SnapshotNameUUIDLength,
			Usage: "number of characters of the VolumeSnapshot's UID in the snapshot name; -1 means the whole UID with dashes"},
		{Name: "groupsnapshot-name-prefix", Default: d.GroupSnapshotNamePrefix, Usage: "prefix of the names of group snapshots"},
		{Name: "groupsnapshot-name-uuid-length", Default: d.GroupSnapshotNameUUIDLength,
			Usage: "number of characters of the VolumeGroupSnapshot's UID in the name of the group; -1 means the whole UID with dashes"},
		{Name: "extra-create-metadata", Default: d.ExtraCreateMetadata,
			Usage: "pass the names of VolumeSnapshot and VolumeSnapshotContent to CreateSnapshot"},
		{Name: "node-deployment", Default: d.NodeDeployment,
			Usage: "distributed snapshotting: run once per node, for the VolumeSnapshotContents with its label; " +
				"requires the environment variable NODE_NAME"},
	}...)
}

// snapshotterConfig returns the configuration of the snapshotter with feature gates and environment.
func snapshotterConfig(s settings.Settings) snapshotter.Config {
	cfg := settings.Of[snapshotter.Config](s, snapshotterName)
	cfg.SecretNamespaces = s.Common.SecretNamespaces
	cfg.Groups = s.Common.FeatureGates.Enabled("CSIVolumeGroupSnapshot")
	cfg.RecheckInterval = snapshotter.DefaultConfig().RecheckInterval
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

// usesGroups reports whether the role reconciles group snapshots of d.
func usesGroups(s settings.Settings, d csiclient.Driver) bool {
	cfg := snapshotterConfig(s)
	return cfg.Groups && !cfg.NodeDeployment && d.Group.CreateDeleteGetVolumeGroupSnapshot
}

func snapshotterGrants(s settings.Settings, d csiclient.Driver) []rbac.Grant {
	grants := []rbac.Grant{{File: "snapshotter"}}
	if usesGroups(s, d) {
		grants = append(grants, rbac.Grant{File: "snapshotter-groups", Without: "group snapshots are not created and deleted"})
	}
	return grants
}

func snapshotterAPIs(s settings.Settings, d csiclient.Driver) []doctor.API {
	var apis []doctor.API
	for _, resource := range []string{"volumesnapshotcontents", "volumesnapshotclasses"} {
		apis = append(apis, doctor.API{
			GroupVersion: "snapshot.storage.k8s.io/v1", Resource: resource, For: "creating and deleting snapshots",
			Hint: "install the CRDs and the snapshot-controller of external-snapshotter, if you use snapshots",
		})
	}
	if usesGroups(s, d) {
		apis = append(apis, doctor.API{
			GroupVersion: "groupsnapshot.storage.k8s.io/v1", Older: "groupsnapshot.storage.k8s.io/v1beta2",
			Resource: "volumegroupsnapshotcontents", For: "group snapshots",
			Hint: "install the CRDs of group snapshots of external-snapshotter, if you use group snapshots",
		})
	}
	return apis
}

func buildSnapshotter(_ context.Context, s *shared, config *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return snapshotter.New(snapshotterConfig(s.settings), snapshotter.Deps{
		Driver:   s.driver,
		Client:   client,
		API:      config,
		Watches:  s.watches,
		CSI:      s.csi.Controller(),
		GroupCSI: s.csi.GroupController(),
		Ready:    s.csi.WaitReady,
		Events:   s.recorder("csi-snapshotter " + s.driver.Name),
		Registry: s.registry,
		Queues:   s.queues,
		Locks:    s.locks,
	})
}
