package attacher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// fixture is a driver, its attacher, a node and the real API server. Names carry
// that of the namespace, so that scenarios run side by side.
type fixture struct {
	*testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	plugin *csitest.Plugin
	ns     string
	cfg    Config
	driver string
	api    kubernetes.Interface // of the attacher; nil means client
	reg    *prometheus.Registry // of the last start
	c      *Controller
	stop   func(cause error) error
}

func scenario(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	t.Parallel()
	f := &fixture{T: t, cp: kubetest.Get(t), cfg: DefaultConfig()}
	f.client, f.ns = f.cp.Client(), kubetest.Namespace(t, f.cp)
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	if change != nil {
		change(&f.cfg)
	}
	if plugin.Name == "" {
		plugin.Name = f.ns + ".example.com"
	}
	f.driver = plugin.Name
	f.plugin = csitest.Run(t, plugin)
	f.start()
	return f
}

// start runs the attacher as a process would.
func (f *fixture) start() {
	f.Helper()
	f.reg = prometheus.NewRegistry()
	reg, api := f.reg, f.api
	if api == nil {
		api = f.client
	}
	cfg := csiclient.DefaultConfig()
	cfg.Address = f.plugin.Address()
	client, err := csiclient.New(cfg, reg)
	f.must(err)
	driver, err := client.Connect(f.Context())
	f.must(err)
	meta, err := metadata.NewForConfig(f.cp.Config())
	f.must(err)
	informers := kube.NewInformers(f.client, meta, driver.Name)
	c, err := New(
		f.cfg,
		Deps{
			Driver: driver, Client: api, Informers: informers, CSI: client.Controller(), Ready: client.WaitReady, Registry: reg,
			Queues: workloop.NewMetrics(reg),
		},
	)
	f.must(err)
	f.c = c
	f.stop = kubetest.RunTerm(f, informers, c.Run, func() { client.Close() })
}

// restart has the attacher begin with what there is, so that no event of a node or of a
// volume is still on its way: it would cut the back-off of an attachment made next.
func (f *fixture) restart() {
	f.Helper()
	_ = f.stop(workloop.ErrDrain)
	f.start()
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) name(s string) string { return f.ns + "-" + s }

// node makes a CSINode, with the driver on it where id is not empty.
func (f *fixture) node(id string) {
	f.Helper()
	n := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: f.name("n1")}}
	if id != "" {
		n.Spec.Drivers = []storagev1.CSINodeDriver{{Name: f.driver, NodeID: id}}
	}
	_, err := f.client.StorageV1().CSINodes().Create(f.Context(), n, metav1.CreateOptions{})
	f.must(err)
}

// volume makes a PersistentVolume and its volume at the driver.
func (f *fixture) volume(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.name("pv1")}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: f.driver, VolumeHandle: f.plugin.AddVolume("v", 1<<30)},
		},
	}}
	if change != nil {
		change(pv)
	}
	pv, err := f.client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.must(err)
	return pv
}

func (f *fixture) attach(name string, change func(*storagev1.VolumeAttachment)) {
	f.Helper()
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: f.name(name)}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: f.driver, NodeName: f.name("n1"), Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.name("pv1"))},
	}}
	if change != nil {
		change(va)
	}
	_, err := f.client.StorageV1().VolumeAttachments().Create(f.Context(), va, metav1.CreateOptions{})
	f.must(err)
}

func (f *fixture) detach(name string) {
	f.Helper()
	f.must(f.client.StorageV1().VolumeAttachments().Delete(f.Context(), f.name(name), metav1.DeleteOptions{}))
}

// until waits until check accepts an attachment; nil is a deleted one.
func (f *fixture) until(what string, check func(va *storagev1.VolumeAttachment) bool) *storagev1.VolumeAttachment {
	f.Helper()
	return f.untilOf("va1", what, check)
}

