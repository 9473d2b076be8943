// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import storagev1 "k8s.io/api/storage/v1"

// WaitsForFirstConsumer reports whether the binding mode of class is WaitForFirstConsumer.
func WaitsForFirstConsumer(class *storagev1.StorageClass) bool {
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}
