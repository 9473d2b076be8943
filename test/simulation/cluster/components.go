// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	component "k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

const (
	claimProtection  = "kubernetes.io/pvc-protection"
	volumeProtection = "kubernetes.io/pv-protection"
)

// Finalizers of the provisioner, and its annotation with the record of a request.
const (
	ProvisioningRequest   = "storage-controller.io/provisioning-request"
	ProvisioningFinalizer = "storage-controller.io/provisioning"
	CloneFinalizer        = "provisioner.storage.kubernetes.io/cloning-protection"
	RestoreFinalizer      = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
)

// Finalizers are those of the components on claims, PersistentVolumes and VolumeSnapshots.
var Finalizers = []string{claimProtection, volumeProtection, sourceClaimFinalizer, asSourceFinalizer, boundFinalizer}

// bind returns the steps of the PersistentVolume binder.
func (c *Cluster) bind(s state) []Step {
	var steps []Step
	for _, claim := range s.claims {
		if step, ok := c.bindClaim(s, claim); ok {
			steps = append(steps, step)
		}
	}
	for _, pv := range s.volumes {
		ref := pv.Spec.ClaimRef
		if ref == nil || ref.UID == "" || pv.Status.Phase == corev1.VolumeReleased {
			continue
		}
		if claim := s.claim(ref.Name); claim == nil || claim.UID != ref.UID {
			steps = append(steps, c.setPhase(pv, corev1.VolumeReleased))
		}
	}
	return steps
}

// bindClaim returns the next step for a claim: the annotation for the provisioner, or a step of binding.
func (c *Cluster) bindClaim(s state, claim *corev1.PersistentVolumeClaim) (Step, bool) {
	pv := s.volume(claim.Spec.VolumeName)
	for _, candidate := range s.volumes {
		if candidate.DeletionTimestamp == nil && isUnbound(candidate, claim) {
			pv = candidate
		}
	}
	next := claim.DeepCopy()
	switch class := s.class(claim); {
	case pv != nil && pv.Status.Phase != corev1.VolumeBound && pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == claim.UID:
		return c.setPhase(pv, corev1.VolumeBound), true
	case pv != nil && claim.Spec.VolumeName == "":
		next.Spec.VolumeName = pv.Name
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnBindCompleted, "yes")
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnBoundByController, "yes")
		return Step{"binder binds claim " + claim.Name, c.update(Claims, next)}, true
	case pv != nil && claim.Status.Phase == corev1.ClaimPending:
		next.Status.Phase, next.Status.Capacity, next.Status.AccessModes = corev1.ClaimBound, pv.Spec.Capacity, pv.Spec.AccessModes
		return Step{"binder updates the status of claim " + claim.Name, c.updateStatus(Claims, next)}, true
	case pv == nil && claim.Spec.VolumeName != "" && claim.Status.Phase == corev1.ClaimBound:
		next.Status.Phase = corev1.ClaimLost
		return Step{"binder marks claim " + claim.Name + " Lost", c.updateStatus(Claims, next)}, true
	case pv == nil && claim.Spec.VolumeName == "" && class != nil && !waits(class, claim) &&
		claim.Annotations[storagehelpers.AnnStorageProvisioner] != class.Provisioner:
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnStorageProvisioner, class.Provisioner)
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnBetaStorageProvisioner, class.Provisioner)
		return Step{"binder assigns claim " + claim.Name + " to the provisioner", c.update(Claims, next)}, true
	}
	return Step{}, false
}

// isUnbound reports whether pv is for claim, which is not bound.
func isUnbound(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.VolumeName == "" && pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID == claim.UID
}

// hasDeletedVolume reports whether the volume of claim is being deleted, so that claim stays unbound until it is deleted.
func (s state) hasDeletedVolume(claim *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(s.volumes, func(pv *corev1.PersistentVolume) bool {
		return pv.DeletionTimestamp != nil && isUnbound(pv, claim)
	})
}

// waits reports whether claim waits for its first pod to be scheduled.
func waits(class *storagev1.StorageClass, claim *corev1.PersistentVolumeClaim) bool {
	late := *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
	return late && claim.Annotations[storagehelpers.AnnSelectedNode] == ""
}

func (c *Cluster) setPhase(pv *corev1.PersistentVolume, phase corev1.PersistentVolumePhase) Step {
	next := pv.DeepCopy()
	next.Status.Phase = phase
	return Step{"binder marks volume " + pv.Name + " " + string(phase), c.updateStatus(Volumes, next)}
}

