// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/snapshotter"
)

// Finalizers of the snapshot-controller, besides that of contents.
const (
	asSourceFinalizer    = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection"
	boundFinalizer       = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
	sourceClaimFinalizer = "snapshot.storage.kubernetes.io/pvc-as-source-protection"
)

// snapshotPolicies are the policies of the VolumeSnapshotClasses, which have the same names.
var snapshotPolicies = []snapshotv1.DeletionPolicy{snapshotv1.VolumeSnapshotContentDelete, snapshotv1.VolumeSnapshotContentRetain}

func className(policy snapshotv1.DeletionPolicy) string {
	return map[snapshotv1.DeletionPolicy]string{"Delete": "deleted", "Retain": "retained"}[policy]
}

func (c *Cluster) createSnapshotClass(ctx context.Context, policy snapshotv1.DeletionPolicy) error {
	c.classes++
	class := &snapshotv1.VolumeSnapshotClass{
		ObjectMeta: metav1.ObjectMeta{Name: className(policy)}, Driver: c.driver, DeletionPolicy: policy,
		Parameters: c.withSecret(map[string]string{"generation": strconv.Itoa(c.classes)}, "snapshotter-"),
	}
	_, err := c.snapshots.VolumeSnapshotClasses().Create(ctx, class, metav1.CreateOptions{})
	return err
}

// ContentName returns the name of the content of a VolumeSnapshot with that UID.
func ContentName(uid types.UID) string { return "snapcontent-" + string(uid) }

// content returns the content of snapshot, or nil.
func (s state) content(snapshot *snapshotv1.VolumeSnapshot) *snapshotv1.VolumeSnapshotContent {
	for _, content := range s.contents {
		if content.Name == ContentName(snapshot.UID) {
			return content
		}
	}
	return nil
}

// snapshot returns the steps of the snapshot-controller.
func (c *Cluster) snapshot(s state) []Step {
	var steps []Step
	for _, content := range s.contents {
		if content.DeletionTimestamp == nil && !slices.Contains(content.Finalizers, snapshotter.Finalizer) {
			op := patchOp{"add", "/metadata/finalizers", []string{snapshotter.Finalizer}}
			steps = append(steps, c.patchContent("protects content "+content.Name, content.Name, op))
		}
	}
	for _, snapshot := range s.snapshots {
		step, ok := c.syncSnapshot(s, snapshot)
		if snapshot.DeletionTimestamp != nil {
			step, ok = c.releaseSnapshot(s, snapshot)
		}
		if ok {
			steps = append(steps, step)
		}
	}
	for _, claim := range s.claims {
		isSource := func(snapshot *snapshotv1.VolumeSnapshot) bool {
			return *snapshot.Spec.Source.PersistentVolumeClaimName == claim.Name && !isReady(snapshot)
		}
		if slices.Contains(claim.Finalizers, sourceClaimFinalizer) && !slices.ContainsFunc(s.snapshots, isSource) {
			next := claim.DeepCopy()
			next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == sourceClaimFinalizer })
			steps = append(steps, Step{"snapshot-controller releases claim " + claim.Name, c.update(Claims, next)})
		}
	}
	return steps
}

func isReady(snapshot *snapshotv1.VolumeSnapshot) bool {
	return snapshot.Status != nil && ptr.Deref(snapshot.Status.ReadyToUse, false)
}

// patchOp is an operation of a JSON patch.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func (c *Cluster) patchContent(what, name string, op patchOp) Step {
	return Step{"snapshot-controller " + what, func(ctx context.Context) error {
		data, err := json.Marshal([]patchOp{op})
		if err == nil {
			_, err = c.snapshots.VolumeSnapshotContents().Patch(ctx, name, types.JSONPatchType, data, metav1.PatchOptions{})
		}
		return err
	}}
}

func (c *Cluster) updateFinalizers(what string, snapshot *snapshotv1.VolumeSnapshot, finalizers []string) Step {
	next := snapshot.DeepCopy()
	next.Finalizers = finalizers
	return Step{"snapshot-controller " + what + " snapshot " + snapshot.Name, func(ctx context.Context) error {
		_, err := c.snapshots.VolumeSnapshots(Namespace).Update(ctx, next, metav1.UpdateOptions{})
		return err
	}}
}

