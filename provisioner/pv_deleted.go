// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"cmp"
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// refetchClaim reads a claim whose PersistentVolume was deleted: the cache may not show yet that the claim was bound, or deleted. Of an
// answered call, the creation of the PersistentVolume got no response, and its volume may be deleted, too: CreateVolume is repeated,
// unless the claim is deleted or bound.
func (l *claimLoop) refetchClaim(ctx context.Context, key claimKey, s claimState) (change, error) {
	claim, answered := cmp.Or(s.claim, s.call.Payload.claim), s.call.State == intent.Answered
	live, exists, err := l.claims.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), claim)
	switch {
	case err != nil:
		return change{}, fmt.Errorf("reading claim %s, whose PersistentVolume was deleted: %w", key, err)
	case !answered && !exists:
		return change{}, nil
	case !answered:
		return claimRefetched(live.Spec.VolumeName != ""), nil
	case !exists || live.DeletionTimestamp != nil || live.Spec.VolumeName != "": // as if the response had arrived
		return noVolume(nil), nil
	}
	return outcomeUnknown(), nil
}

// volumeDeleted wakes the claim of a PersistentVolume that was deleted before the claim was bound to it.
func (l *claimLoop) volumeDeleted(pv *corev1.PersistentVolume) {
	ref := pv.Spec.ClaimRef
	if ref == nil {
		return
	}
	claim, ok := l.claims.Get(ref.Namespace + "/" + ref.Name)
	exists := ok && claim.UID == ref.UID && claim.Spec.VolumeName == "" && kube.ClaimHandledBy(l.c.driver.name, claim)
	if key := (claimKey{ref.Namespace, ref.Name, ref.UID}); l.ops.pvDeleted(key, exists) {
		l.queue.Add(key)
	}
}

// pvDeleted records that the PersistentVolume of a claim was deleted, and reports whether the claim must be read again.
// exists reports whether the cache has the claim without a volume: an earlier leader may have created the PersistentVolume.
func (o *operations) pvDeleted(key claimKey, exists bool) (read bool) {
	known := o.Update(key, func(s intent.State, op *operation) {
		// Of an answered call, the response to its creation has not arrived yet.
		read = s == intent.Answered || !s.InProgress()
		op.pvDeleted = read
	})
	if !known && exists {
		_, _, _ = o.Apply(key, change{Set: func(op *operation) { op.pvDeleted = true }}) // no event: never illegal
		return true
	}
	return read
}

// lostPV reports whether the PersistentVolume of an answered call was deleted although its creation got no response. The volume may be
// deleted with it: it gets no other one.
func (o operation) lostPV() bool { return o.pvMayExist && o.pvDeleted }

// claimRefetched follows the deletion of a saved PersistentVolume.
func claimRefetched(bound bool) change {
	c := change{Set: func(o *operation) { o.handle, o.pvDeleted, o.saved = "", false, o.saved && bound }}
	if !bound {
		c.Event = intent.Reset
	}
	return c
}
