// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"net/http"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// readsContent reports whether r reads a content.
func readsContent(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "snapshotcontents/")
}

// TestSuspendedProcessDeletesNothing: the process is suspended while the response to the read before a deletion is on its way, and
// continues after its Lease has expired.
func TestSuspendedProcessDeletesNothing(t *testing.T) {
	t.Run("snapshot", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.ready(nil)
		f.Crash()
		f.ExpireAfter(readsContent)
		f.delete("v1")
		f.start()
		f.Refuses(removeSnapshot)
		f.patch("v1", `{"spec":{"deletionPolicy":"Retain"}}`)
		f.start() // another leads
		f.until("is deleted", isDeleted)
		f.Calls(removeSnapshot, 0)
	})
	t.Run("group", func(t *testing.T) {
		f := groupScenario(t, nil)
		f.group(nil)
		f.untilGroup("is complete", isGroupComplete)
		f.Crash()
		f.ExpireAfter(readsContent)
		f.deleteGroup()
		f.start()
		f.Refuses(removeGroup)
		f.start()
		f.untilGroup("is deleted", isGroupDeleted)
		f.Calls(removeGroup, 1)
	})
}
