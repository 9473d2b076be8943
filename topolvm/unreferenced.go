// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"slices"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// settled is the age of a LogicalVolume whose PersistentVolume should exist.
const settled = time.Minute

// Unreferenced returns those of lvs that no PersistentVolume of driver and no pending claim names. Snapshots are left out, and
// LogicalVolumes that are younger than a minute at the time now.
//
// withHandle returns all PersistentVolumes with a volume handle. It may return others, too. claims are all claims.
//
// Nothing may delete an unreferenced LogicalVolume automatically: one whose PersistentVolume was deleted with the policy Retain looks
// the same.
func Unreferenced(driver string, lvs []*LogicalVolume, withHandle func(handle string) []*corev1.PersistentVolume,
	claims []*corev1.PersistentVolumeClaim, now time.Time) []*LogicalVolume {
	pending := map[string]bool{} // UIDs and keys
	for _, pvc := range claims {
		if pvc.Spec.VolumeName == "" || slices.Contains(pvc.Finalizers, kube.ProvisioningFinalizer) {
			pending[string(pvc.UID)], pending[kube.Key(pvc)] = true, true
		}
	}
	named := func(handle string) bool {
		return slices.ContainsFunc(withHandle(handle), func(pv *corev1.PersistentVolume) bool {
			return pv.Spec.CSI != nil && pv.Spec.CSI.Driver == driver && pv.Spec.CSI.VolumeHandle == handle
		})
	}
	return slices.DeleteFunc(slices.Clone(lvs), func(lv *LogicalVolume) bool {
		return lv.IsSnapshot() || now.Sub(lv.CreationTimestamp.Time) <= settled ||
			pending[lv.Claim()] || pending[claimUID(lv.Name)] ||
			named(string(lv.UID)) || lv.Status.VolumeID != "" && named(lv.Status.VolumeID)
	})
}

// claimUID returns the UID of the claim in the name that the provisioner gives a volume by default: a prefix, a dash and the UID. It
// returns "" if the name has none.
func claimUID(name string) string {
	const length = 36
	uid := name[max(0, len(name)-length):]
	if len(uid) < length || uuid.Validate(uid) != nil {
		return ""
	}
	return uid
}
