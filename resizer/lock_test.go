// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/keylock"
)

// TestCallOfALockedVolumeEndsWithTheTerm: at the end of the term a call does not wait for the node controller, and the end is
// no response of the driver. There is no driver and no API server: every use of them panics.
func TestCallOfALockedVolumeEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := testState()
		s.classes = classes{"": &storagev1.VolumeAttributesClass{}}
		handle := s.volume.Spec.CSI.VolumeHandle
		var locks keylock.Locks[string]
		if _, ok := locks.TryExclusive(handle); !ok {
			t.Fatal("the volume is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		m := &claimMemory{mu: make(lock, 1)}
		m.mu.Lock()
		for _, o := range []operation{expand, modify} {
			a := &attempt{t: &term{c: &Controller{deps: Deps{Locks: &locks}}}, key: key{Operation: o}, m: m}
			call := map[operation]func(context.Context, claimState, step) error{expand: a.expand, modify: a.modify}[o]
			if err := call(ctx, s, step{}); !errors.Is(err, ended) || a.memory().answer != nil {
				t.Errorf("%s returned %v, and the answer is %v", o, err, a.memory().answer)
			}
		}
		m.mu.Unlock() // it is held again after each call
	})
}
