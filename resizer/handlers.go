// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// register adds the event handlers that fill the queue.
func (t *term) register() {
	t.registrations.Add(t.c.claims.Handle(kube.Handlers[*corev1.PersistentVolumeClaim]{
		Add:    func(claim *corev1.PersistentVolumeClaim) { t.enqueue(claim, t.queue.Add) },
		Update: t.claimUpdated, Delete: t.claimDeleted,
	}))
	t.registrations.Add(t.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{
		Add: t.volumeAdded, Update: t.volumeUpdated,
	}))
	if users := t.c.users.Load(); users != nil { // since an earlier term
		t.handleUsers(users)
	}
}

// enqueue passes the keys of the operations that claim may need to add.
func (t *term) enqueue(claim *corev1.PersistentVolumeClaim, add func(key)) {
	pv, ok := t.c.volumes.Get(claim.Spec.VolumeName)
	if !ok {
		return // its Add event enqueues claim
	}
	for o := range operations {
		if t.c.driver.mayNeed(o, claim, pv) {
			add(keyOf(claim, o))
		}
	}
}

// enqueueAll passes the keys of all unfinished operations to add.
func (t *term) enqueueAll(add func(key)) {
	for _, claim := range t.c.claims.List() {
		t.enqueue(claim, add)
	}
}

// claimUpdated enqueues the operations that claim needs. What the resizer writes does not end a back-off. A new request begins without the
// failures of the previous one.
func (t *term) claimUpdated(old, claim *corev1.PersistentVolumeClaim) {
	if old.UID != claim.UID { // deleted and recreated while the watch was interrupted
		t.claimDeleted(old)
	}
	pv, ok := t.c.volumes.Get(claim.Spec.VolumeName)
	if !ok {
		return
	}
	renew := func(o operation, requested, status bool) {
		switch needed := t.c.driver.mayNeed(o, claim, pv); {
		// The operation is new: the claim was bound, or an earlier leader began it while the watch was interrupted.
		case needed && (requested || status || !t.c.driver.mayNeed(o, old, pv)):
			if requested {
				t.queue.Forget(keyOf(claim, o))
			}
			t.queue.Add(keyOf(claim, o))
		case needed:
			t.queue.Resync(keyOf(claim, o)) // a failed call keeps its back-off
		}
	}
	size, capacity := requestedSize(claim), capacityOf(claim)
	renew(expand, size.Cmp(requestedSize(old)) != 0, capacity.Cmp(capacityOf(old)) != 0 || isNewsOfNode(old, claim))
	renew(modify, requestedClass(old) != requestedClass(claim), currentClass(old) != currentClass(claim))
}

// isNewsOfNode reports whether another component than the resizer has changed the status of the
// expansion. The resizer writes the statuses of the controller, and NodeResizePending.
func isNewsOfNode(old, claim *corev1.PersistentVolumeClaim) bool {
	status := resizeStatus(claim)
	switch status {
	case controllerInProgress, controllerInfeasible, nodePending:
		return false
	}
	return status != resizeStatus(old)
}

func (t *term) claimDeleted(claim *corev1.PersistentVolumeClaim) {
	for o := range operations {
		k := keyOf(claim, o)
		if t.ledger.Get(k) != (call{}) { // the sync forgets it, after its last write
			t.queue.Add(k)
		} else {
			t.queue.Forget(k)
		}
	}
}

// volumeAdded enqueues the claim of a PersistentVolume that was created. A failed call may have known it before this event arrived,
// and keeps its back-off.
func (t *term) volumeAdded(pv *corev1.PersistentVolume) {
	if claim, ok := t.claimOf(pv); ok {
		t.enqueue(claim, t.queue.Resync)
	}
}

func (t *term) claimOf(pv *corev1.PersistentVolume) (*corev1.PersistentVolumeClaim, bool) {
	ref := pv.Spec.ClaimRef
	if ref == nil {
		return nil, false
	}
	return t.c.claims.Get(ref.Namespace + "/" + ref.Name)
}

func (t *term) volumeUpdated(old, pv *corev1.PersistentVolume) {
	claim, ok := t.claimOf(pv)
	switch {
	case !ok:
		return
	case old.UID != pv.UID || claimUID(old) != claimUID(pv) || isCorrected(old, pv):
		t.enqueue(claim, t.queue.Add)
		return
	}
	// The node may have completed the expansion before the watch delivered the record to remove.
	if _, had := old.Annotations[annPreResize]; had {
		return
	}
	if t.c.driver.owns(claim, pv) && isRecordObsolete(claim, pv) {
		t.queue.Add(keyOf(claim, expand))
	}
}

// isCorrected reports whether pv differs from old in a field on which requests depend and that users can change.
func isCorrected(old, pv *corev1.PersistentVolume) bool {
	secret := func(pv *corev1.PersistentVolume) *corev1.SecretReference {
		return ptr.Deref(pv.Spec.CSI, corev1.CSIPersistentVolumeSource{}).ControllerExpandSecretRef
	}
	same := func(annotation string) bool { return old.Annotations[annotation] == pv.Annotations[annotation] }
	return !ptr.Equal(secret(old), secret(pv)) ||
		!same(volumerules.AnnModifySecretName) || !same(volumerules.AnnModifySecretNamespace) ||
		!slices.Equal(old.Spec.AccessModes, pv.Spec.AccessModes) || !slices.Equal(old.Spec.MountOptions, pv.Spec.MountOptions) ||
		migration.IsInTree(pv) && (!maps.Equal(old.Labels, pv.Labels) || !same(storagehelpers.AnnMigratedTo))
}

func claimUID(pv *corev1.PersistentVolume) types.UID {
	return ptr.Deref(pv.Spec.ClaimRef, corev1.ObjectReference{}).UID
}
