// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

var (
	errNoVolume = errors.New("CreateVolumeResponse has no volume, or a volume without an ID; this is a driver bug")
	// errUnusable means that the volume must be deleted.
	errUnusable = errors.New("the volume that the driver created cannot be used")
)

// slowCall is the duration of a call after which the event Provisioning is sent.
const slowCall = time.Second

// createVolume calls CreateVolume and returns what its outcome means.
func (l *claimLoop) createVolume(ctx context.Context, key claimKey, s claimState) (change, error) {
	o, again := s.call.Payload, s.call.State == intent.Answered
	if err := pressure.Enter(ctx, "CreateVolume", o.plan.ClassName+"/"+o.plan.SelectedNode); err != nil {
		return change{}, err
	}
	slow := time.AfterFunc(slowCall, func() { l.announce(key, o) })
	defer slow.Stop()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, o.plan.Migrated), l.c.cfg.Timeout)
	defer cancel()
	if err := l.ops.Send(ctx, key, s.call.Args, l.c.driver.mayBeFirst(s)); err != nil {
		return change{}, err
	}
	response, err := l.c.deps.CSI.CreateVolume(call, o.request)
	if err != nil {
		l.c.notProvisioned(o)
		if again {
			return l.notRepeated(o, err)
		}
		if csiclient.OutcomeOf(err) == csiclient.Indeterminate {
			return l.indeterminate(key, s, err)
		}
		if o.resumed != "" && time.Since(l.began) < l.c.deps.LateAfter {
			return l.indeterminate(key, s, fmt.Errorf("%w. The call of an earlier process may still take effect", err))
		}
		return l.finalError(key, s, err)
	}
	volume := response.GetVolume()
	klog.FromContext(ctx).V(3).Info("Volume created", "volume", volume)
	handle, pv := volume.GetVolumeId(), l.c.driver.volumeOf(o, volume)
	created := pv
	err = checkVolume(o, volume)
	if err == nil && o.plan.Migrated {
		created, err = migration.ToInTree(pv)
		if err != nil {
			err = fmt.Errorf("%w: %w", errUnusable, err)
		}
	}
	switch {
	case errors.Is(err, errUnusable):
		return volumeRejected(handle, pv, err), nil
	case err != nil && again:
		return l.notRepeated(o, err)
	case err != nil:
		l.c.notProvisioned(o)
		return l.indeterminate(key, s, err)
	case again && handle != o.handle:
		klog.FromContext(ctx).Error(nil, "CreateVolume returned another volume than before. Delete the earlier one on the storage backend",
			"earlier", o.handle, "volumeHandle", handle)
	}
	// kube-controller-manager decides whether its in-tree plugin attaches an in-tree volume.
	if l.c.deps.VolumeFinalizers != nil && !o.plan.Migrated {
		created.Finalizers = append(created.Finalizers, l.c.deps.VolumeFinalizers()...)
	}
	requested := o.request.GetCapacityRange().GetRequiredBytes()
	if warning := volumerules.CapacityWarning("CreateVolume", handle, volume.GetCapacityBytes(), requested); warning != "" {
		l.c.event(o.claim, event{corev1.EventTypeWarning, reasonUnlikelyCapacity, warning})
	}
	return volumeCreated(handle, created), nil
}

// notRepeated reports that a repeated CreateVolume has failed. The volume of the earlier response exists, whatever the driver says.
func (l *claimLoop) notRepeated(o operation, err error) (change, error) {
	l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
	return pvNotSaved(false, true), err
}

// notProvisioned makes the capacity role call GetCapacity again for the StorageClass.
func (c *Controller) notProvisioned(o operation) {
	if c.deps.VolumeObserver != nil {
		c.deps.VolumeObserver.VolumeNotProvisioned(o.plan.ClassName)
	}
}

// indeterminate reports a call after which a volume may exist, now or later.
func (l *claimLoop) indeterminate(key claimKey, s claimState, err error) (change, error) {
	o := s.call.Payload
	l.announce(key, o)
	l.c.claimFailed(o.claim, indeterminateEvent(o.plan, l.c.cfg.ProvisioningProtection, s.claim, s.classRecreated(), err))
	return outcomeUnknown(), err
}

