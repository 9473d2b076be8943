// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/migration"
)

// is reports whether name is the driver, or the in-tree plugin that it replaced.
func (d driver) is(name string) bool { return name == d.name || name == d.inTree && name != "" }

// isMigrated reports whether the volumes of class have the source of an in-tree plugin.
func (d driver) isMigrated(class *storagev1.StorageClass) bool {
	return d.inTree != "" && class.Provisioner == d.inTree
}

// translated returns class with the parameters and topologies of the driver.
func (d driver) translated(class *storagev1.StorageClass) (*storagev1.StorageClass, error) {
	if !d.isMigrated(class) {
		return class, nil
	}
	return migration.ClassToCSI(class)
}

// asCSI returns pv with a CSI source. A driver that replaced no in-tree plugin has no
// volumes to translate.
func (d driver) asCSI(pv *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	if d.inTree == "" {
		return pv, nil
	}
	translated, _, err := migration.ToCSI(pv)
	return translated, err
}
