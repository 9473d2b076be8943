// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// expand calls ControllerExpandVolume and remembers its response, unless the outcome is unknown.
func (a *attempt) expand(ctx context.Context, s claimState, step step) error {
	if err := pressure.Enter(ctx, "ControllerExpandVolume", storagehelpers.GetPersistentVolumeClass(s.volume)); err != nil {
		return err
	}
	driver := a.t.c.driver
	src, err := driver.source(s.volume)
	if err != nil {
		return err
	}
	request, err := driver.expandRequest(src, step.target.size, s.secrets)
	if err != nil {
		return err
	}
	var response *csi.ControllerExpandVolumeResponse
	if ended := a.call(ctx, s, src, step, func(call context.Context) {
		response, err = a.t.c.deps.CSI.ControllerExpandVolume(call, request)
	}); ended != nil {
		return ended
	}
	result := answer{before: capacityOf(s.claim), nodeExpansion: response.GetNodeExpansionRequired()}
	if err != nil {
		result.kind, result.err = outcomeOf(expand, err), err
	} else if result.size, err = expandedSize(response.GetCapacityBytes(), step.target.size); err != nil {
		result.err = err // final: the driver has completed the call
	} else if response.GetCapacityBytes() == 0 {
		klog.FromContext(ctx).Info("Driver returned no capacity of an expanded volume, assuming the requested one",
			"volumeHandle", request.VolumeId, "size", step.target.size.String())
	}
	if warning := volumerules.CapacityWarning("ControllerExpandVolume", request.VolumeId, response.GetCapacityBytes(),
		step.target.size.Value()); warning != "" {
		a.t.event(s.claim, event{corev1.EventTypeWarning, reasonUnlikelyCapacity, warning})
	}
	return a.answered(ctx, s, step, result)
}

// modify calls ControllerModifyVolume and remembers its response.
func (a *attempt) modify(ctx context.Context, s claimState, step step) error {
	if err := pressure.Enter(ctx, "ControllerModifyVolume", storagehelpers.GetPersistentVolumeClass(s.volume)); err != nil {
		return err
	}
	driver := a.t.c.driver
	src, err := driver.source(s.volume)
	if err != nil {
		return err
	}
	request := driver.modifyRequest(src, s.claim, s.classes[step.target.key], s.secrets)
	if ended := a.call(ctx, s, src, step, func(call context.Context) {
		_, err = a.t.c.deps.CSI.ControllerModifyVolume(call, request)
	}); ended != nil {
		return ended
	}
	result := answer{}
	if err != nil {
		result.kind, result.err = outcomeOf(modify, err), err
	}
	return a.answered(ctx, s, step, result)
}

// call calls f with the deadline of a CSI call and without the lock of the claim. If ctx ends before the volume can be used, or this
// process must not call the driver, call returns an error without calling f.
func (a *attempt) call(ctx context.Context, s claimState, src source, step step, f func(context.Context)) error {
	a.begin(step)
	recorded := s.intends(a.key.Operation, step.target.key)
	// Also before the lock is released: the other operation of the claim must not plan another call.
	if err := a.t.ledger.Send(ctx, a.key, step.target.key, recorded); err != nil {
		return err
	}
	// An attempt that follows reads the secret again.
	a.reads.secretRead, a.reads.secrets, a.reads.classes = false, nil, nil
	a.unlock()
	defer a.lock()
	release, err := a.t.c.deps.Locks.Share(ctx, src.spec.CSI.VolumeHandle)
	if err != nil {
		return err
	}
	defer release()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, src.migrated), a.t.c.cfg.callTimeout(a.key.Operation))
	defer cancel()
	if err := a.t.ledger.Send(ctx, a.key, step.target.key, recorded); err != nil {
		return err
	}
	f(call)
	return nil
}

// begin takes up the call of step, instead of one that was planned and never sent.
func (a *attempt) begin(step step) {
	if step.trigger != 0 {
		a.remember(intent.Settle, nil)
		set := func(m *operationMemory) { m.target = step.target }
		_, _, _ = a.t.ledger.Apply(a.key, change{Event: step.trigger, Args: step.target.key, Set: set})
	}
}
