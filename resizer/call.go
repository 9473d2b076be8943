// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// expand calls ControllerExpandVolume and remembers its response, unless the outcome is unknown.
func (a *attempt) expand(ctx context.Context, s claimState, step step) error {
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
	if ended := a.call(ctx, src, step.target, func(call context.Context) {
		response, err = a.t.c.deps.CSI.ControllerExpandVolume(call, request)
	}); ended != nil {
		return ended
	}
	m := a.memory()
	m.inUseError = status.Code(err) == codes.FailedPrecondition
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
	driver := a.t.c.driver
	src, err := driver.source(s.volume)
	if err != nil {
		return err
	}
	request := driver.modifyRequest(src, s.claim, s.classes[step.target.class], s.secrets)
	if ended := a.call(ctx, src, step.target, func(call context.Context) {
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

// call calls f with the deadline of a CSI call and without the lock of the memory. The outcome is
// unknown until f returns. If ctx ends before the volume can be used, call returns an error without
// calling f.
func (a *attempt) call(ctx context.Context, src source, t target, f func(context.Context)) (err error) {
	m := a.memory()
	m.settled, m.called, m.waiting = "", t.key, false
	// An attempt that follows reads the secret again.
	a.reads.secretRead, a.reads.secrets, a.reads.classes = false, nil, nil
	a.m.unlocked(func() {
		var release func()
		if release, err = a.t.c.deps.Locks.Share(ctx, src.spec.CSI.VolumeHandle); err != nil {
			return
		}
		defer release()
		call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, src.migrated), a.t.c.cfg.callTimeout(a.key.Operation))
		defer cancel()
		if err = election.MayCallNow(ctx, election.Moment{}); err == nil {
			f(call)
		}
	})
	return err
}

// answered remembers a response for the API. An indeterminate response of an expansion changes nothing
// there.
func (a *attempt) answered(ctx context.Context, s claimState, step step, result answer) error {
	result.target, result.at = step.target.key, time.Now()
	result.volume = volumeRef{s.volume.Name, s.volume.UID}
	m := a.memory()
	if result.err != nil {
		_ = a.failed(ctx, s, step, result.kind, result.err)
	}
	if result.kind != indeterminate {
		m.settled = result.target
	} else if a.key.Operation == expand || ctx.Err() != nil {
		return result.err
	}
	m.answer = &result
	return nil
}
