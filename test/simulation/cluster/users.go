// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// ClassNames are the StorageClasses: Immediate and WaitForFirstConsumer with the policy Delete, and Immediate
// with Retain.
var ClassNames = []string{"immediate", "waiting", "retained"}

// SetUp creates the objects of the administrator.
func (c *Cluster) SetUp(ctx context.Context) error {
	for _, node := range c.Nodes {
		if err := c.join(node); err != nil {
			return err
		}
	}
	for _, step := range c.register() {
		if err := step.Do(ctx); err != nil {
			return err
		}
	}
	driver := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: c.driver}, Spec: storagev1.CSIDriverSpec{
		StorageCapacity: &c.features.Capacity,
	}}
	if c.features.Topolvm {
		driver.Spec.AttachRequired = new(bool)
		if err := c.defineLogicalVolumes(); err != nil {
			return err
		}
	}
	if err := c.api.Create(storagev1.SchemeGroupVersion.WithResource("csidrivers"), driver); err != nil {
		return err
	}
	if c.features.Secrets {
		if err := c.createSecret(); err != nil {
			return err
		}
	}
	for _, name := range ClassNames {
		if err := c.createClass(name); err != nil {
			return err
		}
	}
	if c.features.Resize {
		for _, name := range attributesClasses {
			if err := c.createAttributesClass(name); err != nil {
				return err
			}
		}
	}
	if c.features.Snapshots {
		for _, policy := range snapshotPolicies {
			if err := c.createSnapshotClass(ctx, policy); err != nil {
				return err
			}
		}
	}
	return nil
}

// createClass creates a StorageClass. Its parameters have two generations, which alternate.
func (c *Cluster) createClass(name string) error {
	c.generations[name]++
	parameters := map[string]string{"type": name, "generation": strconv.Itoa(c.generations[name] % 2)}
	if c.features.Topolvm {
		parameters[deviceClass] = c.classOf(c.generations[name])
	}
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: c.driver, Parameters: c.withSecret(parameters, ""),
		ReclaimPolicy: ptr.To(corev1.PersistentVolumeReclaimDelete), VolumeBindingMode: ptr.To(storagev1.VolumeBindingImmediate),
		AllowVolumeExpansion: &c.features.Resize,
	}
	switch name {
	case "waiting":
		class.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
	case "retained":
		class.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain)
	}
	return c.api.Create(Classes, class)
}

// UserSteps returns what users can do now, in groups of the same frequency. claims is the number of names of claims.
func (c *Cluster) UserSteps(claims int) [][]Step {
	s := c.read()
	var steps []Step
	for i := range claims {
		name := fmt.Sprintf("c%d", i)
		claim := s.claim(name)
		if claim == nil {
			steps = append(steps, c.createClaim(name, c.className(i), nil))
			if c.features.Static {
				steps = append(steps, c.staticVolume(name))
			}
			continue
		}
		if claim.DeletionTimestamp == nil {
			steps = append(steps, Step{"user deletes claim " + name, func(context.Context) error { return c.deleteClaim(name) }})
		}
		used := c.pod(name) != nil
		if used {
			steps = append(steps, Step{"user deletes the pod of claim " + name, func(context.Context) error {
				c.deletePod(name)
				return nil
			}})
		}
		if claim.DeletionTimestamp == nil && (!used || isShared(claim.Spec.AccessModes)) {
			for _, node := range c.Nodes {
				if c.Node(node) == nil || slices.Contains(c.pods, Pod{name, node}) {
					continue
				}
				steps = append(steps, Step{"user creates a pod of claim " + name + " on " + node, func(context.Context) error {
					c.pods, c.changed = append(c.pods, Pod{name, node}), true
					return nil
				}})
			}
		}
	}
	groups := [][]Step{
		steps, append(c.disturb(s), c.disturbSecret(s)...), c.userExpands(s), c.userTakesSnapshots(s, claims), c.disturbSnapshots(s),
		c.userCopies(s), c.topolvmFaults(), c.restore(s),
	}
	for i := range groups {
		if c.features.Without>>i&1 == 1 {
			groups[i] = nil
		}
	}
	return slices.DeleteFunc(groups, func(steps []Step) bool { return len(steps) == 0 })
}

// CreateClaims creates claims with the names that users use.
func (c *Cluster) CreateClaims(ctx context.Context, claims int) error {
	for i := range claims {
		if err := c.createClaim(fmt.Sprintf("c%d", i), c.className(i), nil).Do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// RemoveVolumeFinalizer removes a finalizer from all PersistentVolumes.
func (c *Cluster) RemoveVolumeFinalizer(finalizer string) error {
	for _, pv := range c.read().volumes {
		next := pv.DeepCopy()
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == finalizer })
		if err := c.api.Update(Volumes, next, ""); err != nil {
			return err
		}
	}
	return nil
}

