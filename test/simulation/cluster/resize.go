// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// attributesClasses are the names of the VolumeAttributesClasses.
var attributesClasses = []string{"gold", "silver"}

// unit is the size of a new claim, and the difference between two requests. No claim requests more than maxSize.
var unit, maxSize = resource.MustParse("1Gi"), resource.MustParse("5Gi")

func (c *Cluster) createAttributesClass(name string) error {
	return c.api.Create(storagev1.SchemeGroupVersion.WithResource("volumeattributesclasses"), &storagev1.VolumeAttributesClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, DriverName: c.driver, Parameters: map[string]string{"tier": name},
	})
}

// ResizeStatus returns the status of the expansion of claim, "" for none.
func ResizeStatus(claim *corev1.PersistentVolumeClaim) corev1.ClaimResourceStatus {
	return claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage]
}

// usedBy returns the node on which a pod uses the volume of claim, or "".
func (c *Cluster) usedBy(s state, claim *corev1.PersistentVolumeClaim) string {
	if pod := c.pod(claim.Name); c.features.Topolvm && pod != nil && c.accessible(s.volume(claim.Spec.VolumeName), pod.Node) {
		return pod.Node
	}
	for _, va := range s.attachments {
		if *va.Spec.Source.PersistentVolumeName != claim.Spec.VolumeName || !va.Status.Attached {
			continue
		}
		if pod := c.pod(claim.Name); pod != nil && pod.Node == va.Spec.NodeName {
			return pod.Node
		}
	}
	return ""
}

// expand returns the steps of the kubelets, which expand the file systems of volumes in use.
func (c *Cluster) expand(s state) []Step {
	var steps []Step
	for _, claim := range s.claims {
		pv, node := s.volume(claim.Spec.VolumeName), c.usedBy(s, claim)
		if pv == nil || node == "" {
			continue
		}
		next := claim.DeepCopy()
		name := "kubelet on " + node
		switch ResizeStatus(claim) {
		case corev1.PersistentVolumeClaimNodeResizePending:
			next.Status.AllocatedResourceStatuses[corev1.ResourceStorage] = corev1.PersistentVolumeClaimNodeResizeInProgress
			name += " begins to expand the volume of claim " + claim.Name
		case corev1.PersistentVolumeClaimNodeResizeInProgress:
			next.Status.AllocatedResourceStatuses = nil
			next.Status.Capacity[corev1.ResourceStorage] = pv.Spec.Capacity[corev1.ResourceStorage]
			next.Status.Conditions = withoutExpansion(next.Status.Conditions)
			name += " has expanded the volume of claim " + claim.Name
		default:
			continue
		}
		steps = append(steps, Step{name, c.updateStatus(Claims, next)})
	}
	return steps
}

// withoutExpansion returns conditions without those that the kubelet removes after an expansion.
func withoutExpansion(conditions []corev1.PersistentVolumeClaimCondition) []corev1.PersistentVolumeClaimCondition {
	removed := []corev1.PersistentVolumeClaimConditionType{
		corev1.PersistentVolumeClaimResizing, corev1.PersistentVolumeClaimFileSystemResizePending,
		corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError,
	}
	return slices.DeleteFunc(conditions, func(c corev1.PersistentVolumeClaimCondition) bool { return slices.Contains(removed, c.Type) })
}

// userExpands returns the steps of users who request other sizes and VolumeAttributesClasses, and expansions that
// fail on the node.
func (c *Cluster) userExpands(s state) []Step {
	if !c.features.Resize {
		return nil
	}
	var steps []Step
	update := func(claim *corev1.PersistentVolumeClaim, what string, change func(*corev1.PersistentVolumeClaimSpec)) {
		next := claim.DeepCopy()
		change(&next.Spec)
		steps = append(steps, Step{"user " + what + " of claim " + claim.Name, c.update(Claims, next)})
	}
	for _, claim := range s.claims {
		if claim.Status.Phase != corev1.ClaimBound {
			continue
		}
		request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
		more, less := request.DeepCopy(), request.DeepCopy()
		more.Add(unit)
		less.Sub(unit)
		resize := func(size resource.Quantity) func(*corev1.PersistentVolumeClaimSpec) {
			return func(spec *corev1.PersistentVolumeClaimSpec) { spec.Resources.Requests[corev1.ResourceStorage] = size }
		}
		if more.Cmp(maxSize) <= 0 {
			update(claim, "requests "+more.String(), resize(more))
		}
		if less.Cmp(claim.Status.Capacity[corev1.ResourceStorage]) > 0 {
			update(claim, "requests "+less.String(), resize(less))
		}
		for _, name := range attributesClasses {
			if !c.features.Topolvm && ptr.Deref(claim.Spec.VolumeAttributesClassName, "") != name {
				update(claim, "requests class "+name, func(spec *corev1.PersistentVolumeClaimSpec) {
					spec.VolumeAttributesClassName = &name
				})
			}
		}
		if ResizeStatus(claim) == corev1.PersistentVolumeClaimNodeResizeInProgress {
			next := claim.DeepCopy()
			next.Status.AllocatedResourceStatuses[corev1.ResourceStorage] = corev1.PersistentVolumeClaimNodeResizeInfeasible
			steps = append(steps, Step{"kubelet fails to expand the volume of claim " + claim.Name, c.updateStatus(Claims, next)})
		}
	}
	return steps
}

// lostVolume reports whether the LVM volume of a claim is lost with its Node: the Node does not exist, or has returned after the
// LogicalVolume of the claim, which is being deleted, was cleaned up.
func (c *Cluster) lostVolume(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	return c.Node(NodeOf(pv)) == nil || claim.DeletionTimestamp != nil && c.api.Get(LogicalVolumes, "", pv.Name) == nil
}

// busyExpansions returns the claims whose volumes are not expanded or modified yet.
func (c *Cluster) busyExpansions(s state) []string {
	if !c.features.Resize {
		return nil
	}
	var busy []string
	for _, claim := range s.claims {
		pv := s.volume(claim.Spec.VolumeName)
		if pv == nil || claim.Status.Phase != corev1.ClaimBound || c.features.Topolvm && c.lostVolume(claim, pv) {
			continue
		}
		request, status := claim.Spec.Resources.Requests[corev1.ResourceStorage], ResizeStatus(claim)
		waitsForPod := status == corev1.PersistentVolumeClaimNodeResizePending || status == corev1.PersistentVolumeClaimNodeResizeInProgress
		if request.Cmp(claim.Status.Capacity[corev1.ResourceStorage]) > 0 && (!waitsForPod || c.usedBy(s, claim) != "") {
			busy = append(busy, fmt.Sprintf("claim %s requests %s and has status %q", claim.Name, &request, status))
		}
		wanted, current := ptr.Deref(claim.Spec.VolumeAttributesClassName, ""), ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "")
		if wanted != current || claim.Status.ModifyVolumeStatus != nil || wanted != ptr.Deref(pv.Spec.VolumeAttributesClassName, "") {
			busy = append(busy, fmt.Sprintf("claim %s requests class %q and has %q", claim.Name, wanted, current))
		}
	}
	return busy
}
