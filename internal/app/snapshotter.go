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
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/snapshotter"
)

const snapshotterName = "snapshotter"

var snapshotterRole = Role{
	Name:           snapshotterName,
	sidecar:        "csi-snapshotter",
	validate:       func(s Settings) error { return snapshotterConfig(s).Validate() },
	timeout:        func(s Settings) time.Duration { return snapshotterConfig(s).Timeout },
	slow:           true,
	nodeDeployment: func(s Settings) bool { return snapshotterConfig(s).NodeDeployment },
	lease:          func(_ Settings, driver string) string { return snapshotter.LeaseName(driver) },
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "CREATE_DELETE_SNAPSHOT", d.Controller.CreateDeleteSnapshot)
	},
	ineffective: func(s Settings, d *csiclient.Driver) []condition {
		groups := d == nil || d.Group.CreateDeleteGetVolumeGroupSnapshot
		return []condition{{groups, "the driver does not report CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",
			[]string{"snapshotter.groupsnapshot-name-prefix", "snapshotter.groupsnapshot-name-uuid-length"}}}
	},
	grants: snapshotterGrants,
	apis:   snapshotterAPIs,
	check:  snapshotterName,
	build:  buildSnapshotter,
}

// snapshotterConfig returns the configuration of the snapshotter with feature gates and environment.
func snapshotterConfig(s Settings) snapshotter.Config {
	cfg := s.Snapshotter
	cfg.SecretNamespaces = s.Common.SecretNamespaces
	cfg.Groups = s.Role(snapshotterName).Gates.Enabled("CSIVolumeGroupSnapshot")
	cfg.RecheckInterval = snapshotter.DefaultConfig().RecheckInterval
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

// usesGroups reports whether the role reconciles group snapshots of d.
func usesGroups(s Settings, d csiclient.Driver) bool {
	cfg := snapshotterConfig(s)
	return cfg.Groups && !cfg.NodeDeployment && d.Group.CreateDeleteGetVolumeGroupSnapshot
}

func snapshotterGrants(s Settings, d csiclient.Driver) []rbac.Grant {
	grants := []rbac.Grant{{File: "snapshotter"}}
	if usesGroups(s, d) {
		grants = append(grants, rbac.Grant{File: "snapshotter-groups", Without: "group snapshots are not created and deleted"})
	}
	return grants
}

func snapshotterAPIs(s Settings, d csiclient.Driver) []doctor.API {
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