// recreateClass returns the step of a user who deletes a StorageClass and creates it again, with other parameters: a process
// cannot repeat the request of its predecessor then.
func (c *Cluster) recreateClass(name string) Step {
	return Step{"user recreates StorageClass " + name, func(context.Context) error {
		if err := c.api.Delete(Classes, "", name, nil); err != nil {
			return err
		}
		return c.createClass(name)
	}}
}

// Restorations returns the steps of administrators who restore the Secret, and the StorageClasses of claims that have no volume
// and may need the parameters of another request.
func (c *Cluster) Restorations(needed func(*corev1.PersistentVolumeClaim) bool) []Step {
	var steps []Step
	s := c.read()
	if c.lacksSecret() {
		steps = append(steps, c.disturbSecret(s)...)
	}
	for _, name := range ClassNames {
		if slices.ContainsFunc(s.claims, func(claim *corev1.PersistentVolumeClaim) bool {
			return *claim.Spec.StorageClassName == name && claim.Spec.VolumeName == "" && needed(claim)
		}) {
			steps = append(steps, c.recreateClass(name))
		}
	}
	return steps
}

// createClaim returns the step of a user who creates a claim, of a copy of source if it is not nil.
func (c *Cluster) createClaim(name, class string, source *corev1.TypedLocalObjectReference) Step {
	claim := c.newClaim(name, class, source)
	text := "user creates claim " + name
	if source != nil {
		text += fmt.Sprintf(" from %s %s", source.Kind, source.Name)
	}
	if class != "waiting" || !c.features.Topology {
		return Step{text, c.create(Claims, claim)}
	}
	return Step{text + " and its pod", func(context.Context) error {
		c.pods, c.changed = append(c.pods, Pod{name, c.firstNode()}), true
		return c.api.Create(Claims, claim)
	}}
}

func (c *Cluster) newClaim(name, class string, source *corev1.TypedLocalObjectReference) *corev1.PersistentVolumeClaim {
	meta := metav1.ObjectMeta{Namespace: Namespace, Name: name}
	return &corev1.PersistentVolumeClaim{ObjectMeta: meta, Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{c.accessMode(name)}, DataSource: source,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}}
}

// accessMode returns the access mode of the claim with that name.
func (c *Cluster) accessMode(name string) corev1.PersistentVolumeAccessMode {
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany, corev1.ReadOnlyMany, corev1.ReadWriteOnce}
	if !c.features.Shared {
		return corev1.ReadWriteOnce
	}
	return modes[int(name[len(name)-1])%len(modes)]
}

// isShared reports whether pods on several nodes may use a volume with these access modes.
func isShared(modes []corev1.PersistentVolumeAccessMode) bool {
	return modes[0] != corev1.ReadWriteOnce
}

// className returns the StorageClass of a claim.
func (c *Cluster) className(claim int) string {
	if c.features.Topology { // the first claim waits
		claim++
	}
	return ClassNames[claim%len(ClassNames)]
}

func (c *Cluster) deleteClaim(name string) error { return c.api.Delete(Claims, Namespace, name, nil) }

func (c *Cluster) deletePod(claim string) {
	c.pods, c.changed = slices.DeleteFunc(c.pods, func(p Pod) bool { return p.Claim == claim }), true
	_ = c.api.Delete(Pods, Namespace, podName(claim), nil) // it may not exist
}

// disturb returns the steps of users who change objects of others.
func (c *Cluster) disturb(s state) []Step {
	steps := []Step{c.recreateClass(ClassNames[len(s.volumes)%len(ClassNames)])}
	steps = append(steps, c.unregister()...)
	for _, pv := range s.volumes {
		if pv.DeletionTimestamp != nil { // the provisioner could not add its finalizer again
			continue
		}
		next := pv.DeepCopy()
		policy := corev1.PersistentVolumeReclaimRetain
		if pv.Spec.PersistentVolumeReclaimPolicy == policy {
			policy = corev1.PersistentVolumeReclaimDelete
		}
		next.Spec.PersistentVolumeReclaimPolicy = policy
		name := fmt.Sprintf("user sets the policy of volume %s to %s", pv.Name, policy)
		steps = append(steps, Step{name, c.update(Volumes, next)})
		mayDelete := pv.Status.Phase != corev1.VolumePending // else its claim gets another volume
		if policy == corev1.PersistentVolumeReclaimRetain {  // else the driver keeps the volume
			mayDelete = slices.Contains(pv.Finalizers, storagehelpers.PVDeletionProtectionFinalizer)
		}
		if mayDelete {
			steps = append(steps, Step{"user deletes volume " + pv.Name, func(context.Context) error {
				return c.api.Delete(Volumes, "", pv.Name, nil)
			}})
		}
	}
	for _, va := range s.attachments {
		if va.DeletionTimestamp == nil {
			steps = append(steps, Step{"user deletes " + va.Name, func(context.Context) error {
				return c.api.Delete(Attachments, "", va.Name, nil)
			}})
		}
	}
	return steps
}

