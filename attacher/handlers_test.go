// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestAttachmentUpdated: after an interrupted watch, one update may hide a write and the change that has undone it.
func TestAttachmentUpdated(t *testing.T) {
	others := func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = "other" }
	later := func(va *storagev1.VolumeAttachment) { va.ResourceVersion = "9" }
	for name, tt := range map[string]struct {
		changes []func(*storagev1.VolumeAttachment) // of both versions
		want    int                                 // keys in the queue
	}{
		"attached undone":     {nil, 1},
		"detached undone":     {[]func(*storagev1.VolumeAttachment){attached, deleting, protected}, 1},
		"attached":            {[]func(*storagev1.VolumeAttachment){attached, protected}, 0},
		"detached":            {[]func(*storagev1.VolumeAttachment){deleting}, 0},
		"of another attacher": {[]func(*storagev1.VolumeAttachment){others}, 0},
	} {
		sync := func(context.Context, attachmentKey) (time.Time, error) { return time.Time{}, nil }
		term := &term{c: &Controller{driver: testDriver(nil)},
			vaQueue: workloop.New(workloop.Config{Name: "test"}, workloop.NewMetrics(prometheus.NewRegistry()), sync)}
		term.attachmentUpdated(testAttachment(tt.changes...), testAttachment(append(tt.changes, later)...))
		if n := term.vaQueue.Len(); n != tt.want {
			t.Errorf("%s: %d keys, want %d", name, n, tt.want)
		}
		term.vaQueue.Stop()
	}
}

// TestPublishesAgain: a VolumeAttachment is deleted during its publish, and another one has its name.
func TestPublishesAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*attachmentState) // of the other one
		want   any                    // false, true, or the error
	}{
		"same volume and node": {func(*attachmentState) {}, true},
		"deleted meanwhile":    {func(s *attachmentState) { s.attachment = nil }, false},
		"another node ID":      {func(s *attachmentState) { s.attachment.Annotations[annNodeID] = "id-2" }, false},
		"the node ID changed":  {func(s *attachmentState) { s.csiNode = testNode("id-2") }, true},
		"another volume": {func(s *attachmentState) {
			s.attachment.Annotations, s.volume.Spec.CSI.VolumeHandle = nil, "vol-2"
		}, false},
		"volume not found": {func(s *attachmentState) { s.volume = nil }, true},
		"no finalizer yet": {func(s *attachmentState) { s.attachment.Finalizers = nil },
			`VolumeAttachment "va1" was created again, and has no finalizer yet`},
		"of another attacher":        {func(s *attachmentState) { s.attachment.Spec.Attacher = "other" }, false},
		"deleting":                   {func(s *attachmentState) { deleting(s.attachment) }, true},
		"deleting, its detach ended": {func(s *attachmentState) { deleting(s.attachment); s.attachment.Finalizers = nil }, false},
	} {
		s := attachmentState{attachment: testAttachment(protected), volume: testVolume(), csiNode: testNode("id-1")}
		tt.change(&s)
		got, err := testDriver(nil).publishesAgain(s, step{source: source{handle: "vol-1"}, nodeID: "id-1"})
		if err != nil && err.Error() != tt.want || err == nil && got != tt.want {
			t.Errorf("%s: %t, %v", name, got, err)
		}
	}
}
