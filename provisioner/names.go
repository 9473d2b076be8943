// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// identityAttribute is a volume attribute with the process that created the volume.
const identityAttribute = "storage.kubernetes.io/csiProvisionerIdentity"

// Kinds that are watched if the cluster serves them, because claims wait for them.
var (
	referenceGrants = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1beta1", Resource: "referencegrants"}
	volumeSnapshots = schema.GroupVersionResource{Group: volumerules.SnapshotGroup, Version: "v1", Resource: "volumesnapshots"}
)

// LeaseName returns the name of the Lease of csi-provisioner for driver.
func LeaseName(driver string) string { return election.LeaseName(driver) }

// volumeName returns the name of the volume of a claim, for the driver and the PersistentVolume. It
// depends only on the UID, so that every attempt requests the same volume.
func (c Config) volumeName(claim types.UID) string {
	uid := string(claim)
	if c.VolumeNameUUIDLength >= 0 {
		uid = strings.ReplaceAll(uid, "-", "")
		uid = uid[:min(len(uid), c.VolumeNameUUIDLength)]
	}
	return c.VolumeNamePrefix + "-" + uid
}

// DefaultVolumeName returns the name of the volume of a claim with the default settings.
func DefaultVolumeName(claim types.UID) string { return DefaultConfig().volumeName(claim) }