// TearDown deletes all pods, claims, snapshots and their contents.
func (c *Cluster) TearDown(ctx context.Context) error {
	for _, pod := range slices.Clone(c.pods) {
		c.deletePod(pod.Claim)
	}
	s := c.read()
	for _, snapshot := range s.snapshots {
		if err := c.snapshots.VolumeSnapshots(Namespace).Delete(ctx, snapshot.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	c.deletesContents, c.changed = true, true
	for _, claim := range s.claims {
		if err := c.deleteClaim(claim.Name); err != nil && claim.DeletionTimestamp == nil {
			return err
		}
	}
	return nil
}

// Busy returns the objects that have not reached their final state: claims that are not bound, VolumeAttachments that are not
// attached, and objects that are being deleted.
func (c *Cluster) Busy() []string {
	s := c.read()
	var busy []string
	for _, claim := range s.claims {
		class := s.class(claim)
		switch {
		case c.KeepsLogicalVolume("pvc-" + string(claim.UID)): // the service waits until the node returns
		case claim.DeletionTimestamp != nil && slices.Contains(claim.Finalizers, sourceClaimFinalizer) &&
			!slices.Contains(claim.Finalizers, ProvisioningFinalizer):
			// Until its snapshots are ready, which are in the list, too.
		case claim.DeletionTimestamp != nil && slices.ContainsFunc(s.copies("PersistentVolumeClaim", claim.Name), s.hasDeletedVolume):
			// Until a user deletes the copy.
		case claim.DeletionTimestamp != nil && (c.pod(claim.Name) == nil || len(claim.Finalizers) > 1): // a pod keeps claimProtection
			busy = append(busy, "claim "+claim.Name+" is being deleted")
		case claim.DeletionTimestamp == nil && claim.Status.Phase == corev1.ClaimPending && class != nil && !waits(class, claim) &&
			s.hasSource(claim) && !s.hasDeletedVolume(claim):
			busy = append(busy, "claim "+claim.Name+" is not bound")
		case claim.Status.Phase == corev1.ClaimBound && slices.Contains(claim.Finalizers, ProvisioningFinalizer):
			busy = append(busy, "claim "+claim.Name+" still has the finalizer of its request")
		}
		if slices.Contains(claim.Finalizers, CloneFinalizer) && len(s.copies("PersistentVolumeClaim", claim.Name)) == 0 {
			busy = append(busy, "claim "+claim.Name+" still has the finalizer of a source")
		}
	}
	busy = append(busy, c.busyExpansions(s)...)
	busy = append(busy, s.busySnapshots()...)
	busy = append(busy, c.busyNodes(s)...)
	for _, pv := range s.volumes {
		policy := pv.Spec.PersistentVolumeReclaimPolicy
		lost := NodeOf(pv) != "" && c.Node(NodeOf(pv)) == nil && c.kept(s, pv, nil)
		vanishes := pv.DeletionTimestamp != nil && !slices.Contains(pv.Finalizers, storagehelpers.PVDeletionProtectionFinalizer)
		if c.features.Nodes && lost && !vanishes {
			continue // the driver may need the node to delete the volume
		}
		released := pv.Status.Phase == corev1.VolumeReleased && policy == corev1.PersistentVolumeReclaimDelete
		owner := func(claim *corev1.PersistentVolumeClaim) bool { return isUnbound(pv, claim) }
		kept := pv.Status.Phase == corev1.VolumeBound || !vanishes && slices.ContainsFunc(s.claims, owner)
		if released || pv.DeletionTimestamp != nil && !kept {
			busy = append(busy, "volume "+pv.Name+" is not deleted")
		}
	}
	for _, va := range s.attachments {
		pv := s.volume(*va.Spec.Source.PersistentVolumeName)
		switch {
		case va.DeletionTimestamp != nil:
			busy = append(busy, va.Name+" is being deleted")
		case !va.Status.Attached && pv != nil && pv.DeletionTimestamp == nil:
			busy = append(busy, va.Name+" is not attached")
		}
	}
	return busy
}
