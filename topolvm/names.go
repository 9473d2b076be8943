// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const (
	// Driver is the name of the driver.
	Driver = "topolvm.io"
	// LegacyDriver is the name that TopoLVM had before.
	LegacyDriver = "topolvm.cybozu.com"
)

// IsDriver reports whether name is one of the names of the driver, in any spelling: names that are derived from it are lower-case.
func IsDriver(name string) bool {
	return strings.EqualFold(name, Driver) || strings.EqualFold(name, LegacyDriver)
}

// DriverName returns the name of the driver for a value of the environment variable USE_LEGACY. As in topolvm-controller, any value
// selects the legacy name, also "false".
func DriverName(useLegacy string) string {
	if useLegacy != "" {
		return LegacyDriver
	}
	return Driver
}

const (
	// annotationVolumeName is the name of a LogicalVolume in the CSI request, which may have capital letters.
	annotationVolumeName = "storage-controller.io/volume-name"
	// annotationClaim is NAMESPACE/NAME of the claim of a LogicalVolume, whose opt-outs count.
	annotationClaim = "storage-controller.io/claim"

	// labelCreatedBy is topolvm-controller on a LogicalVolume: topolvm-node sets the label otherwise.
	labelCreatedBy = "app.kubernetes.io/created-by"
	createdBy      = "topolvm-controller"

	// paramClaim and paramNamespace are parameters that --extra-create-metadata adds.
	paramClaim     = "csi.storage.k8s.io/pvc/name"
	paramNamespace = "csi.storage.k8s.io/pvc/namespace"

	// defaultClass names the default device class in annotations. In a LogicalVolume it is the empty string.
	defaultClass = "00default"

	// readOnly is the access type of a snapshot, readWrite that of a volume with a source.
	readOnly  = "ro"
	readWrite = "rw"
)

// Resource returns the custom resource LogicalVolume of driver.
func Resource(driver string) schema.GroupVersionResource { return names(driver).resource() }

// TopologyKey returns the label of the Nodes whose values the LogicalVolumes of driver name.
func TopologyKey(driver string) string { return names(driver).topologyKey() }

// names holds the name of the driver, from which the names of topolvm-node follow.
type names string

// other returns the other name of the driver.
func (n names) other() names {
	if n == Driver {
		return LegacyDriver
	}
	return Driver
}

func (n names) resource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: string(n), Version: "v1", Resource: "logicalvolumes"}
}

// topologyKey returns the key of the topology segments, which is also the label of the Nodes.
func (n names) topologyKey() string { return "topology." + string(n) + "/node" }

// capacityPrefix begins the annotations of a Node with the available bytes of its device classes.
func (n names) capacityPrefix() string { return "capacity." + string(n) + "/" }

func (n names) finalizer() string   { return string(n) + "/logicalvolume" }
func (n names) deviceClass() string { return string(n) + "/device-class" }
func (n names) optionClass() string { return string(n) + "/lvcreate-option-class" }

// resizeRequested names the annotation that makes topolvm-node try an expansion again.
func (n names) resizeRequested() string { return string(n) + "/resize-requested-at" }

// pendingDeletion names the annotation that makes topolvm-node ignore a LogicalVolume.
func (n names) pendingDeletion() string { return string(n) + "/pendingdeletion" }

// valueOf returns the topology value of node: its label, or its name before the driver has registered on it.
func (n names) valueOf(node *corev1.Node) string {
	if value := node.Labels[n.topologyKey()]; value != "" {
		return value
	}
	return node.Name
}

// owns reports whether an annotation of a LogicalVolume is one that this package reads or writes.
func (n names) owns(annotation string) bool {
	return strings.HasPrefix(annotation, string(n)+"/") || annotation == annotationVolumeName || annotation == annotationClaim
}
