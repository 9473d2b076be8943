// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// resizeChecker holds what invariants of expansions and modifications need to know about the past.
type resizeChecker struct {
	sizes         map[types.UID]resource.Quantity // the last size of each claim and PersistentVolume
	expansions    map[string]*change              // the last call by volume, until its result is recorded
	modifications map[string]*change
}

// change is a call of ControllerExpandVolume or ControllerModifyVolume.
type change struct {
	to      string   // the size or the VolumeAttributesClass
	settled *replica // has received a final response; nil: the outcome is unknown
}

func newResizeChecker() resizeChecker {
	return resizeChecker{map[types.UID]resource.Quantity{}, map[string]*change{}, map[string]*change{}}
}

// claimOf returns the claim of a volume, or nil.
func (s *simulation) claimOf(handle string) *corev1.PersistentVolumeClaim {
	for _, pv := range s.volumesWith(handle) {
		if ref := pv.Spec.ClaimRef; ref != nil {
			claim, _ := s.api.Get(cluster.Claims, ref.Namespace, ref.Name).(*corev1.PersistentVolumeClaim)
			if claim != nil && claim.UID == ref.UID {
				return claim
			}
		}
	}
	return nil
}

// mayExpand returns an error unless the claim records the call.
func (s *simulation) mayExpand(r *csi.ControllerExpandVolumeRequest) error {
	size := r.GetCapacityRange().GetRequiredBytes()
	if claim := s.claimOf(r.GetVolumeId()); claim != nil {
		allocated, status := claim.Status.AllocatedResources[corev1.ResourceStorage], cluster.ResizeStatus(claim)
		if allocated.Value() != size || status != corev1.PersistentVolumeClaimControllerResizeInProgress {
			return fmt.Errorf("%d bytes are requested, and claim %s records %d with the status %q",
				size, claim.Name, allocated.Value(), status)
		}
	}
	for _, pv := range s.volumesWith(r.GetVolumeId()) {
		if capacity := pv.Spec.Capacity[corev1.ResourceStorage]; capacity.Value() >= size {
			return nil // a repeated call without an effect, by a replica whose watch is late
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checker.resizer.expansions[r.GetVolumeId()] = &change{to: bytes(size)}
	return nil
}

func bytes(size int64) string { return fmt.Sprintf("%d bytes", size) }

// recorded checks that a replica that has written the status of a claim has not recorded another size or class than that of a
// call whose outcome it does not know.
func (s *simulation) recorded(from *replica, r apiserver.Request) {
	claim, _ := s.api.Get(cluster.Claims, r.Namespace, r.Name).(*corev1.PersistentVolumeClaim)
	if claim == nil {
		return
	}
	pv, _ := s.api.Get(cluster.Volumes, "", claim.Spec.VolumeName).(*corev1.PersistentVolume)
	if pv == nil {
		return
	}
	check := func(calls map[string]*change, to string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		last := calls[pv.Spec.CSI.VolumeHandle]
		if last == nil || last.to == to {
			return
		}
		delete(calls, pv.Spec.CSI.VolumeHandle)
		if last.settled != from {
			s.violatedLocked("%s records %s for claim %s, and does not know the outcome of the call for %s",
				from.client, to, claim.Name, last.to)
		}
	}
	if cluster.ResizeStatus(claim) == corev1.PersistentVolumeClaimControllerResizeInProgress {
		allocated := claim.Status.AllocatedResources[corev1.ResourceStorage]
		check(s.checker.resizer.expansions, bytes(allocated.Value()))
	}
	if m := claim.Status.ModifyVolumeStatus; m != nil && m.Status == corev1.PersistentVolumeClaimModifyVolumeInProgress {
		check(s.checker.resizer.modifications, m.TargetVolumeAttributesClassName)
	}
}

// mayModify returns an error unless the claim records the call.
func (s *simulation) mayModify(r *csi.ControllerModifyVolumeRequest) error {
	claim := s.claimOf(r.GetVolumeId())
	if claim == nil {
		return nil
	}
	recorded := ptr.Deref(claim.Status.ModifyVolumeStatus, corev1.ModifyVolumeStatus{})
	parameters := s.attributes(recorded.TargetVolumeAttributesClassName)
	if recorded.Status != corev1.PersistentVolumeClaimModifyVolumeInProgress || !maps.Equal(parameters, r.GetMutableParameters()) {
		return fmt.Errorf("claim %s records the modification to %q with the status %q", claim.Name,
			recorded.TargetVolumeAttributesClassName, recorded.Status)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checker.resizer.modifications[r.GetVolumeId()] = &change{to: recorded.TargetVolumeAttributesClassName}
	return nil
}

// attributes returns the parameters of a VolumeAttributesClass.
func (s *simulation) attributes(name string) map[string]string {
	classes := storagev1.SchemeGroupVersion.WithResource("volumeattributesclasses")
	if class, ok := s.api.Get(classes, "", name).(*storagev1.VolumeAttributesClass); ok {
		return class.Parameters
	}
	return nil
}

// checkSizes checks that no size shrinks, and that no PersistentVolume is larger than its volume.
func (s *simulation) checkSizes() {
	if !s.scale.features.Resize {
		return
	}
	check := func(kind, name string, uid types.UID, size resource.Quantity) {
		if last, ok := s.checker.resizer.sizes[uid]; ok && size.Cmp(last) < 0 {
			s.violated("the size of %s %s shrinks from %s to %s", kind, name, &last, &size)
		}
		s.checker.resizer.sizes[uid] = size
	}
	capacity := map[string]int64{}
	for _, v := range s.volumes() {
		if v.Capacity > 0 { // else topolvm-node has just removed it
			capacity[v.ID] = v.Capacity
		}
	}
	for _, pv := range cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes) {
		size := pv.Spec.Capacity[corev1.ResourceStorage]
		check("volume", pv.Name, pv.UID, size)
		if has, ok := capacity[pv.Spec.CSI.VolumeHandle]; ok && size.Value() > has {
			s.violated("PersistentVolume %s has %d bytes, and its volume %d", pv.Name, size.Value(), has)
		}
		claim := s.claimOf(pv.Spec.CSI.VolumeHandle)
		if claim == nil {
			continue
		}
		has := claim.Status.Capacity[corev1.ResourceStorage]
		check("claim", claim.Name, claim.UID, has)
		if has.Cmp(size) > 0 {
			s.violated("claim %s has %s, and its PersistentVolume %s", claim.Name, &has, &size)
		}
		s.forgetChanges(claim, pv.Spec.CSI.VolumeHandle)
	}
}

// forgetChanges forgets the calls whose final results a claim records.
func (s *simulation) forgetChanges(claim *corev1.PersistentVolumeClaim, handle string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.checker.resizer
	last := c.expansions[handle]
	if last != nil && last.settled != nil && cluster.ResizeStatus(claim) != corev1.PersistentVolumeClaimControllerResizeInProgress {
		delete(c.expansions, handle)
	}
	last, status := c.modifications[handle], ptr.Deref(claim.Status.ModifyVolumeStatus, corev1.ModifyVolumeStatus{}).Status
	if last != nil && last.settled != nil && status != corev1.PersistentVolumeClaimModifyVolumeInProgress {
		delete(c.modifications, handle)
	}
}

// checkModified checks that the volumes have the parameters that the claims say.
func (s *simulation) checkModified(when string) {
	for _, v := range s.volumes() {
		claim := s.claimOf(v.ID)
		if claim == nil {
			continue
		}
		if name := ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, ""); !maps.Equal(s.attributes(name), v.Mutable) {
			s.violated("%s: claim %s has the class %q, and its volume %v", when, claim.Name, name, v.Mutable)
		}
	}
}
