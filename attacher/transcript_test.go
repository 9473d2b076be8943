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
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// story is a transcript of one VolumeAttachment "va" of the PersistentVolume "pv" to the
// node "n1".
type story struct {
	*looptest.Fixture
	*looptest.Transcript
	cfg    Config
	handle string
}

// newStory creates the CSINode and the PersistentVolume.
func newStory(t *testing.T, plugin csitest.Config, text string) *story {
	s := &story{Fixture: looptest.New(t, plugin), cfg: DefaultConfig()}
	s.cfg.Timeout, s.cfg.ReconcileSync, s.cfg.RetryIntervalStart, s.cfg.RetryIntervalMax = time.Second, 0, time.Hour, time.Hour
	s.Transcript = s.Record(text)
	_, err := s.Client.StorageV1().CSINodes().Create(t.Context(), &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: s.Unique("n1")},
		Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: s.Driver, NodeID: "id-n1"}}},
	}, metav1.CreateOptions{})
	s.Must(err)
	s.handle = s.Plugin.AddVolume("v", 1<<30)
	_, err = s.Client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: s.Unique("pv")},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: s.Driver, VolumeHandle: s.handle},
			},
		},
	}, metav1.CreateOptions{})
	s.Must(err)
	s.start()
	return s
}

// attach creates the VolumeAttachment.
func (s *story) attach() {
	s.Fixture.Helper()
	s.Step("The VolumeAttachment of pv and n1 is created.")
	_, err := s.Client.StorageV1().VolumeAttachments().Create(s.Fixture.Context(), &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: s.Unique("va")},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: s.Driver, NodeName: s.Unique("n1"), Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(s.Unique("pv"))},
		},
	}, metav1.CreateOptions{})
	s.Must(err)
}

// start starts the attacher, and returns when it has the objects.
func (s *story) start() {
	s.Fixture.Helper()
	s.Start(func(p looptest.Process) (looptest.Loop, error) {
		return New(s.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: p.CSI.Controller(), Ready: p.CSI.WaitReady, Registry: p.Registry, Queues: p.Queues,
		})
	})
}

func (s *story) detach() {
	s.Fixture.Helper()
	s.Must(s.Client.StorageV1().VolumeAttachments().Delete(s.Fixture.Context(), s.Unique("va"), metav1.DeleteOptions{}))
}

// attached waits until status.attached is true.
func (s *story) attached() {
	s.Fixture.Helper()
	s.until("attached", func(va *storagev1.VolumeAttachment, err error) bool { return err == nil && isAttached(va) })
}

// deleted waits until the VolumeAttachment does not exist.
func (s *story) deleted() {
	s.Fixture.Helper()
	s.until("deleted", func(_ *storagev1.VolumeAttachment, err error) bool { return err != nil })
}

func (s *story) until(what string, check func(*storagev1.VolumeAttachment, error) bool) {
	s.Fixture.Helper()
	kubetest.Eventually(s.T, "the VolumeAttachment is "+what, func(ctx context.Context) error {
		va, err := s.Client.StorageV1().VolumeAttachments().Get(ctx, s.Unique("va"), metav1.GetOptions{})
		if !check(va, err) {
			return fmt.Errorf("it is %+v, %w", va, err)
		}
		return nil
	})
}

func TestTranscripts(t *testing.T) {
	t.Run("attach_and_detach", func(t *testing.T) {
		s := newStory(t, csitest.Config{PublishContext: map[string]string{"devicePath": "/dev/vdb"}},
			"The finalizers are written before the volume is published, and removed after it was\nunpublished. The PersistentVolume keeps its finalizer until it is deleted.")
		s.attach()
		s.attached()
		s.Step("The VolumeAttachment is deleted.")
		s.detach()
		s.deleted()
		s.Step("The PersistentVolume is deleted.")
		s.Must(s.Client.CoreV1().PersistentVolumes().Delete(t.Context(), s.Unique("pv"), metav1.DeleteOptions{}))
		kubetest.Eventually(t, "the finalizer is removed", func(ctx context.Context) error {
			pv, err := s.Client.CoreV1().PersistentVolumes().Get(ctx, s.Unique("pv"), metav1.GetOptions{})
			if err == nil && strings.Contains(fmt.Sprint(pv.Finalizers), Finalizer(s.Driver)) {
				return errors.New("it is there")
			}
			return nil
		})
		s.Golden("attach_and_detach")
	})
	t.Run("crash_between_publish_and_status", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"The process exits after the driver has published the volume and before the status is\nwritten. The next leader does not trust its cache, and repeats the call with equal arguments.")
		s.Plugin.Next(publish, csitest.DoAndHang())
		s.attach()
		s.Wait(publish, 1)
		s.Crash()
		s.Must(s.Plugin.WaitIdle(t.Context()))
		s.Step("Another replica acquires the Lease.")
		s.start()
		s.attached()
		s.Golden("crash_between_publish_and_status")
	})
	t.Run("indeterminate_publish", func(t *testing.T) {
		s := newStory(t, csitest.Config{},
			"A publish that exceeds --timeout is indeterminate. The error is in the status, and a\ndetach calls the driver although the VolumeAttachment was never attached.")
		s.Plugin.Next(publish, csitest.DoAndHang())
		s.attach()
		s.until("reported", func(va *storagev1.VolumeAttachment, err error) bool {
			return err == nil && va.Status.AttachError != nil
		})
		s.Step("The VolumeAttachment is deleted. The driver returns NotFound, which does not prove a detach.")
		s.Plugin.Next(unpublish, csitest.Fail(codes.NotFound, "no such volume"))
		s.detach()
		s.until("reported", func(va *storagev1.VolumeAttachment, err error) bool {
			return err == nil && va.Status.DetachError != nil
		})
		s.Step("The process restarts.")
		_ = s.Stop(workloop.ErrDrain)
		s.start()
		s.deleted()
		s.Golden("indeterminate_publish")
	})
	t.Run("reconcile_with_list_volumes", func(t *testing.T) {
		s := newStory(t, lists(),
			"--reconcile-sync: ListVolumes reports that an attached volume is not published. The\nVolumeAttachment is read from the API server before the volume is published again.")
		s.attach()
		s.attached()
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
			"The annotations of the VolumeAttachment are sufficient to detach after the CSINode and\nthe PersistentVolume were deleted by force.")
		s.attach()
		s.attached()
		_ = s.Stop(workloop.ErrDrain)
		s.Step("Without a running process, CSINode and PersistentVolume are deleted, then the VolumeAttachment.")
		s.Must(s.Client.StorageV1().CSINodes().Delete(t.Context(), s.Unique("n1"), metav1.DeleteOptions{}))
		s.Must(s.Client.CoreV1().PersistentVolumes().Delete(t.Context(), s.Unique("pv"), metav1.DeleteOptions{}))
		_, err := s.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), s.Unique("pv"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		s.Must(err)
		s.detach()
		s.start()
		s.deleted()
		s.Golden("volume_and_node_deleted")
	})
}
