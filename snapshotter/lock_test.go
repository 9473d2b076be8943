// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
)

// TestCreateOfALockedVolumeEndsWithTheTerm: at the end of the term CreateSnapshot does not wait for the node controller, and
// the end is no response of the driver. There is no driver and no API server: every use of them panics.
func TestCreateOfALockedVolumeEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := testState()
		s.content.volumes = []string{"a", "b"}
		var locks keylock.Locks[string]
		release, ok := locks.TryExclusive("b")
		if !ok {
			t.Fatal("the volume is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		l := &loop{c: &Controller{deps: Deps{Locks: &locks}}, ledger: intent.NewLedger[types.UID, memory](nil)}
		if _, sent, err := l.send(ctx, s.content, &createRequest{}, nil); sent || !errors.Is(err, ended) {
			t.Errorf("got %t, %v", sent, err)
		}
		if e := l.ledger.Get(s.content.UID); e.State != intent.Idle {
			t.Error("the call is remembered, but was not made")
		}
		release()
		for _, volume := range s.content.volumes {
			if _, ok := locks.TryExclusive(volume); !ok {
				t.Errorf("volume %s is still locked", volume)
			}
		}
	})
}