// finalError reports a call after which no volume exists and none will, as csi-provisioner decides it. A driver may have made the
// volume in an earlier call and fail before it finds it: the event names the volume.
func (l *claimLoop) finalError(key claimKey, s claimState, err error) (change, error) {
	o := s.call.Payload
	l.announce(key, o)
	if s.call.State == intent.Unknown && !csiclient.ExcludesEarlier(err) {
		err = fmt.Errorf("%w. An earlier call had no definite result. If you delete this PVC, check on the storage backend that "+
			"volume %q does not exist", err, o.plan.VolumeName)
	}
	if status.Code(err) != codes.InvalidArgument || s.claim == nil || s.class == nil || s.classRecreated() {
		l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
		return noVolume(nil), err
	}
	delay := l.c.cfg.RetryIntervalMax
	l.c.claimFailed(o.claim, infeasibleEvent(o.plan.ClassName, delay, err))
	return noVolume(&infeasible{time.Now().Add(delay), o.claim, o.class}), nil
}

// deleteRejected deletes a volume that was created and cannot be used, unless it belongs to another object.
func (l *claimLoop) deleteRejected(ctx context.Context, key claimKey, o operation) (change, error) {
	if err := pressure.Enter(ctx, "DeleteVolume", o.plan.ClassName); err != nil {
		return change{}, err
	}
	id := o.handle
	release, err := l.c.deps.Locks.Share(ctx, id) // may wait
	if err != nil {
		return change{}, err
	}
	defer release()
	read := election.Now()
	owner, err := l.ownerOfRejected(ctx, key, o)
	switch {
	case err != nil:
		return change{}, err
	case owner != "":
		return l.c.keep(o, fmt.Errorf("%w; it is not deleted, because it belongs to %s", o.rejectReason, owner))
	}
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, o.plan.Migrated), l.c.cfg.Timeout)
	defer cancel()
	// Not [intent.Ledger.Send], which asks for no recent read: a deletion cannot be undone.
	if err := election.MayCallNow(ctx, read); err != nil {
		return change{}, err
	}
	_, err = l.c.deps.CSI.DeleteVolume(call, &csi.DeleteVolumeRequest{VolumeId: id, Secrets: o.request.GetSecrets()})
	if err != nil {
		err = fmt.Errorf("deleting unusable volume %q: %w (unusable because: %w)", id, err, o.rejectReason)
		l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
		return change{}, err
	}
	l.c.notProvisioned(o)
	l.announce(key, o)
	l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, o.rejectReason))
	return noVolume(nil), o.rejectReason
}

// checkVolume returns an error if a created volume does not match its request. The source of a recorded clone may be larger
// than its request: the source has been expanded since, and the volume was cloned before. Or a user has
// written the record, to get a volume of that size for a smaller claim.
func checkVolume(o operation, v *csi.Volume) error {
	required, size := o.request.GetCapacityRange().GetRequiredBytes(), v.GetCapacityBytes()
	invalidID := csiclient.CheckID("volume_id", v.GetVolumeId())
	switch {
	case v.GetVolumeId() == "":
		return errNoVolume
	case invalidID != nil:
		return fmt.Errorf("%w: %w", errUnusable, invalidID)
	case o.sourceBytes > 0 && (size == 0 || size > required && size >= o.sourceBytes):
		return fmt.Errorf("%w: it has %d bytes, the PVC requests %d, and the source has %d: the clone would be larger than requested",
			errUnusable, size, required, o.sourceBytes)
	case size != 0 && size < required:
		return fmt.Errorf("%w: it has %d bytes, and the request requires %d; this is a driver bug", errUnusable, size, required)
	case o.request.GetVolumeContentSource() != nil && v.GetContentSource() == nil:
		return fmt.Errorf("%w: CreateVolumeResponse has no content_source for a clone or restore, so the volume may be empty; "+
			"this is a driver bug", errUnusable)
	}
	return nil
}
