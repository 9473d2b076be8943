// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import storagev1 "k8s.io/api/storage/v1"

// DriverOnNode returns the entry of driver in a CSINode, which holds the node ID and the
// topology keys. It returns nil if the driver is not registered on the node, or node is nil.
func DriverOnNode(node *storagev1.CSINode, driver string) *storagev1.CSINodeDriver {
	if node == nil {
		return nil
	}
	for i := range node.Spec.Drivers {
		if node.Spec.Drivers[i].Name == driver {
			return &node.Spec.Drivers[i]
		}
	}
	return nil
}
