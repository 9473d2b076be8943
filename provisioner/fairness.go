// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import storagehelpers "k8s.io/component-helpers/storage/volume"

// groupOf returns the group of a claim for [workloop.NewFair]: its StorageClass. A claim that was deleted has that of its volume
// in progress.
func (l *claimLoop) groupOf(key claimKey) string {
	claim, ok := l.c.claims.Get(key.Namespace + "/" + key.Name)
	if !ok || claim.UID != key.UID {
		return l.ops.Get(key).Payload.plan.ClassName
	}
	return storagehelpers.GetPersistentVolumeClaimClass(claim)
}

// groupOf returns the group of a PersistentVolume, its StorageClass, or "" if it was deleted.
func (l *volumeLoop) groupOf(name string) string {
	pv, ok := l.c.volumes.Get(name)
	if !ok {
		return ""
	}
	return storagehelpers.GetPersistentVolumeClass(pv)
}
