// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestStubsOfClaimsThatMayBeResized: a claim that does not name its driver retains its sizes and classes only
// while they may matter.
func TestStubsOfClaimsThatMayBeResized(t *testing.T) {
	size := func(s string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s)}
	}
	for name, tt := range map[string]struct {
		change func(*corev1.PersistentVolumeClaim)
		want   bool
	}{
		"finished":  {func(*corev1.PersistentVolumeClaim) {}, false},
		"larger":    {func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = size("2Gi") }, true},
		"pending":   {func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName, c.Status.Capacity = "", nil }, false},
		"allocated": {func(c *corev1.PersistentVolumeClaim) { c.Status.AllocatedResources = size("2Gi") }, true},
		"expanded":  {func(c *corev1.PersistentVolumeClaim) { c.Status.AllocatedResources = size("1Gi") }, false},
		"class":     {func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = ptr.To("gold") }, true},
		"modifying": {func(c *corev1.PersistentVolumeClaim) { c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{} }, true},
	} {
		claim := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "c", Annotations: map[string]string{AnnStorageResizer: "drv", "other": "x"}},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv",
				Resources: corev1.VolumeResourceRequirements{Requests: size("1Gi")}},
			Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: size("1Gi"),
				Conditions: []corev1.PersistentVolumeClaimCondition{{Type: corev1.PersistentVolumeClaimResizing}}},
		}
		tt.change(claim)
		retained := &RetainedFields{}
		retained.add(RetainedFields{Resize: true})
		obj, err := trim("drv", retained)(claim.DeepCopy())
		stub, ok := obj.(*corev1.PersistentVolumeClaim)
		if err != nil || !ok {
			t.Fatal(err)
		}
		if has := stub.Spec.Resources.Requests != nil; has != tt.want || len(stub.Status.Conditions) > 0 ||
			stub.Annotations["other"] != "" ||
			(stub.Annotations[AnnStorageResizer] != "") != (claim.Spec.VolumeName != "") || stub.Status.Phase != claim.Status.Phase {
			t.Errorf("%s: got %+v", name, stub)
		}
		retained.add(RetainedFields{Claims: true}) // of the node controller
		both := trimClaim("drv", claim.DeepCopy(), retained)
		requested, actual := both.Spec.Resources.Requests[corev1.ResourceStorage], both.Status.Capacity[corev1.ResourceStorage]
		if larger := requested.Cmp(actual) > 0; larger != (name == "larger" || name == "pending") {
			t.Errorf("%s: the stub requests %v and has %v", name, &requested, &actual)
		}
		if WasNeverExpanded(stub) != (!tt.want && claim.Spec.VolumeName != "" && claim.Status.AllocatedResources == nil) {
			t.Errorf("%s: status.allocatedResources is %v", name, stub.Status.AllocatedResources)
		}
		if has := stub.Status.AllocatedResources != nil && !WasNeverExpanded(stub); has != (claim.Status.AllocatedResources != nil) {
			t.Errorf("%s: status.allocatedResources is retained: %v", name, has)
		}
	}
}

// TestStubsOfExpandedClaimsShareTheirSizes: a cluster keeps status.allocatedResources of every claim that was
// expanded.
func TestStubsOfExpandedClaimsShareTheirSizes(t *testing.T) {
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}
	claim := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: corev1.PersistentVolumeClaimStatus{Capacity: size, AllocatedResources: size}}
	claim.Spec.Resources.Requests = size
	allocations := func(f RetainedFields) float64 {
		retained := &RetainedFields{}
		retained.add(f)
		return testing.AllocsPerRun(100, func() { trimClaim("drv", claim, retained) })
	}
	if without, with := allocations(RetainedFields{}), allocations(RetainedFields{Resize: true}); with != without {
		t.Errorf("a stub takes %v allocations, %v without the resizer", with, without)
	}
	if stub := trimClaim("drv", claim, &RetainedFields{Resize: true}); stub.Status.Capacity != nil || stub.Spec.Resources.Requests != nil {
		t.Errorf("the stub has sizes of its own: %+v", stub)
	}
}
