// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// backups are claims and PersistentVolumes by name, as a backup program has stored them.
type backups struct {
	claims  map[string]*corev1.PersistentVolumeClaim
	volumes map[string]*corev1.PersistentVolume
}

// backUp stores the claims and PersistentVolumes. A claim with the record of a request replaces one without.
func (c *Cluster) backUp(s state) {
	b := &c.backups
	if b.claims == nil {
		b.claims, b.volumes = map[string]*corev1.PersistentVolumeClaim{}, map[string]*corev1.PersistentVolume{}
	}
	for _, claim := range s.claims {
		last := b.claims[claim.Name]
		if last == nil || last.Annotations[ProvisioningRequest] == "" {
			b.claims[claim.Name] = claim
		}
	}
	for _, pv := range s.volumes {
		b.volumes[pv.Name] = pv
	}
}

// restore returns the steps of users who restore claims and PersistentVolumes that were deleted, with their annotations: a
// claim gets another UID, and a PersistentVolume names the claim that it had.
func (c *Cluster) restore(s state) []Step {
	if !c.features.Backups {
		return nil
	}
	c.backUp(s)
	var steps []Step
	for _, name := range slices.Sorted(maps.Keys(c.backups.claims)) {
		if s.claim(name) == nil {
			claim := restoredClaim(c.backups.claims[name])
			steps = append(steps, Step{"user restores claim " + name, c.create(Claims, claim)})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.backups.volumes)) {
		if s.volume(name) == nil {
			pv := restoredVolume(c.backups.volumes[name])
			steps = append(steps, Step{"user restores volume " + name, c.create(Volumes, pv)})
		}
	}
	return steps
}

// restoredMeta returns the metadata that a backup program restores.
func restoredMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, Labels: m.Labels, Annotations: maps.Clone(m.Annotations)}
}

// restoredClaim returns the claim of a backup without its volume, and without what binder and scheduler have written.
func restoredClaim(stored *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: restoredMeta(stored.ObjectMeta), Spec: *stored.Spec.DeepCopy()}
	claim.Spec.VolumeName = ""
	for _, annotation := range []string{
		storagehelpers.AnnBindCompleted, storagehelpers.AnnBoundByController, storagehelpers.AnnSelectedNode,
	} {
		delete(claim.Annotations, annotation)
	}
	return claim
}

// restoredVolume returns the PersistentVolume of a backup.
func restoredVolume(stored *corev1.PersistentVolume) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: restoredMeta(stored.ObjectMeta), Spec: *stored.Spec.DeepCopy()}
}

// staticVolume returns the step of an administrator who creates a volume at the storage system, and its PersistentVolume for a new
// claim.
func (c *Cluster) staticVolume(claimName string) Step {
	return Step{"administrator creates a volume, and a PersistentVolume and claim " + claimName + " for it", func(context.Context) error {
		c.statics++
		name, claim := fmt.Sprint("static-", c.statics), c.newClaim(claimName, "immediate", nil)
		handle, err := c.CreateVolume(name)
		if err != nil {
			return err
		}
		claim.Spec.VolumeName = name
		if err := c.api.Create(Claims, claim); err != nil {
			return err
		}
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			AccessModes: claim.Spec.AccessModes, StorageClassName: "immediate", Capacity: claim.Spec.Resources.Requests.DeepCopy(),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			ClaimRef: &corev1.ObjectReference{
				Kind: "PersistentVolumeClaim", Namespace: Namespace, Name: claimName, UID: c.read().claim(claimName).UID,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: c.driver, VolumeHandle: handle},
			},
		}}
		if c.statics%2 == 0 {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}
		return c.api.Create(Volumes, pv)
	}}
}
