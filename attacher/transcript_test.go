// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// story is a transcript of the VolumeAttachment va1 of the PersistentVolume pv1 to the node n1.
type story struct {
	*fixture
	*looptest.Transcript
	handle string
}

// newStory creates the CSINode and the PersistentVolume.
func newStory(t *testing.T, plugin csitest.Config, text string) *story {
	s := &story{fixture: newFixture(t, plugin, func(c *Config) {
		c.Timeout, c.ReconcileSync, c.RetryIntervalStart, c.RetryIntervalMax = time.Second, 0, time.Hour, time.Hour
	})}
	s.Transcript = s.Record(text)
	s.Hidden = []string{"api  get persistentvolumes/" + s.Unique("pv1")} // if the cache has not received everything yet
	s.node("id-n1")
	s.handle = s.volume(nil).Spec.CSI.VolumeHandle
	s.start()
	return s
}

// attach creates the VolumeAttachment.
func (s *story) attach() {
	s.Helper()
	s.Step("The VolumeAttachment of pv1 and n1 is created.")
	s.fixture.attach("va1", nil)
}

func TestTranscripts(t *testing.T) {
	t.Run("attach_and_detach", func(t *testing.T) {
		s := newStory(t, csitest.Config{PublishContext: map[string]string{"devicePath": "/dev/vdb"}},
			"The finalizers are written before the volume is published, and removed after it was\nunpublished. The PersistentVolume "+
				"keeps its finalizer until it is deleted.")
		s.attach()
		s.until("is attached", isAttached)
		s.Step("The VolumeAttachment is deleted.")
		s.detach("va1")
		s.until("is deleted", isDeleted)
		s.Step("The PersistentVolume is deleted.")
		s.Must(s.Client.CoreV1().PersistentVolumes().Delete(t.Context(), s.Unique("pv1"), metav1.DeleteOptions{}))
		kubetest.Eventually(t, "the finalizer is removed", func(ctx context.Context) error {
			pv, err := s.Client.CoreV1().PersistentVolumes().Get(ctx, s.Unique("pv1"), metav1.GetOptions{})
			if err == nil && strings.Contains(fmt.Sprint(pv.Finalizers), Finalizer(s.Driver)) {
				return errors.New("it is there")
			}
			return nil
		})
		s.Golden("attach_and_detach")
	})
	t.Run("crash_between_publish_and_status", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"The process exits after the driver has published the volume and before the status is\nwritten. The next leader does not "+
				"trust its cache, and repeats the call with equal arguments.")
		s.Plugin.Next(publish, csitest.DoAndHang())
		s.attach()
		s.Wait(publish, 1)
		s.Crash()
		s.Must(s.Plugin.WaitIdle(t.Context()))
		s.Step("Another replica acquires the Lease.")
		s.start()
		s.until("is attached", isAttached)
		s.Golden("crash_between_publish_and_status")
	})
	t.Run("indeterminate_publish", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"A publish that exceeds --timeout is indeterminate. The error is in the status, and a\ndetach calls the driver although the "+
				"VolumeAttachment was never attached.")
		s.Plugin.Next(publish, csitest.DoAndHang())
		s.attach()
		s.until("reports it", attachError("DeadlineExceeded"))
		s.Step("The VolumeAttachment is deleted. The driver returns NotFound, which does not prove a detach.")
		s.Plugin.Next(unpublish, csitest.Fail(codes.NotFound, "no such volume"))
		s.detach("va1")
		s.until("reports it", detachError("NotFound"))
		s.Step("The process restarts.")
		_ = s.Stop(workloop.ErrDrain)
		s.start()
		s.until("is deleted", isDeleted)
		s.Golden("indeterminate_publish")
	})
	t.Run("reconcile_with_list_volumes", func(t *testing.T) {
		s := newStory(t, lists(),
			"--reconcile-sync: ListVolumes reports that an attached volume is not published. The\nVolumeAttachment is read from the API "+
				"server before the volume is published again.")
		s.attach()
		s.until("is attached", isAttached)
		_ = s.Stop(workloop.ErrDrain)
		s.Step("An administrator detaches the volume at the storage system. The process restarts.")
		_, err := s.Plugin.ControllerUnpublishVolume(
			t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: s.handle, NodeId: "id-n1"},
		)
		s.Must(err)
		s.cfg.ReconcileSync = time.Hour // the first one begins immediately
		s.start()
		s.Wait(publish, 2)
		_ = s.Stop(workloop.ErrDrain)
		s.Golden("reconcile_with_list_volumes")
	})
	t.Run("volume_and_node_deleted", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"The annotations of the VolumeAttachment are sufficient to detach after the CSINode and\nthe PersistentVolume were deleted "+
				"by force.")
		s.attach()
		s.until("is attached", isAttached)
		_ = s.Stop(workloop.ErrDrain)
		s.Step("Without a running process, CSINode and PersistentVolume are deleted, then the VolumeAttachment.")
		s.Must(s.Client.StorageV1().CSINodes().Delete(t.Context(), s.Unique("n1"), metav1.DeleteOptions{}))
		s.Must(s.Client.CoreV1().PersistentVolumes().Delete(t.Context(), s.Unique("pv1"), metav1.DeleteOptions{}))
		_, err := s.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), s.Unique("pv1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		s.Must(err)
		s.detach("va1")
		s.start()
		s.until("is deleted", isDeleted)
		s.Golden("volume_and_node_deleted")
	})
}
