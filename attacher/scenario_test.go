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
	"google.golang.org/protobuf/proto"
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

func TestMain(m *testing.M) { kubetest.Main(m) }

// fixture runs an attacher. Scenarios run in parallel: the names of their objects begin
// with the namespace.
type fixture struct {
	*looptest.Fixture
	cfg Config
	c   *Controller // of the last start
}

// newFixture returns a fixture whose attacher does not run yet.
func newFixture(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := &fixture{Fixture: looptest.New(t, plugin), cfg: DefaultConfig()}
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	if change != nil {
		change(&f.cfg)
	}
	return f
}

// scenario starts an attacher.
func scenario(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := newFixture(t, plugin, change)
	f.start()
	return f
}

// start runs the attacher as a process does.
func (f *fixture) start() {
	f.Helper()
	f.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		f.c, err = New(f.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: p.CSI.Controller(), Ready: p.CSI.WaitReady,
			Registry: p.Registry, Queues: p.Queues,
		})
		return f.c, err
	})
}

// restart has the attacher begin with what there is, so that no event of a node or of a
// volume is still on its way: it would cut the back-off of an attachment made next.
func (f *fixture) restart() {
	f.Helper()
	_ = f.Stop(workloop.ErrDrain)
	f.start()
}

// node makes a CSINode, with the driver on it where id is not empty.
func (f *fixture) node(id string) {
	f.Helper()
	n := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: f.Unique("n1")}}
	if id != "" {
		n.Spec.Drivers = []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: id}}
	}
	_, err := f.Client.StorageV1().CSINodes().Create(f.Context(), n, metav1.CreateOptions{})
	f.Must(err)
}

// volume makes a PersistentVolume and its volume at the driver.
func (f *fixture) volume(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.Unique("pv1")}, Spec: corev1.PersistentVolumeSpec{
		AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume("v", 1<<30)},
		},
	}}
	if change != nil {
		change(pv)
	}
	pv, err := f.Client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.Must(err)
	return pv
}

func (f *fixture) attach(name string, change func(*storagev1.VolumeAttachment)) {
	f.Helper()
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: f.Driver, NodeName: f.Unique("n1"),
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.Unique("pv1"))},
	}}
	if change != nil {
		change(va)
	}
	_, err := f.Client.StorageV1().VolumeAttachments().Create(f.Context(), va, metav1.CreateOptions{})
	f.Must(err)
}

func (f *fixture) detach(name string) {
	f.Helper()
	f.Must(f.Client.StorageV1().VolumeAttachments().Delete(f.Context(), f.Unique(name), metav1.DeleteOptions{}))
}

// until waits until check accepts an attachment; nil is a deleted one.
func (f *fixture) until(what string, check func(va *storagev1.VolumeAttachment) bool) *storagev1.VolumeAttachment {
	f.Helper()
	return f.untilOf("va1", what, check)
}

func (f *fixture) untilOf(name, what string, check func(va *storagev1.VolumeAttachment) bool) (found *storagev1.VolumeAttachment) {
	f.Helper()
	kubetest.Eventually(f.T, name+" "+what, func(ctx context.Context) error {
		list, err := f.Client.StorageV1().VolumeAttachments().List(ctx,
			metav1.ListOptions{FieldSelector: "metadata.name=" + f.Unique(name)})
		if err != nil {
			return err
		}
		found = nil
		if len(list.Items) > 0 {
			found = &list.Items[0]
		}
		if !check(found) {
			return fmt.Errorf("it is %+v", found)
		}
		return nil
	})
	return found
}

func isAttached(va *storagev1.VolumeAttachment) bool {
	return va != nil && va.Status.Attached && va.Status.AttachError == nil
}

func isDeleted(va *storagev1.VolumeAttachment) bool { return va == nil }

func attachError(part string) func(*storagev1.VolumeAttachment) bool {
	return func(va *storagev1.VolumeAttachment) bool {
		return va != nil && va.Status.AttachError != nil && strings.Contains(va.Status.AttachError.Message, part)
	}
}

