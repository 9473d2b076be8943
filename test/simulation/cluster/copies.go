// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"slices"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// maxCopies is the number of claims that are copies.
const maxCopies = 2

// userCopies returns the steps of users who create and delete copies of volumes and snapshots.
func (c *Cluster) userCopies(s state) []Step {
	if !c.features.Copies {
		return nil
	}
	var steps []Step
	for i := range maxCopies {
		name := fmt.Sprintf("copy%d", i)
		claim := s.claim(name)
		if claim == nil {
			for _, source := range s.sources() {
				steps = append(steps, c.createClaim(name, "immediate", &source))
			}
		} else if claim.DeletionTimestamp == nil {
			steps = append(steps, Step{"user deletes claim " + name, func(context.Context) error { return c.deleteClaim(name) }})
		}
	}
	return steps
}

// sources returns what a claim can be a copy of.
func (s state) sources() []corev1.TypedLocalObjectReference {
	var sources []corev1.TypedLocalObjectReference
	for _, claim := range s.claims {
		sources = append(sources, corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: claim.Name})
	}
	for _, snapshot := range s.snapshots {
		sources = append(sources, corev1.TypedLocalObjectReference{
			APIGroup: ptr.To(snapshotv1.GroupName), Kind: "VolumeSnapshot", Name: snapshot.Name,
		})
	}
	return slices.DeleteFunc(sources, func(r corev1.TypedLocalObjectReference) bool { return !s.copyable(r) })
}

// copyable reports whether a volume can be created from r.
func (s state) copyable(r corev1.TypedLocalObjectReference) bool {
	if r.Kind == "PersistentVolumeClaim" {
		claim := s.claim(r.Name)
		return claim != nil && claim.DeletionTimestamp == nil && claim.Status.Phase == corev1.ClaimBound &&
			s.volume(claim.Spec.VolumeName) != nil
	}
	i := slices.IndexFunc(s.snapshots, func(o *snapshotv1.VolumeSnapshot) bool { return o.Name == r.Name })
	if i < 0 || s.snapshots[i].DeletionTimestamp != nil || !isReady(s.snapshots[i]) {
		return false
	}
	content := s.content(s.snapshots[i])
	return content != nil && content.DeletionTimestamp == nil
}

// copies returns the pending claims whose source has that kind and name.
func (s state) copies(kind, name string) []*corev1.PersistentVolumeClaim {
	return slices.DeleteFunc(slices.Clone(s.claims), func(claim *corev1.PersistentVolumeClaim) bool {
		source := claim.Spec.DataSource
		return source == nil || source.Kind != kind || source.Name != name || claim.Status.Phase != corev1.ClaimPending
	})
}

// hasSource reports whether the volume of claim is empty, or can be created from its source.
func (s state) hasSource(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.DataSource == nil || s.copyable(*claim.Spec.DataSource)
}
