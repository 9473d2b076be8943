// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// writeClaim applies step to the status of the claim of s. It returns false if the claim must be decided
// about again, because it was deleted or changed by another client.
func (a *attempt) writeClaim(ctx context.Context, s claimState, step step) (written bool, err error) {
	if err := a.patchClaim(ctx, s, step.claim); err != nil {
		return false, a.claimNotWritten(ctx, s, step, err)
	}
	return true, nil
}

// patchClaim applies change to the status of the claim of s, unless this process has lost its Lease: the version that it has read may then
// be that of the next leader, whose record it would overwrite. An earlier version fails, because that leader renews the record.
func (a *attempt) patchClaim(ctx context.Context, s claimState, change func(*corev1.PersistentVolumeClaim)) error {
	changed := s.claim.DeepCopy()
	change(changed)
	if err := mustNotShrink("PVC", s.claim, capacityOf(s.claim), capacityOf(changed)); err != nil {
		return err
	}
	patch, err := patchOf(s.claim, changed)
	if err != nil || patch == nil {
		return err
	}
	if err := election.MayCall(ctx); err != nil {
		return err
	}
	claims := a.t.c.deps.Client.CoreV1().PersistentVolumeClaims(s.claim.Namespace)
	stored, err := claims.Patch(ctx, s.claim.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return err
	}
	a.t.claims.Observe(stored)
	a.reads.live = stored
	for o := range operations {
		want, status := o.status(changed)
		if got, found := o.status(stored); got.key != want.key || found != status {
			return kube.ErrNotStored
		}
	}
	return nil
}

// mustNotShrink returns an error if a write would make the capacity of o smaller.
func mustNotShrink(kind string, o metav1.Object, before, after resource.Quantity) error {
	return intent.Must(after.Cmp(before) >= 0, "%s %s: its capacity would shrink from %s to %s", kind, klog.KObj(o), &before, &after)
}

// claimNotWritten handles the error of a write. It returns nil if the claim must be decided about again.
func (a *attempt) claimNotWritten(ctx context.Context, s claimState, step step, err error) error {
	if retry, err := a.retry(s, step, err); !retry {
		return err
	}
	return a.readClaim(ctx, s.claim)
}

// writeVolume applies step to the PersistentVolume of s. It returns false if the PersistentVolume must be decided about again.
func (a *attempt) writeVolume(ctx context.Context, s claimState, step step) (written bool, err error) {
	changed := s.volume.DeepCopy()
	step.volume(changed)
	least := volumeSize(s.volume)
	if a.t.c.driver.expansion == expandsNode && s.claim != nil {
		least = capacityOf(s.claim) // the node could not expand the volume to the size that was written
	}
	if err := mustNotShrink("PersistentVolume", s.volume, least, volumeSize(changed)); err != nil {
		return false, err
	}
	patch, err := patchOf(s.volume, changed)
	switch {
	case err != nil:
		return false, err
	case patch == nil && s.volumeConfirmed:
		return true, nil
	case patch == nil: // only the API server knows that nothing is to be written: the cache may be stale
		return false, a.readVolume(ctx, s.volume)
	}
	if err := election.MayCall(ctx); err != nil { // as in patchClaim
		return false, err
	}
	volumes := a.t.c.deps.Client.CoreV1().PersistentVolumes()
	stored, err := volumes.Patch(ctx, s.volume.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err == nil {
		a.t.volumes.Observe(stored)
		return true, nil
	}
	if retry, err := a.retry(s, step, err); !retry {
		return false, err
	}
	return false, a.readVolume(ctx, s.volume)
}

// readVolume reads pv from the API server: the cache may be stale.
func (a *attempt) readVolume(ctx context.Context, pv *corev1.PersistentVolume) error {
	if _, _, err := a.t.volumes.Refetch(ctx, a.t.c.deps.Client.CoreV1().PersistentVolumes(), pv); err != nil {
		return fmt.Errorf("reading PersistentVolume %q: %w", pv.Name, err)
	}
	return nil
}

// retry reports whether a write that failed with err must be decided about again with the current object:
// it was deleted, recreated, or changed by another client. Otherwise it returns err, and sends an event unless
// the same write was refused for the same reason before. Texts may contain numbers that differ every time.
func (a *attempt) retry(s claimState, step step, err error) (bool, error) {
	switch {
	case kube.IsNotFound(err):
		return true, nil
	case apierrors.IsConflict(err):
		a.conflicts++
		if a.conflicts > maxConflicts {
			return false, fmt.Errorf("%w: %w", errConflicts, err)
		}
		return true, nil
	}
	refused := failure{step.action.String(), string(apierrors.ReasonForError(err)), err.Error(), s.now}
	if s.claim != nil && isResponse(err) && !a.t.ledger.Get(a.key).Payload.refused.covers(refused) {
		a.remember(0, func(m *operationMemory) { m.refused = refused })
		a.t.event(s.claim, refusedEvent(a.key.Operation, s, step, err))
	}
	return false, err
}

// isResponse reports whether err is the response of the API server, or of a webhook, to the content of a write, or to a part of it: no lost
// connection, and the object was neither deleted nor changed. Unlike [kube.IsRefused], it includes what a retry alone may help against.
func isResponse(err error) bool {
	return errors.Is(err, kube.ErrNotStored) ||
		apierrors.ReasonForError(err) != metav1.StatusReasonUnknown && !kube.IsNotFound(err) && !apierrors.IsConflict(err)
}