// syncSnapshot returns the next step for a snapshot that is not being deleted.
func (c *Cluster) syncSnapshot(s state, snapshot *snapshotv1.VolumeSnapshot) (Step, bool) {
	content := s.content(snapshot)
	wanted := []string{asSourceFinalizer}
	bound := snapshot.Status != nil && snapshot.Status.BoundVolumeSnapshotContentName != nil
	if content != nil && bound && content.Spec.DeletionPolicy == snapshotv1.VolumeSnapshotContentDelete {
		wanted = append(wanted, boundFinalizer)
	}
	finalizers := slices.Clone(snapshot.Finalizers)
	for _, f := range wanted {
		if !slices.Contains(finalizers, f) {
			finalizers = append(finalizers, f)
		}
	}
	switch {
	case len(finalizers) > len(snapshot.Finalizers):
		return c.updateFinalizers("protects", snapshot, finalizers), true
	case content == nil:
		return c.createContent(s, snapshot)
	case isReady(snapshot) && bound:
		return Step{}, false
	}
	next := snapshot.DeepCopy()
	next.Status = statusOf(snapshot.Status, content)
	if equality.Semantic.DeepEqual(next.Status, snapshot.Status) {
		return Step{}, false
	}
	return Step{"snapshot-controller updates the status of snapshot " + snapshot.Name, func(ctx context.Context) error {
		_, err := c.snapshots.VolumeSnapshots(Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
		return err
	}}, true
}

// statusOf returns the status of a snapshot with the status old for that of its content.
func statusOf(old *snapshotv1.VolumeSnapshotStatus, content *snapshotv1.VolumeSnapshotContent) *snapshotv1.VolumeSnapshotStatus {
	from, next := ptr.Deref(content.Status, snapshotv1.VolumeSnapshotContentStatus{}), old.DeepCopy()
	if next == nil {
		next = &snapshotv1.VolumeSnapshotStatus{}
	}
	next.BoundVolumeSnapshotContentName = &content.Name
	next.ReadyToUse = ptr.To(ptr.Deref(from.ReadyToUse, false))
	next.Error = from.Error
	if next.CreationTime == nil && from.CreationTime != nil {
		next.CreationTime = ptr.To(metav1.NewTime(time.Unix(0, *from.CreationTime).Truncate(time.Second)))
	}
	if next.RestoreSize == nil && from.RestoreSize != nil {
		next.RestoreSize = resource.NewQuantity(*from.RestoreSize, resource.BinarySI)
	}
	return next
}

// createContent returns the next step towards the content of snapshot: it protects the claim, and creates the content.
func (c *Cluster) createContent(s state, snapshot *snapshotv1.VolumeSnapshot) (Step, bool) {
	claim := s.claim(*snapshot.Spec.Source.PersistentVolumeClaimName)
	if claim == nil {
		return Step{}, false
	}
	if !slices.Contains(claim.Finalizers, sourceClaimFinalizer) {
		next := claim.DeepCopy()
		next.Finalizers = append(next.Finalizers, sourceClaimFinalizer)
		return Step{"snapshot-controller protects claim " + claim.Name, c.update(Claims, next)}, claim.DeletionTimestamp == nil
	}
	pv, policy := s.volume(claim.Spec.VolumeName), snapshotv1.VolumeSnapshotContentDelete
	if pv == nil || claim.Status.Phase != corev1.ClaimBound || pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID {
		return Step{}, false
	}
	if *snapshot.Spec.VolumeSnapshotClassName == className(snapshotv1.VolumeSnapshotContentRetain) {
		policy = snapshotv1.VolumeSnapshotContentRetain
	}
	content := &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: ContentName(snapshot.UID), Annotations: c.contentAnnotations()},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{
				APIVersion: snapshotv1.SchemeGroupVersion.String(), Kind: "VolumeSnapshot", Namespace: Namespace, Name: snapshot.Name,
				UID: snapshot.UID, ResourceVersion: snapshot.ResourceVersion,
			},
			Source:                  snapshotv1.VolumeSnapshotContentSource{VolumeHandle: &pv.Spec.CSI.VolumeHandle},
			VolumeSnapshotClassName: snapshot.Spec.VolumeSnapshotClassName, DeletionPolicy: policy, Driver: c.driver,
			SourceVolumeMode: pv.Spec.VolumeMode,
		},
	}
	return Step{"snapshot-controller creates the content of snapshot " + snapshot.Name, func(ctx context.Context) error {
		_, err := c.snapshots.VolumeSnapshotContents().Create(ctx, content, metav1.CreateOptions{})
		return err
	}}, true
}

