// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"
	"hash/fnv"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Labels of the objects. Keys and values are those of csi-provisioner, whose objects this
// package takes over.
const (
	// labelDriver is the driver of a CSIStorageCapacity.
	labelDriver = "csi.storage.k8s.io/drivername"
	// labelManagedBy is external-provisioner on a CSIStorageCapacity, with --node-deployment followed by the node.
	labelManagedBy = "csi.storage.k8s.io/managed-by"
	managedByBase  = "external-provisioner"
)

// labels returns the labels of all objects of driver. node is the node of this instance in
// distributed provisioning, else empty.
func labels(driver, node string) map[string]string {
	return map[string]string{labelDriver: driver, labelManagedBy: managedBy(node)}
}

// managedBy returns the value of the managed-by label. It shortens long values in the same
// way as csi-provisioner, so that each recognizes the objects of the other.
func managedBy(node string) string {
	if node == "" {
		return managedByBase
	}
	name := managedByBase + "-" + node
	if len(name) <= validation.LabelValueMaxLength {
		return name
	}
	const hashed = len("-01234567-")
	if keep := validation.LabelValueMaxLength - hashed - len(node); keep > 0 {
		return fmt.Sprintf("%s-%s-%s", managedByBase[:keep], hash(managedByBase), node)
	}
	return managedByBase + "-" + hash(name)
}

func hash(s string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}