func detachError(part string) func(*storagev1.VolumeAttachment) bool {
	return func(va *storagev1.VolumeAttachment) bool {
		return va != nil && va.Status.DetachError != nil && strings.Contains(va.Status.DetachError.Message, part)
	}
}

func (f *fixture) finalizersOfVolume() []string {
	f.Helper()
	pv, err := f.Client.CoreV1().PersistentVolumes().Get(f.Context(), f.Unique("pv1"), metav1.GetOptions{})
	f.Must(err)
	return pv.Finalizers
}

func (f *fixture) secret(data map[string]string) {
	f.Helper()
	_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(
		f.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: data}, metav1.CreateOptions{},
	)
	f.Must(err)
}

func (f *fixture) withSecret(pv *corev1.PersistentVolume) {
	pv.Spec.CSI.ControllerPublishSecretRef = &corev1.SecretReference{Namespace: f.Namespace, Name: "s"}
}

const publish, unpublish = "ControllerPublishVolume", "ControllerUnpublishVolume"

func TestAttacherScenario(t *testing.T) {
	attacherScenarioRequests(t)
	attacherScenarioState(t)
	attacherScenarioCompare(t)
	t.Run("001_002_003_attach", func(t *testing.T) {
		f := scenario(t, csitest.Config{PublishContext: map[string]string{"foo": "bar"}}, nil)
		f.Plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		handle := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.Wait(publish, 1)
		during := f.until(
			"is protected during the call",
			func(va *storagev1.VolumeAttachment) bool { return va != nil && len(va.Finalizers) == 1 },
		)
		if during.Status.Attached || during.Annotations[annNodeID] != "id-1" || during.Finalizers[0] != Finalizer(f.Driver) {
			t.Errorf("during the call: %+v", during)
		}
		f.Plugin.Release()
		va := f.until("is attached", isAttached)
		if fmt.Sprint(va.Status.AttachmentMetadata) != "map[foo:bar]" || va.Status.DetachError != nil || len(va.Finalizers) != 1 ||
			va.Annotations[annNodeID] != "id-1" {
			t.Errorf("got %+v", va)
		}
		if got := f.published(handle); len(got) != 1 || got[0].NodeId != "id-1" {
			t.Errorf("requests %v", got)
		}
		if got := fmt.Sprint(f.finalizersOfVolume()); got != fmt.Sprint([]string{"kubernetes.io/pv-protection", Finalizer(f.Driver)}) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.Calls(publish, 1)
	})
	t.Run("013_044_secrets", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.secret(map[string]string{"k": "v"})
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		p := f.Plugin.Calls(publish)[0].Request.(*csi.ControllerPublishVolumeRequest)
		u := f.Plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest)
		if p.Secrets["k"] != "v" || u.Secrets["k"] != "v" {
			t.Errorf("secrets %v and %v", p.Secrets, u.Secrets)
		}
	})
	t.Run("013_044_empty_secret_and_none", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.secret(nil)
		f.node("id-1")
		handle := f.volume(f.withSecret).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		if got := f.published(handle); len(got) != 1 || len(got[0].Secrets) > 0 {
			t.Errorf("requests %v", got)
		}
		f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(t.Context(), "s", metav1.DeleteOptions{}))
		f.detach("va1")
		va := f.until("reports it", detachError(fmt.Sprintf(`failed to load secret "%s/s"`, f.Namespace)))
		if !va.Status.Attached || len(va.Finalizers) != 1 {
			t.Errorf("got %+v", va)
		}
		f.settles()
		f.Calls(unpublish, 0)
		f.secret(nil)
		f.until("is deleted", isDeleted)
		f.Calls(unpublish, 1)
	})
	t.Run("044_secret_and_attachment_deleted_during_the_attach", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(publish, csitest.Hang())
		f.secret(map[string]string{"k": "v"})
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		f.Wait(publish, 1)
		f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(t.Context(), "s", metav1.DeleteOptions{}))
		f.detach("va1")
		kubetest.Eventually(t, "the watch has delivered the deletion", func(context.Context) error {
			if va, ok := f.c.attachments.Get(f.Unique("va1")); !ok || va.DeletionTimestamp == nil {
				return errors.New("it has not")
			}
			return nil
		})
		f.Plugin.Release()
		f.until("reports it", detachError(fmt.Sprintf(`failed to load secret "%s/s"`, f.Namespace)))
		f.Calls(unpublish, 0)
	})
	t.Run("014_secret_missing", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		va := f.until("reports it", attachError(fmt.Sprintf(`failed to load secret "%s/s"`, f.Namespace)))
		if len(va.Finalizers) > 0 {
			t.Errorf("finalizers %v", va.Finalizers)
		}
		f.secret(map[string]string{"k": "v"})
		f.until("is attached", isAttached)
	})
	t.Run("015_inline", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(nil) // which has nothing to do with it
		handle := f.Plugin.AddVolume("inline", 1)
		f.attach("va1", func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{
						Driver: f.Driver, VolumeHandle: handle, VolumeAttributes: map[string]string{"a": "b"},
					},
				},
			}}
		})
		f.until("is attached", isAttached)
		if got := f.published(handle); len(got) != 1 || got[0].NodeId != "id-1" || got[0].VolumeContext["a"] != "b" ||
			got[0].VolumeCapability.AccessMode.Mode != writers {
			t.Errorf("requests %v", got)
		}
		if got := f.finalizersOf("pv1"); got != fmt.Sprint([]string{protection}) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.Plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId != handle || r.NodeId != "id-1" {
			t.Errorf("got %v", r)
		}
	})
	t.Run("018_019_csinode_comes_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("reports it", attachError(fmt.Sprintf("csinode.storage.k8s.io %q not found", f.Unique("n1"))))
		if len(va.Finalizers) > 0 {
			t.Errorf("finalizers %v", va.Finalizers)
		}
		f.node("")
		f.until("reports it", attachError("does not contain driver "+f.Driver))
		_, err := f.Client.StorageV1().CSINodes().Patch(
			t.Context(), f.Unique("n1"), types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"drivers":[{"name":%q,"nodeID":"id-1"}]}}`, f.Driver), metav1.PatchOptions{},
		)
		f.Must(err)
		f.until("is attached without waiting for its back-off", isAttached)
	})
	t.Run("021_volume_comes_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.node("id-1")
		f.attach("va1", nil)
		f.until("reports it", attachError(fmt.Sprintf("persistentvolume %q not found", f.Unique("pv1"))))
		f.volume(nil)
		f.until("is attached without waiting for its back-off", isAttached)
	})
	t.Run("022_volume_being_deleted", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(nil)
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), f.Unique("pv1"), metav1.DeleteOptions{}))
		f.attach("va1", nil)
		f.until("reports it", attachError("is marked for deletion"))
		if got := f.finalizersOfVolume(); len(got) != 1 {
			t.Errorf("finalizers %v", got)
		}
		f.Calls(publish, 0)
	})
	t.Run("023_errors_of_the_driver", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(publish, csitest.Fail(codes.Internal, "x"), csitest.Fail(codes.Internal, "x"), csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.Wait(publish, 3)
		va := f.until("reports it", attachError("rpc error: code = Internal desc = x"))
		if errorCode(va.Status.AttachError) != "13" || va.Status.Attached {
			t.Errorf("status %+v", va.Status)
		}
		f.Plugin.Release()
		f.until("is attached", isAttached)
		f.Calls(publish, 3)
		f.distances(f.Plugin.Calls(publish), f.cfg.RetryIntervalStart, 2*f.cfg.RetryIntervalStart)
	})
	t.Run("every_code_is_retried", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = 50 * time.Millisecond })
		for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
			f.Plugin.Next(publish, csitest.Fail(code, "x"))
			f.Plugin.Next(unpublish, csitest.Fail(code, "x"))
		}
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.Calls(publish, 17)
		f.Calls(unpublish, 17)
	})
	t.Run("026_timeout", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.Timeout = 200 * time.Millisecond })
		f.Plugin.Always(publish, csitest.DoAndHang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("reports it", attachError("code = DeadlineExceeded"))
		if errorCode(va.Status.AttachError) != "4" || len(va.Finalizers) != 1 || va.Status.Attached {
			t.Errorf("got %+v", va)
		}
		f.Plugin.Always(publish, nil)
		f.until("is attached in the end", isAttached)
		calls := f.Plugin.Calls(publish)
		if first, last := calls[0].Request, calls[len(calls)-1].Request; len(calls) < 2 || !proto.Equal(first, last) {
			t.Errorf("calls %v", calls)
		}
	})
	t.Run("027_long_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(publish, csitest.Fail(codes.Internal, strings.Repeat("ä", 2500)))
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("reports it", attachError("rpc error: code = Internal desc = ää"))
		if n := len(va.Status.AttachError.Message); n > 1024 || *va.Status.AttachError.ErrorCode != 13 {
			t.Errorf("%d bytes, code %d", n, *va.Status.AttachError.ErrorCode)
		}
	})
	t.Run("029_only_a_real_change_cuts_the_back_off", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.RetryIntervalStart, c.RetryIntervalMax, c.WorkerThreads = time.Hour, time.Hour, 1
		})
		f.Plugin.Next(publish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.until("reports it", attachError("code = Internal"))
		f.patchAttachment("va1", `{"status":{"attachError":{"message":"another"}}}`, "status")
		f.settles()
		f.Calls(publish, 1)
		f.patchAttachment("va1", `{"metadata":{"labels":{"a":"b"}}}`)
		f.until("is attached", isAttached)
		f.Calls(publish, 2)
	})
	t.Run("031_restart", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		before := f.until("is attached", isAttached)
		f.restart()
		f.settles()
		if after := f.until("is attached", isAttached); after.ResourceVersion != before.ResourceVersion {
			t.Error("it was written")
		}
		f.Calls(publish, 1)
	})
	t.Run("033_034_one_volume_on_twenty_nodes", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		})
		for i := range 20 {
			node := &storagev1.CSINode{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique(fmt.Sprint("m", i))},
				Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: fmt.Sprint(i)}}},
			}
			_, err := f.Client.StorageV1().CSINodes().Create(t.Context(), node, metav1.CreateOptions{})
			f.Must(err)
			f.attach(fmt.Sprint("va", i), func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = node.Name })
		}
		for i := range 20 {
			f.untilOf(fmt.Sprint("va", i), "is attached", isAttached)
		}
		if got := strings.Count(fmt.Sprint(f.finalizersOfVolume()), Finalizer(f.Driver)); got != 1 {
			t.Errorf("the finalizer is there %d times", got)
		}
		f.Calls(publish, 20)
	})
	t.Run("036_detach", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		handle := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.Plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId != handle || r.NodeId != "id-1" {
			t.Errorf("got %v", r)
		}
		if got := fmt.Sprint(f.finalizersOfVolume()); !strings.Contains(got, Finalizer(f.Driver)) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.Calls(unpublish, 1)
	})
	t.Run("037_038_not_found_is_no_success", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(unpublish, csitest.Fail(codes.NotFound, "x"), csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.Wait(unpublish, 2)
		va := f.until("reports it", detachError("code = NotFound"))
		if va.Status.DetachError.ErrorCode != nil || !va.Status.Attached {
			t.Errorf("status %+v", va.Status)
		}
		f.Plugin.Release()
		f.until("is deleted", isDeleted)
	})
	t.Run("039_somebody_elses_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{PublishContext: map[string]string{"a": "b"}}, func(c *Config) {
			c.WorkerThreads, c.Resync = 1, 10*time.Millisecond
		})
		f.Plugin.Next(unpublish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{"example.com/theirs"} })
		f.until("is attached", isAttached)
		f.detach("va1")
		va := f.until("is detached", func(va *storagev1.VolumeAttachment) bool { return va != nil && !va.Status.Attached })
		if fmt.Sprint(va.Finalizers) != "[example.com/theirs]" || va.Status.AttachmentMetadata != nil || va.Status.DetachError != nil {
			t.Errorf("left: %+v", va)
		}
		for range 3 {
			f.settles()
		}
		f.Calls(unpublish, 2)
	})
	t.Run("045_046_never_attached", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.Timeout = 2 * time.Second })
		f.Plugin.Always(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("timed out", attachError("DeadlineExceeded"))
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if f.Plugin.Count(unpublish) != 1 {
			t.Errorf("%d unpublish calls", f.Plugin.Count(unpublish))
		}
		f.attach("va2", func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = "none" })
		f.untilOf("va2", "reports it", attachError("not found"))
		f.detach("va2")
		f.untilOf("va2", "is deleted", isDeleted)
		f.Calls(unpublish, 1)
	})
	t.Run("047_deleted_during_publish", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.Wait(publish, 1)
		f.detach("va1")
		f.Plugin.Release()
		f.until("is deleted", isDeleted)
		f.Calls(publish, 1)
		f.Calls(unpublish, 1)
	})
	t.Run("048_052_053_volume_is_released_last", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
			pv.Finalizers = []string{"example.com/a", "example.com/b"}
		})
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.attach("va2", func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = "none" })
		f.untilOf("va2", "reports it", attachError("not found"))
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), f.Unique("pv1"), metav1.DeleteOptions{}))
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if got := fmt.Sprint(f.finalizersOfVolume()); !strings.Contains(got, Finalizer(f.Driver)) {
			t.Errorf("released although va2 names it: %s", got)
		}
		f.detach("va2")
		kubetest.Eventually(t, "the volume is released", func(context.Context) error {
			if got := f.finalizersOfVolume(); fmt.Sprint(got) != "[example.com/a example.com/b kubernetes.io/pv-protection]" {
				return fmt.Errorf("finalizers %v", got)
			}
			return nil
		})
	})
	t.Run("049_volume_removed_by_force", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.secret(map[string]string{"k": "v"})
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), f.Unique("pv1"), metav1.DeleteOptions{}))
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), f.Unique("pv1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		f.Must(err)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.Plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId == "" || r.NodeId != "id-1" ||
			r.Secrets["k"] != "v" {
			t.Errorf("got %v", r)
		}
	})
	t.Run("067_driver_that_does_not_publish", func(t *testing.T) {
		f := scenario(
			t,
			csitest.Config{
				Controller: []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME},
			},
			nil,
		)
		f.attach("va1", nil)
		va := f.until("is attached", isAttached)
		if va.Finalizers != nil || va.Annotations != nil {
			t.Errorf("got %+v", va.ObjectMeta)
		}
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.Calls(publish, 0)
	})
	t.Run("073_drain", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.Wait(publish, 1)
		done := make(chan error, 1)
		go func() { done <- f.Stop(fmt.Errorf("signal: %w", workloop.ErrDrain)) }()
		f.Plugin.Release()
		if err := <-done; !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("got %v", err)
		}
		f.until("was recorded", isAttached)
	})
	t.Run("075_another_of_the_name_starts_afresh", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 10*time.Millisecond, time.Hour })
		f.Plugin.Always(publish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.Wait(publish, 6)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		before := f.Plugin.Count(publish)
		f.attach("va1", nil)
		f.Wait(publish, before+4) // 10, 20 and 40 ms later; the old one would have waited for longer
		f.Plugin.Always(publish, nil)
		f.until("is attached", isAttached)
	})
}