func (f *fixture) untilOf(name, what string, check func(va *storagev1.VolumeAttachment) bool) (found *storagev1.VolumeAttachment) {
	f.Helper()
	kubetest.Eventually(f.T, name+" "+what, func(ctx context.Context) error {
		list, err := f.client.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + f.name(name)})
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

func (f *fixture) calls(method string, n int) {
	f.Helper()
	if got := f.plugin.Count(method); got != n {
		f.Errorf("%s was called %d times, want %d", method, got, n)
	}
}

func (f *fixture) wait(method string, n int) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	f.must(f.plugin.Wait(ctx, method, n))
}

func (f *fixture) finalizersOfVolume() []string {
	f.Helper()
	pv, err := f.client.CoreV1().PersistentVolumes().Get(f.Context(), f.name("pv1"), metav1.GetOptions{})
	f.must(err)
	return pv.Finalizers
}

func (f *fixture) secret(data map[string]string) {
	f.Helper()
	_, err := f.client.CoreV1().Secrets(f.ns).Create(
		f.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: data}, metav1.CreateOptions{},
	)
	f.must(err)
}

func (f *fixture) withSecret(pv *corev1.PersistentVolume) {
	pv.Spec.CSI.ControllerPublishSecretRef = &corev1.SecretReference{Namespace: f.ns, Name: "s"}
}

const publish, unpublish = "ControllerPublishVolume", "ControllerUnpublishVolume"