// protect returns the steps of the controllers that remove the finalizers of unused claims and volumes.
func (c *Cluster) protect(s state) []Step {
	var steps []Step
	for _, claim := range s.claims {
		if claim.DeletionTimestamp == nil || !slices.Contains(claim.Finalizers, claimProtection) || c.pod(claim.Name) != nil {
			continue
		}
		next := claim.DeepCopy()
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == claimProtection })
		steps = append(steps, Step{"protection releases claim " + claim.Name, c.update(Claims, next)})
	}
	for _, pv := range s.volumes {
		if pv.DeletionTimestamp == nil || !slices.Contains(pv.Finalizers, volumeProtection) || pv.Status.Phase == corev1.VolumeBound {
			continue
		}
		next := pv.DeepCopy()
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == volumeProtection })
		steps = append(steps, Step{"protection releases volume " + pv.Name, c.update(Volumes, next)})
	}
	return steps
}

// schedulerBackoff is the time after which the scheduler selects a node for a claim again.
const schedulerBackoff = time.Second

// schedule returns the steps of the scheduler: it selects the node of claims that wait for their first pod, and assigns
// the pod to that node.
func (c *Cluster) schedule(s state) []Step {
	var steps []Step
	for _, pod := range c.pods {
		claim := s.claim(pod.Claim)
		if claim == nil || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil {
			continue
		}
		if class := s.class(claim); class == nil || !waits(class, claim) {
			continue
		}
		if time.Since(c.selected[claim.UID]) < schedulerBackoff {
			c.changed = true
			continue
		}
		for _, node := range c.Nodes {
			if c.features.Nodes && !c.stays(node) || c.features.Capacity && !c.fits(claim, node) {
				continue
			}
			next := claim.DeepCopy()
			metav1.SetMetaDataAnnotation(&next.ObjectMeta, storagehelpers.AnnSelectedNode, node)
			steps = append(steps, Step{"scheduler selects " + node + " for claim " + claim.Name, func(context.Context) error {
				c.pod(claim.Name).Node, c.selected[claim.UID] = node, time.Now()
				return c.api.Update(Claims, next, "")
			}})
		}
	}
	return steps
}

// fits reports whether a CSIStorageCapacity says that there is enough capacity for claim on a node.
func (c *Cluster) fits(claim *corev1.PersistentVolumeClaim, node string) bool {
	return slices.ContainsFunc(List[*storagev1.CSIStorageCapacity](c.api, Capacities), func(o *storagev1.CSIStorageCapacity) bool {
		return o.StorageClassName == *claim.Spec.StorageClassName && NodeIn(o.NodeTopology.MatchLabels) == node &&
			o.Capacity != nil && o.Capacity.Cmp(claim.Spec.Resources.Requests[corev1.ResourceStorage]) >= 0
	})
}

// attach returns the steps of the attach-detach controller.
func (c *Cluster) attach(s state) []Step {
	if c.features.Topolvm {
		return nil
	}
	var steps []Step
	wanted := map[string]bool{}
	for _, pod := range c.pods {
		claim := s.claim(pod.Claim)
		if claim == nil || claim.Status.Phase != corev1.ClaimBound || c.Node(pod.Node) == nil ||
			!c.accessible(s.volume(claim.Spec.VolumeName), pod.Node) {
			continue
		}
		name := attachmentName(claim.Spec.VolumeName, pod.Node)
		wanted[name] = true
		attached := func(va *storagev1.VolumeAttachment) bool {
			elsewhere := va.Spec.NodeName != pod.Node && isShared(claim.Spec.AccessModes)
			return *va.Spec.Source.PersistentVolumeName == claim.Spec.VolumeName && !elsewhere
		}
		if slices.ContainsFunc(s.attachments, attached) { // also one for another node, if the volume has a single writer
			continue
		}
		va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: storagev1.VolumeAttachmentSpec{
			Attacher: c.driver, NodeName: pod.Node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &claim.Spec.VolumeName},
		}}
		steps = append(steps, Step{"attach-detach controller creates " + name, c.create(Attachments, va)})
	}
	for _, va := range s.attachments {
		if va.DeletionTimestamp == nil && !wanted[va.Name] {
			steps = append(steps, Step{"attach-detach controller deletes " + va.Name, func(context.Context) error {
				return c.api.Delete(Attachments, "", va.Name, metav1.NewUIDPreconditions(string(va.UID)))
			}})
		}
	}
	return steps
}

// accessible reports whether pv, nil if there is none, can be used on the Node with that name.
func (c *Cluster) accessible(pv *corev1.PersistentVolume, name string) bool {
	node := c.Node(name)
	if pv == nil || pv.Spec.NodeAffinity == nil || node == nil {
		return node != nil
	}
	ok, err := component.NewLazyErrorNodeSelector(pv.Spec.NodeAffinity.Required).Match(node)
	return ok && err == nil
}

func attachmentName(volume, node string) string { return "va-" + volume + "-" + node }
