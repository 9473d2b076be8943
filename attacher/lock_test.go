// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/keylock"
)

// TestNoCallAfterTheTerm: at the end of the term a call does not wait for the node controller, and the end is no error of the
// volume. A call that was not sent is forgotten. There is no driver and no API server: every use of them panics.
func TestNoCallAfterTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keylock.Locks[string]
		if _, ok := locks.TryExclusive("h"); !ok {
			t.Fatal("the volume is locked")
		}
		ended := fmt.Errorf("the term has ended: %w", election.ErrLost)
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		step := step{source: source{handle: "h", spec: &corev1.PersistentVolumeSpec{
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{VolumeHandle: "h"}},
		}}}
		s := attachmentState{attachment: testAttachment()}
		calls := intent.NewLedger[types.UID, lastCall](func(context.Context) error { return ended })
		for name, deps := range map[string]Deps{"of a locked volume": {Locks: &locks}, "without the Lease": {}} {
			term := &term{c: &Controller{deps: deps}, calls: calls}
			if err := term.publish(ctx, s, step); !errors.Is(err, ended) {
				t.Errorf("publish %s returned %v", name, err)
			}
			if err := term.unpublish(ctx, s, step, &liveReads{}); !errors.Is(err, ended) {
				t.Errorf("unpublish %s returned %v", name, err)
			}
		}
		for _, call := range calls.All() {
			t.Errorf("%v remains", call)
		}
	})
}
