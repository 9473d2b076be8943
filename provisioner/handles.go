// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
)

// volumeUsers finds objects that name the same volume. A driver may return one volume for two claims, and an administrator may create
// a second PersistentVolume for a volume: deleting one must not delete the data of the other.
//
// It knows what the watch has delivered and what this process has written. It cannot know a PersistentVolume that another program
// creates while the watch lags behind: the API has no request for the PersistentVolumes of a volume.
type volumeUsers struct {
	driver  driver
	volumes *kube.TermCache[*corev1.PersistentVolume]
	ops     *operations
}

// others returns the PersistentVolumes with another name that are for the volume of pv, by name.
func (u volumeUsers) others(pv *corev1.PersistentVolume) []*corev1.PersistentVolume {
	var others []*corev1.PersistentVolume
	for _, handle := range migration.Handles(u.driver.name, pv) {
		for _, other := range u.volumes.ByIndex(kube.ByHandle, kube.Bucket(handle)) {
			known := slices.ContainsFunc(others, func(o *corev1.PersistentVolume) bool { return o.Name == other.Name })
			if other.Name != pv.Name && !known && u.driver.isVolume(other, pv) {
				others = append(others, other)
			}
		}
	}
	slices.SortFunc(others, func(a, b *corev1.PersistentVolume) int { return strings.Compare(a.Name, b.Name) })
	return others
}

// ofCreated returns the object that the volume which CreateVolume has returned for a claim belongs to, "" for none.
func (u volumeUsers) ofCreated(key claimKey, o operation) string {
	if holder, held := u.ops.holderOf(o.handle); held && holder != key {
		return "claim " + holder.String()
	}
	for _, other := range u.others(o.pv) {
		return describe(other)
	}
	return ""
}

// ofReleased returns the object that needs the volume of pv, which is to be deleted, "" for none. Those whose volume is to be deleted,
// too, do not.
func (u volumeUsers) ofReleased(pv *corev1.PersistentVolume) string {
	for _, other := range u.others(pv) {
		if !isReleased(other) {
			return describe(other)
		}
	}
	if handle, _, ok := migration.HandleOf(u.driver.name, pv); ok {
		if holder, held := u.ops.holderOf(handle); held {
			return "claim " + holder.String()
		}
	}
	return ""
}

// existingPV returns the PersistentVolume that has the name of the one to create, if it is
// for the same volume and claim. Otherwise it returns what follows for the operation.
func (l *claimLoop) existingPV(ctx context.Context, client kubernetes.Interface, o operation) (*corev1.PersistentVolume, change, error) {
	name, handle := o.pv.Name, o.handle
	pv, err := client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	if err != nil { // also NotFound: it was deleted meanwhile
		return nil, pvNotSaved(kube.IsNotFound(err), false), fmt.Errorf("reading PersistentVolume %q, which already exists: %w", name, err)
	}
	same, ours := l.c.driver.isVolume(pv, o.pv), isVolumeOf(o.claim, pv)
	switch {
	case same && ours && (o.pvMayExist || !isReclaimed(pv, o.claim)):
		return pv, change{}, nil // as if the response had arrived: what follows its deletion is the same
	case same && ours:
		// Its volume is deleted with it. CreateVolume is repeated once it is.
		l.volumes.Observe(pv)
		err = fmt.Errorf("PersistentVolume %q of an earlier attempt is being deleted; waiting for its deletion", name)
		return nil, outcomeUnknown(), err
	case same:
		// Two claims have one volume name: the volume is that of the other claim.
		err = fmt.Errorf("volume %q belongs to PersistentVolume %q, which is not for this PVC. %s", handle, name, namesCollide)
		c, err := l.c.keep(o, err)
		return nil, c, err
	}
	err = fmt.Errorf("PersistentVolume %q already exists with another volumeHandle than %q", name, handle)
	return nil, volumeRejected(handle, o.pv, err), err
}

// ownerOfRejected returns the object that a rejected volume belongs to, "" for none: a
// PersistentVolume, or another claim with the same volume name. A driver that returns one
// volume for two claims, or contradicts itself, must not cause its deletion.
func (l *claimLoop) ownerOfRejected(ctx context.Context, key claimKey, o operation) (string, error) {
	pv, err := l.c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, o.plan.VolumeName, metav1.GetOptions{})
	switch {
	case err == nil && (migration.IsInTree(pv) || l.c.driver.isVolume(pv, o.pv)):
		// In-tree counts as equal: the two sources may have no common handle, as those of vSphere.
		return fmt.Sprintf("PersistentVolume %q", pv.Name), nil
	case err != nil && !kube.IsNotFound(err):
		return "", fmt.Errorf("reading PersistentVolume %q before deleting volume %q: %w", o.plan.VolumeName, o.handle, err)
	}
	if other, found := l.ops.sameVolume(key, o); found {
		return "claim " + other.String(), nil
	}
	complete := l.volumes.Complete() // before the cache is read
	others := l.users.others(o.pv)
	if !complete && len(others) == 0 {
		others, err = kube.ListAll[*corev1.PersistentVolume](ctx, l.c.deps.Client.CoreV1().PersistentVolumes().List)
		if err != nil {
			return "", fmt.Errorf("listing PersistentVolumes before deleting volume %q: %w", o.handle, err)
		}
	}
	for _, pv := range others {
		if l.c.driver.isVolume(pv, o.pv) {
			return fmt.Sprintf("PersistentVolume %q", pv.Name), nil
		}
	}
	return "", nil
}

// isReleased reports whether the volume of pv is to be deleted.
func isReleased(pv *corev1.PersistentVolume) bool {
	return pv.Status.Phase == corev1.VolumeReleased && reclaims(pv)
}

func describe(pv *corev1.PersistentVolume) string {
	return fmt.Sprintf("PersistentVolume %q (%s, %s)", pv.Name, pv.Status.Phase, pv.Spec.PersistentVolumeReclaimPolicy)
}

// isVolume reports whether a and b are for the same volume.
// Drivers that work on one node may return the same ID on several nodes: also a volume that this node reaches counts as equal,
// because a webhook or the driver may have changed the affinity.
func (d driver) isVolume(a, b *corev1.PersistentVolume) bool {
	return migration.SameVolume(d.name, a, b) &&
		(!d.NodeDeployment || equality.Semantic.DeepEqual(a.Spec.NodeAffinity, b.Spec.NodeAffinity) || len(d.segments) > 0 && d.reaches(a))
}