// restored reports whether a pending claim that match selects is to be restored from a snapshot.
func (s state) restored(snapshot *snapshotv1.VolumeSnapshot, match func(*corev1.PersistentVolumeClaim) bool) bool {
	return slices.ContainsFunc(s.copies("VolumeSnapshot", snapshot.Name), match)
}

// releaseSnapshot returns the next step for a snapshot that is being deleted. There is none while a claim is restored from it.
func (c *Cluster) releaseSnapshot(s state, snapshot *snapshotv1.VolumeSnapshot) (Step, bool) {
	if s.restored(snapshot, func(*corev1.PersistentVolumeClaim) bool { return true }) {
		return Step{}, false
	}
	content, kept := s.content(snapshot), ""
	if content != nil && content.Spec.DeletionPolicy == snapshotv1.VolumeSnapshotContentDelete {
		kept = boundFinalizer
	}
	if content != nil && !metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingDeleted) {
		annotated := content.DeepCopy()
		if kept != "" && c.classes == len(snapshotPolicies) && !c.lacksSecret() {
			// The cache has no write of the snapshotter, which can repeat the request.
			annotated.Annotations = c.contentAnnotations()
		}
		metav1.SetMetaDataAnnotation(&annotated.ObjectMeta, snapshotter.AnnBeingDeleted, "yes")
		op := patchOp{"replace", "/metadata/annotations", annotated.Annotations}
		return c.patchContent("releases the deletion of content "+content.Name, content.Name, op), true
	}
	if kept != "" && content.DeletionTimestamp == nil {
		return Step{"snapshot-controller deletes content " + content.Name, func(ctx context.Context) error {
			return c.snapshots.VolumeSnapshotContents().Delete(ctx, content.Name, metav1.DeleteOptions{})
		}}, true
	}
	finalizers := slices.DeleteFunc(slices.Clone(snapshot.Finalizers), func(f string) bool {
		return f != kept && (f == asSourceFinalizer || f == boundFinalizer)
	})
	return c.updateFinalizers("releases", snapshot, finalizers), len(finalizers) < len(snapshot.Finalizers)
}

// deleteContents returns the steps of an administrator who deletes what deleted snapshots have left. A snapshot stays
// while a claim is restored from it.
func (c *Cluster) deleteContents(s state) []Step {
	if !c.deletesContents {
		return nil
	}
	var steps []Step
	for _, content := range s.contents {
		isOf := func(o *snapshotv1.VolumeSnapshot) bool { return o.UID == content.Spec.VolumeSnapshotRef.UID }
		if content.DeletionTimestamp == nil && !slices.ContainsFunc(s.snapshots, isOf) {
			steps = append(steps, Step{"administrator deletes content " + content.Name, func(ctx context.Context) error {
				return c.snapshots.VolumeSnapshotContents().Delete(ctx, content.Name, metav1.DeleteOptions{})
			}})
		}
	}
	return steps
}

