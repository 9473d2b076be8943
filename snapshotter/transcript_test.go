// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"
	"testing"
	"time"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// story is a transcript of the content v1 or of the group content g1.
type story struct {
	*fixture
	*looptest.Transcript
}

// newStory creates the classes and starts the snapshotter, which does not retry after a failure.
func newStory(t *testing.T, plugin csitest.Config, text string) *story {
	f := newFixture(t, plugin, func(c *Config) {
		c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax = time.Second, time.Hour, time.Hour
	})
	s := &story{fixture: f}
	s.Transcript = f.Record(text)
	f.class("c1", map[string]string{"tier": "gold"})
	if plugin.Groups {
		f.groupClass(map[string]string{"tier": "gold"})
	}
	s.run()
	return s
}

func (s *story) run() {
	s.recorder = s.Transcript
	s.start()
}

func TestTranscripts(t *testing.T) {
	t.Run("create_and_delete", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"The request is recorded before the call. The deletion reads the content from the API\nserver, because its policy may have "+
				"changed.")
		s.Step("The snapshot-controller creates the VolumeSnapshotContent v1.")
		s.content("v1", nil)
		s.until("is complete", isComplete)
		s.Step("The VolumeSnapshot is deleted: the snapshot-controller releases the deletion and deletes v1.")
		s.delete("v1")
		s.until("is deleted", isDeleted)
		s.Golden("create_and_delete")
	})
	t.Run("crash_between_create_and_status", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"The process exits after the driver has created the snapshot and before the status is\nwritten. v1 is deleted meanwhile. "+
				"The next leader repeats the recorded request, although\nthe class was deleted, and deletes the snapshot.")
		s.Plugin.Next(createSnapshot, csitest.DoAndHang())
		s.Step("The snapshot-controller creates the VolumeSnapshotContent v1.")
		s.content("v1", nil)
		s.Wait(createSnapshot, 1)
		s.Crash()
		s.Must(s.Plugin.WaitIdle(t.Context()))
		s.Step("Without a leader, the class is deleted, and v1. Another replica acquires the Lease.")
		s.deleteClass("c1")
		s.delete("v1")
		s.run()
		s.until("is deleted", isDeleted)
		s.noSnapshots()
		s.Golden("crash_between_create_and_status")
	})
	t.Run("indeterminate_create", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"A CreateSnapshot that exceeds --timeout is indeterminate: v1 cannot be deleted before its\noutcome is known. "+
				"An administrator ends the wait by removing the annotation.")
		s.Plugin.Always(createSnapshot, csitest.Fail(codes.DeadlineExceeded, "too slow"))
		s.Step("The snapshot-controller creates the VolumeSnapshotContent v1.")
		s.content("v1", nil)
		s.Says("SnapshotCreationFailed") // follows the status
		s.Step("The VolumeSnapshot is deleted.")
		s.delete("v1")
		s.Wait(createSnapshot, 2)
		s.Says("Waiting for the outcome")
		s.Step("An administrator removes the annotation volumesnapshot-being-created.")
		s.annotate("v1", AnnBeingCreated, nil)
		s.until("is deleted", isDeleted)
		s.Golden("indeterminate_create")
	})
	t.Run("foreign_finalizer_and_missing_secret", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"A deletion waits for its Secret. If another finalizer keeps v1, the status is cleared\nbefore the finalizer is removed.")
		s.secret("s", map[string]string{"password": "p"})
		s.Step("The snapshot-controller creates the VolumeSnapshotContent v1 with a secret.")
		o := s.content("v1", s.withSecret)
		s.until("is complete", isComplete)
		s.Step("The Secret is deleted, another component adds a finalizer, and the VolumeSnapshot is deleted.")
		s.deleteSecret("s")
		s.patch("v1", fmt.Sprintf(`{"metadata":{"finalizers":[%q,"example.com/other"]}}`, o.Finalizers[0]))
		s.delete("v1")
		s.Says("Waiting for Secret")
		s.Step("The Secret is created again, and the process restarts.")
		_ = s.Stop(workloop.ErrDrain)
		s.secret("s", map[string]string{"password": "p"})
		s.run()
		s.until("has one finalizer", func(o *snapshotv1.VolumeSnapshotContent) bool { return len(o.Finalizers) == 1 })
		s.patch("v1", `{"metadata":{"finalizers":null}}`)
		s.Golden("foreign_finalizer_and_missing_secret")
	})
	t.Run("group", func(t *testing.T) {
		s := newStory(t, csitest.Config{Groups: true},
			"A group of two snapshots is created and deleted. Its members are left to the snapshot-controller.")
		s.Step("The snapshot-controller creates the VolumeGroupSnapshotContent g1.")
		s.group(nil)
		o := s.untilGroup("is complete", isGroupComplete)
		s.Step("It creates the VolumeSnapshotContent v1 of the first snapshot, which is not ready yet.")
		s.member("v1", *o.Status.VolumeGroupSnapshotHandle, o.Status.VolumeSnapshotInfoList[0].SnapshotHandle)
		s.until("is ready", isReady)
		s.Step("The VolumeGroupSnapshot is deleted, and then v1.")
		s.deleteGroup()
		s.untilGroup("is deleted", func(o *groupv1.VolumeGroupSnapshotContent) bool { return o == nil })
		s.delete("v1")
		s.until("is deleted", isDeleted)
		s.Golden("group")
	})
}
