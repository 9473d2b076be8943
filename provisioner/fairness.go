// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import storagehelpers "k8s.io/component-helpers/storage/volume"

// countClasses updates severalClasses. It is called for each event of a StorageClass.
func (c *Controller) countClasses() {
	n := 0
	for _, class := range c.classes.List() {
		if c.driver.is(class.Provisioner) {
			n++
		}
	}
	c.severalClasses.Store(n > 1)
}

// groupOf returns the group of the objects of a StorageClass, for [workloop.NewFair]. If the driver has
// only one class, that class has no limit.
func (c *Controller) groupOf(class string) string {
	if !c.severalClasses.Load() {
		return ""
	}
	return class
}

// groupOf returns the group of a claim. A claim that was deleted has that of its volume in progress.
func (l *claimLoop) groupOf(key claimKey) string {
	claim, ok := l.c.claims.Get(key.Namespace + "/" + key.Name)
	if !ok || claim.UID != key.UID {
		return l.c.groupOf(l.ops.get(key).plan.ClassName)
	}
	return l.c.groupOf(storagehelpers.GetPersistentVolumeClaimClass(claim))
}

// groupOf returns the group of a PersistentVolume, or "" if it was deleted.
func (l *volumeLoop) groupOf(name string) string {
	pv, ok := l.c.volumes.Get(name)
	if !ok {
		return ""
	}
	return l.c.groupOf(storagehelpers.GetPersistentVolumeClass(pv))
}
