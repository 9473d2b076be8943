// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"testing"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestSuspendedProcessDetachesNothing: a process that continues after its Lease has expired does not call
// ControllerUnpublishVolume, and writes no detachError.
func TestSuspendedProcessDetachesNothing(t *testing.T) {
	f := scenario(t, csitest.Config{}, nil)
	f.node("id-1")
	f.volume(nil)
	f.attach("va1", nil)
	f.until("is attached", isAttached)
	f.Expire()
	f.detach("va1")
	f.Refuses(unpublish)
	if va := f.until("remains", isAttached); va.Status.DetachError != nil {
		t.Errorf("detachError %v", va.Status.DetachError)
	}
	f.start() // another leads
	f.until("is deleted", isDeleted)
	f.Calls(unpublish, 1)
}