// userTakesSnapshots returns the steps of users who create and delete a snapshot of each claim.
func (c *Cluster) userTakesSnapshots(s state, claims int) []Step {
	if !c.features.Snapshots {
		return nil
	}
	var steps []Step
	client := c.snapshots.VolumeSnapshots(Namespace)
	for i := range claims {
		claim, name, class := fmt.Sprintf("c%d", i), fmt.Sprintf("s%d", i), className(snapshotPolicies[i%2])
		n := slices.IndexFunc(s.snapshots, func(o *snapshotv1.VolumeSnapshot) bool { return o.Name == name })
		switch {
		case n < 0:
			snapshot := &snapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: snapshotv1.VolumeSnapshotSpec{
				Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: &claim}, VolumeSnapshotClassName: &class,
			}}
			steps = append(steps, Step{"user creates snapshot " + name + " of claim " + claim, func(ctx context.Context) error {
				_, err := client.Create(ctx, snapshot, metav1.CreateOptions{})
				return err
			}})
		case s.snapshots[n].DeletionTimestamp == nil:
			steps = append(steps, Step{"user deletes snapshot " + name, func(ctx context.Context) error {
				return client.Delete(ctx, name, metav1.DeleteOptions{})
			}})
		}
	}
	return steps
}

// disturbSnapshots returns the steps of administrators who change contents and classes.
func (c *Cluster) disturbSnapshots(s state) []Step {
	if !c.features.Snapshots {
		return nil
	}
	var steps []Step
	policy := snapshotPolicies[c.classes%2]
	if !slices.ContainsFunc(s.contents, isUnrecorded) { // the class has the request of an unrecorded one
		steps = append(steps, Step{"user recreates VolumeSnapshotClass " + className(policy) + " with other parameters",
			func(ctx context.Context) error {
				if err := c.snapshots.VolumeSnapshotClasses().Delete(ctx, className(policy), metav1.DeleteOptions{}); err != nil {
					return err
				}
				return c.createSnapshotClass(ctx, policy)
			}})
	}
	contents := c.snapshots.VolumeSnapshotContents()
	for _, content := range s.contents {
		if content.DeletionTimestamp == nil {
			steps = append(steps, Step{"user deletes content " + content.Name, func(ctx context.Context) error {
				return contents.Delete(ctx, content.Name, metav1.DeleteOptions{})
			}})
		}
		next := content.DeepCopy()
		next.Spec.DeletionPolicy = snapshotv1.VolumeSnapshotContentRetain
		if content.Spec.DeletionPolicy == next.Spec.DeletionPolicy {
			next.Spec.DeletionPolicy = snapshotv1.VolumeSnapshotContentDelete
		}
		name := fmt.Sprintf("user sets the policy of content %s to %s", content.Name, next.Spec.DeletionPolicy)
		steps = append(steps, Step{name, func(ctx context.Context) error {
			_, err := contents.Update(ctx, next, metav1.UpdateOptions{})
			return err
		}})
	}
	return steps
}

// busySnapshots returns the snapshots and contents that have not reached their final state.
func (s state) busySnapshots() []string {
	var busy []string
	for _, snapshot := range s.snapshots {
		content := s.content(snapshot)
		switch {
		case snapshot.DeletionTimestamp != nil && s.restored(snapshot, func(claim *corev1.PersistentVolumeClaim) bool {
			return claim.DeletionTimestamp == nil && !slices.Contains(claim.Finalizers, ProvisioningFinalizer)
		}): // until a user deletes the claim, which came too late
		case snapshot.DeletionTimestamp != nil:
			busy = append(busy, "snapshot "+snapshot.Name+" is being deleted")
		case !isReady(snapshot) && content != nil && content.DeletionTimestamp == nil:
			busy = append(busy, "snapshot "+snapshot.Name+" is not ready")
		case slices.Contains(snapshot.Finalizers, RestoreFinalizer) && len(s.copies("VolumeSnapshot", snapshot.Name)) == 0:
			busy = append(busy, "snapshot "+snapshot.Name+" still has the finalizer of a source")
		}
	}
	for _, content := range s.contents {
		ready := content.Status != nil && ptr.Deref(content.Status.ReadyToUse, false)
		switch {
		case content.DeletionTimestamp != nil && metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingDeleted):
			busy = append(busy, "content "+content.Name+" is being deleted")
		case ready && metav1.HasAnnotation(content.ObjectMeta, snapshotter.AnnBeingCreated):
			busy = append(busy, "content "+content.Name+" still has an annotation of its creation")
		}
	}
	return busy
}
