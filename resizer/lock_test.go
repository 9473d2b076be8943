// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
)

// TestBegin: a call that may have an effect is repeated with equal arguments, whatever is recorded meanwhile.
func TestBegin(t *testing.T) {
	for name, tt := range map[string]struct {
		before  intent.State // of the call for 2Gi
		earlier bool         // an earlier process may have sent a call
		target  string
		want    intent.State
		sends   bool // the driver may be called for the target
	}{
		"recorded":                     {intent.Idle, false, "2Gi", intent.Planned, true},
		"of an earlier process":        {intent.Idle, true, "2Gi", intent.Unknown, true},
		"recorded again":               {intent.Unknown, false, "2Gi", intent.Unknown, true},
		"repeated":                     {intent.Sent, true, "2Gi", intent.Sent, true},
		"another size, planned":        {intent.Planned, false, "3Gi", intent.Planned, true},
		"another size, unknown":        {intent.Unknown, false, "3Gi", intent.Unknown, false},
		"another leader's, planned":    {intent.Planned, true, "3Gi", intent.Unknown, true},
		"repeated after a final error": {intent.Settled, false, "2Gi", intent.Planned, true},
		"another leader's, settled":    {intent.Settled, true, "3Gi", intent.Unknown, true},
	} {
		a := &attempt{t: &term{ledger: newLedger()}}
		for _, e := range map[intent.State][]intent.Event{
			intent.Planned: {intent.Plan}, intent.Sent: {intent.Plan, intent.Send}, intent.Unknown: {intent.Resume},
			intent.Settled: {intent.Plan, intent.Settle},
		}[tt.before] {
			if _, _, err := a.t.ledger.Apply(a.key, change{Event: e, Args: size("2Gi").key}); err != nil {
				t.Fatal(err)
			}
		}
		s := testState()
		if tt.earlier {
			s = testState(sizes("3Gi", "1Gi", tt.target, controllerInProgress, "1Gi"))
		}
		_, trigger := expand.callOf(a.t.ledger.Get(a.key), s.claim)
		a.begin(step{target: size(tt.target), trigger: trigger})
		if got := a.t.ledger.Get(a.key); got.State != tt.want {
			t.Errorf("%s: %v, want %v", name, got.State, tt.want)
		}
		if err := a.t.ledger.Send(t.Context(), a.key, size(tt.target).key, true); (err == nil) != tt.sends {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestCallOfALockedVolumeEndsWithTheTerm: at the end of the term a call does not wait for the node controller, and the end is
// no response of the driver. There is no driver and no API server: every use of them panics.
func TestCallOfALockedVolumeEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := testState(sizes("2Gi", "1Gi", "2Gi", controllerInProgress, "1Gi"), vac("gold", "", "InProgress", "gold"))
		s.classes = classes{"gold": &storagev1.VolumeAttributesClass{}}
		targets := map[operation]target{expand: size("2Gi"), modify: {key: "gold"}}
		handle := s.volume.Spec.CSI.VolumeHandle
		var locks keylock.Locks[string]
		if _, ok := locks.TryExclusive(handle); !ok {
			t.Fatal("the volume is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		term := &term{c: &Controller{deps: Deps{Locks: &locks}}, ledger: newLedger()}
		for _, o := range []operation{expand, modify} {
			a := &attempt{t: term, key: key{Operation: o}}
			a.lock()
			call := map[operation]func(context.Context, claimState, step) error{expand: a.expand, modify: a.modify}[o]
			err := call(ctx, s, step{trigger: intent.Plan, target: targets[o]})
			if !errors.Is(err, ended) || term.ledger.Get(a.key).Payload.answer != nil {
				t.Errorf("%s returned %v, and the call is %+v", o, err, term.ledger.Get(a.key))
			}
			// Sent before the wait, so that the other operation cannot plan another call.
			if state := term.ledger.Get(a.key).State; !state.MayHaveEffect() {
				t.Errorf("%s: the call is %s while it waits for the volume", o, state)
			}
			a.unlock() // it is held again after each call
		}
	})
}