func TestAttacherScenario(t *testing.T) {
	attacherScenarioRequests(t)
	attacherScenarioState(t)
	attacherScenarioCompare(t)
	t.Run("001_002_003_attach", func(t *testing.T) {
		f := scenario(t, csitest.Config{PublishContext: map[string]string{"foo": "bar"}}, nil)
		f.plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		handle := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.wait(publish, 1)
		during := f.until(
			"is protected during the call",
			func(va *storagev1.VolumeAttachment) bool { return va != nil && len(va.Finalizers) == 1 },
		)
		if during.Status.Attached || during.Annotations[annNodeID] != "id-1" || during.Finalizers[0] != Finalizer(f.driver) {
			t.Errorf("during the call: %+v", during)
		}
		f.plugin.Release()
		va := f.until("is attached", isAttached)
		if fmt.Sprint(va.Status.AttachmentMetadata) != "map[foo:bar]" || va.Status.DetachError != nil || len(va.Finalizers) != 1 || va.Annotations[annNodeID] != "id-1" {
			t.Errorf("got %+v", va)
		}
		if got := f.published(handle); len(got) != 1 || got[0].NodeId != "id-1" {
			t.Errorf("requests %v", got)
		}
		if got := fmt.Sprint(f.finalizersOfVolume()); got != fmt.Sprint([]string{"kubernetes.io/pv-protection", Finalizer(f.driver)}) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.calls(publish, 1)
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
		p := f.plugin.Calls(publish)[0].Request.(*csi.ControllerPublishVolumeRequest)
		u := f.plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest)
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
		f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "s", metav1.DeleteOptions{}))
		f.detach("va1")
		va := f.until("reports it", detachError(fmt.Sprintf(`failed to load secret "%s/s"`, f.ns)))
		if !va.Status.Attached || len(va.Finalizers) != 1 {
			t.Errorf("got %+v", va)
		}
		f.settles()
		f.calls(unpublish, 0)
		f.secret(nil)
		f.until("is deleted", isDeleted)
		f.calls(unpublish, 1)
	})
	t.Run("014_secret_missing", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		va := f.until("reports it", attachError(fmt.Sprintf(`failed to load secret "%s/s"`, f.ns)))
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
		handle := f.plugin.AddVolume("inline", 1)
		f.attach("va1", func(va *storagev1.VolumeAttachment) {
			va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{
						Driver: f.driver, VolumeHandle: handle, VolumeAttributes: map[string]string{"a": "b"},
					},
				},
			}}
		})
		f.until("is attached", isAttached)
		if got := f.published(handle); len(got) != 1 || got[0].NodeId != "id-1" || got[0].VolumeContext["a"] != "b" || got[0].VolumeCapability.AccessMode.Mode != writers {
			t.Errorf("requests %v", got)
		}
		if got := f.finalizersOf("pv1"); got != fmt.Sprint([]string{protection}) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId != handle || r.NodeId != "id-1" {
			t.Errorf("got %v", r)
		}
	})
	t.Run("018_019_csinode_comes_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("reports it", attachError(fmt.Sprintf("csinode.storage.k8s.io %q not found", f.name("n1"))))
		if len(va.Finalizers) > 0 {
			t.Errorf("finalizers %v", va.Finalizers)
		}
		f.node("")
		f.until("reports it", attachError("does not contain driver "+f.driver))
		_, err := f.client.StorageV1().CSINodes().Patch(
			t.Context(), f.name("n1"), types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"drivers":[{"name":%q,"nodeID":"id-1"}]}}`, f.driver), metav1.PatchOptions{},
		)
		f.must(err)
		f.until("is attached without waiting for its back-off", isAttached)
	})
	t.Run("021_volume_comes_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour })
		f.node("id-1")
		f.attach("va1", nil)
		f.until("reports it", attachError(fmt.Sprintf("persistentvolume %q not found", f.name("pv1"))))
		f.volume(nil)
		f.until("is attached without waiting for its back-off", isAttached)
	})
	t.Run("022_volume_being_deleted", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		f.volume(nil)
		f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), f.name("pv1"), metav1.DeleteOptions{}))
		f.attach("va1", nil)
		f.until("reports it", attachError("is marked for deletion"))
		if got := f.finalizersOfVolume(); len(got) != 1 {
			t.Errorf("finalizers %v", got)
		}
		f.calls(publish, 0)
	})
	t.Run("023_errors_of_the_driver", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.plugin.Next(publish, csitest.Fail(codes.Internal, "x"), csitest.Fail(codes.Internal, "x"), csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.wait(publish, 3)
		va := f.until("reports it", attachError("rpc error: code = Internal desc = x"))
		if errorCode(va.Status.AttachError) != "13" || va.Status.Attached {
			t.Errorf("status %+v", va.Status)
		}
		f.plugin.Release()
		f.until("is attached", isAttached)
		f.calls(publish, 3)
		f.distances(f.plugin.Calls(publish), f.cfg.RetryIntervalStart, 2*f.cfg.RetryIntervalStart)
	})
	t.Run("every_code_is_retried", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = 50 * time.Millisecond })
		for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
			f.plugin.Next(publish, csitest.Fail(code, "x"))
			f.plugin.Next(unpublish, csitest.Fail(code, "x"))
		}
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.calls(publish, 17)
		f.calls(unpublish, 17)
	})
	t.Run("026_timeout", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.Timeout = 200 * time.Millisecond })
		f.plugin.Always(publish, csitest.DoAndHang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("reports it", attachError("code = DeadlineExceeded"))
		if errorCode(va.Status.AttachError) != "4" || len(va.Finalizers) != 1 || va.Status.Attached {
			t.Errorf("got %+v", va)
		}
		f.plugin.Always(publish, nil)
		f.until("is attached in the end", isAttached)
		calls := f.plugin.Calls(publish)
		if first, last := calls[0].Request, calls[len(calls)-1].Request; len(calls) < 2 || !proto.Equal(first, last) {
			t.Errorf("calls %v", calls)
		}
	})
	t.Run("027_long_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.plugin.Always(publish, csitest.Fail(codes.Internal, strings.Repeat("ä", 2500)))
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
		f.plugin.Next(publish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.until("reports it", attachError("code = Internal"))
		f.patchAttachment("va1", `{"status":{"attachError":{"message":"another"}}}`, "status")
		f.settles()
		f.calls(publish, 1)
		f.patchAttachment("va1", `{"metadata":{"labels":{"a":"b"}}}`)
		f.until("is attached", isAttached)
		f.calls(publish, 2)
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
		f.calls(publish, 1)
	})
	t.Run("033_034_one_volume_on_twenty_nodes", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		})
		for i := range 20 {
			node := &storagev1.CSINode{
				ObjectMeta: metav1.ObjectMeta{Name: f.name(fmt.Sprint("m", i))},
				Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.driver, NodeID: fmt.Sprint(i)}}},
			}
			_, err := f.client.StorageV1().CSINodes().Create(t.Context(), node, metav1.CreateOptions{})
			f.must(err)
			f.attach(fmt.Sprint("va", i), func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = node.Name })
		}
		for i := range 20 {
			f.untilOf(fmt.Sprint("va", i), "is attached", isAttached)
		}
		if got := strings.Count(fmt.Sprint(f.finalizersOfVolume()), Finalizer(f.driver)); got != 1 {
			t.Errorf("the finalizer is there %d times", got)
		}
		f.calls(publish, 20)
	})
	t.Run("036_detach", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		handle := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId != handle || r.NodeId != "id-1" {
			t.Errorf("got %v", r)
		}
		if got := fmt.Sprint(f.finalizersOfVolume()); !strings.Contains(got, Finalizer(f.driver)) {
			t.Errorf("finalizers of the volume: %s", got)
		}
		f.calls(unpublish, 1)
	})
	t.Run("037_038_not_found_is_no_success", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.plugin.Next(unpublish, csitest.Fail(codes.NotFound, "x"), csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.wait(unpublish, 2)
		va := f.until("reports it", detachError("code = NotFound"))
		if va.Status.DetachError.ErrorCode != nil || !va.Status.Attached {
			t.Errorf("status %+v", va.Status)
		}
		f.plugin.Release()
		f.until("is deleted", isDeleted)
	})
	t.Run("039_somebody_elses_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{PublishContext: map[string]string{"a": "b"}}, func(c *Config) {
			c.WorkerThreads, c.Resync = 1, 10*time.Millisecond
		})
		f.plugin.Next(unpublish, csitest.Fail(codes.Internal, "x"))
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
		f.calls(unpublish, 2)
	})
	t.Run("045_046_never_attached", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.Timeout = 200 * time.Millisecond })
		f.plugin.Always(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("timed out", attachError("DeadlineExceeded"))
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if f.plugin.Count(unpublish) != 1 {
			t.Errorf("%d unpublish calls", f.plugin.Count(unpublish))
		}
		f.attach("va2", func(va *storagev1.VolumeAttachment) { va.Spec.NodeName = "none" })
		f.untilOf("va2", "reports it", attachError("not found"))
		f.detach("va2")
		f.untilOf("va2", "is deleted", isDeleted)
		f.calls(unpublish, 1)
	})
	t.Run("047_deleted_during_publish", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.wait(publish, 1)
		f.detach("va1")
		f.plugin.Release()
		f.until("is deleted", isDeleted)
		f.calls(publish, 1)
		f.calls(unpublish, 1)
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
		f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), f.name("pv1"), metav1.DeleteOptions{}))
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if got := fmt.Sprint(f.finalizersOfVolume()); !strings.Contains(got, Finalizer(f.driver)) {
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
		f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), f.name("pv1"), metav1.DeleteOptions{}))
		_, err := f.client.CoreV1().PersistentVolumes().Patch(
			t.Context(), f.name("pv1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		f.must(err)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId == "" || r.NodeId != "id-1" || r.Secrets["k"] != "v" {
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
		f.calls(publish, 0)
	})
	t.Run("073_drain", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.plugin.Next(publish, csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.wait(publish, 1)
		done := make(chan error, 1)
		go func() { done <- f.stop(fmt.Errorf("signal: %w", workloop.ErrDrain)) }()
		f.plugin.Release()
		if err := <-done; !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("got %v", err)
		}
		f.until("was recorded", isAttached)
	})
	t.Run("075_another_of_the_name_starts_afresh", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 10*time.Millisecond, time.Hour })
		f.plugin.Always(publish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.wait(publish, 6)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		before := f.plugin.Count(publish)
		f.attach("va1", nil)
		f.wait(publish, before+4) // 10, 20 and 40 ms later; the old one would have waited for longer
		f.plugin.Always(publish, nil)
		f.until("is attached", isAttached)
	})
}
