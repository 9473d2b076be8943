// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// through starts the attacher again, with hook between it and the API server.
func (f *fixture) through(hook func(w http.ResponseWriter, r *http.Request, pass http.Handler)) {
	f.Helper()
	_ = f.Stop(errors.New("restart"))
	api, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, f.ControlPlane.Config(), hook))
	f.Must(err)
	f.API = api
	f.start()
}

// patches tells whether r patches the object of that name, or its subresource: pv1/status.
func (f *fixture) patches(r *http.Request, name string) bool {
	return r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/"+f.Unique(name))
}

func refuse(w http.ResponseWriter) {
	http.Error(w, "refused by the test", http.StatusInternalServerError)
}

// distances checks that each call began at least so long after the end of the one before.
func (f *fixture) distances(calls []csitest.Call, want ...time.Duration) {
	f.Helper()
	if len(calls) < len(want)+1 {
		f.Fatalf("%d calls, want %d", len(calls), len(want)+1)
	}
	for i, w := range want {
		if d := calls[i+1].Began.Sub(calls[i].Ended); d < w {
			f.Errorf("call %d came %v after the one before, want %v at least", i+2, d, w)
		}
	}
}

// samples is the value of a counter, or the number of observations of a histogram, with
// these labels: name and value in turns.
func (f *fixture) samples(metric string, labels ...string) (n int) {
	f.Helper()
	families, err := f.Registry.Gather()
	f.Must(err)
	for _, family := range families {
		if family.GetName() != metric {
			continue
		}
		for _, m := range family.GetMetric() {
			has := func(name, value string) bool {
				return slices.ContainsFunc(
					m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == name && l.GetValue() == value },
				)
			}
			match := true
			for i := 0; i < len(labels); i += 2 {
				match = match && has(labels[i], labels[i+1])
			}
			if match {
				n += int(m.GetCounter().GetValue()) + int(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return n
}

func (f *fixture) deleteVolume(name string) {
	f.Helper()
	f.Must(f.Client.CoreV1().PersistentVolumes().Delete(f.Context(), f.Unique(name), metav1.DeleteOptions{}))
}

func (f *fixture) finalizersOf(volume string) string {
	f.Helper()
	pv, err := f.Client.CoreV1().PersistentVolumes().Get(f.Context(), f.Unique(volume), metav1.GetOptions{})
	f.Must(err)
	return fmt.Sprint(pv.Finalizers)
}

// released waits until a volume has the finalizers of want and no others, in that order.
func (f *fixture) released(volume string, want ...string) {
	f.Helper()
	kubetest.Eventually(f.T, volume+" is released", func(context.Context) error {
		if got := f.finalizersOf(volume); got != fmt.Sprint(want) {
			return fmt.Errorf("finalizers %s", got)
		}
		return nil
	})
}

func (f *fixture) nothingIsPublished() {
	f.Helper()
	kubetest.Eventually(f.T, "nothing is published", func(context.Context) error {
		if n := f.Plugin.Publications(); n > 0 {
			return fmt.Errorf("%d publications", n)
		}
		return nil
	})
}

// deleteByForce deletes a VolumeAttachment, waits for calls of ControllerUnpublishVolume and then removes the finalizers.
func (f *fixture) deleteByForce(name string, calls int) {
	f.Helper()
	vas := f.Client.StorageV1().VolumeAttachments()
	f.Must(vas.Delete(f.Context(), name, metav1.DeleteOptions{}))
	f.Wait(unpublish, calls)
	_, err := vas.Patch(f.Context(), name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	f.Must(err)
}

// gcePD is the driver that took the place of the built-in plugin for disks of GCE.
const gcePD = "pd.csi.storage.gke.io"

// onGCE gives a volume the source of that plugin.
func onGCE(pv *corev1.PersistentVolume) {
	pv.Labels = map[string]string{corev1.LabelTopologyZone: "z"}
	pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{GCEPersistentDisk: &corev1.GCEPersistentDiskVolumeSource{PDName: "disk"}}
}

const (
	protection = "kubernetes.io/pv-protection"
	theirs     = "example.com/theirs"
)

// attacherScenarioState is what becomes of the objects: errors, finalizers, and volumes of
// built-in plugins.
func attacherScenarioState(t *testing.T) {
	for name, tt := range map[string]struct {
		publish, unpublish csitest.Step
		calls              int // of ControllerUnpublishVolume
	}{
		"answered":            {csitest.Default(), csitest.Default(), 1},
		"without_an_answer":   {csitest.DoAndFail(codes.DeadlineExceeded, "slow"), csitest.Default(), 1},
		"and_unpublish_fails": {csitest.Default(), csitest.Fail(codes.Unavailable, "busy"), 2},
	} {
		t.Run("attachment_removed_by_force_during_publish_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			gate := make(chan struct{})
			f.Plugin.Next(publish, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
				<-gate
				return tt.publish(ctx, p, request, do)
			})
			f.Plugin.Next(unpublish, tt.unpublish)
			f.node("id")
			f.volume(nil)
			f.attach("va", nil)
			f.Wait(publish, 1)
			f.deleteByForce(f.Unique("va"), 0)
			close(gate)
			f.Wait(unpublish, tt.calls)
			f.nothingIsPublished()
		})
	}
	t.Run("attachment_removed_by_force_during_unpublish", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		gate := make(chan struct{})
		f.Plugin.Next(unpublish, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			<-gate
			return nil, status.Error(codes.DeadlineExceeded, "slow")
		})
		f.deleteByForce(f.attached().Name, 1)
		close(gate)
		f.Wait(unpublish, 2)
		f.nothingIsPublished()
	})
	t.Run("attachment_removed_by_force_because_the_volume_is_not_found", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(unpublish, csitest.Fail(codes.NotFound, "no such volume"))
		va := f.attached()
		f.deleteByForce(va.Name, 1)
		kubetest.Eventually(t, "the calls end", func(context.Context) error {
			if f.c.term.Load().calls.Get(va.UID).State.InProgress() {
				return errors.New("they go on")
			}
			return nil
		})
	})
	t.Run("attachment_recreated_during_unpublish", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		gate := make(chan struct{})
		f.Plugin.Next(unpublish, func(_ context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
			<-gate
			return do()
		})
		va := f.attached()
		f.deleteByForce(va.Name, 1)
		f.attach("va1", nil)
		f.until("waits for the call", attachError("a call for volume"))
		f.Calls(publish, 1)
		close(gate)
		f.until("is attached", isAttached)
		if f.Plugin.Publications() != 1 {
			t.Error("the volume is not published")
		}
	})
	t.Run("attachment_recreated_during_publish", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		va, term := f.attached(), f.c.term.Load()
		s := term.gather(keyOf(va), liveReads{})
		s.attachment = va.DeepCopy()
		s.attachment.UID = "deleted"
		source, err := f.c.driver.currentSource(s)
		f.Must(err)
		kubetest.Eventually(t, "the call ends", func(context.Context) error {
			done, err := term.begin(t.Context(), va, step{source: source})
			if err == nil {
				done()
			}
			return err
		})
		f.Must(term.publish(t.Context(), s, step{action: doPublish, source: source, nodeID: "id-1"}))
		_, err = term.sync(t.Context(), keyOf(s.attachment))
		f.Must(err)
		f.Calls(publish, 2)
		f.Calls(unpublish, 0)
	})
	t.Run("attachment_recreated_without_the_finalizer", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.volume(nil)
		f.attach("va1", nil)
		va, term := f.until("waits for the node", attachError("csinode")), f.c.term.Load()
		s := term.gather(keyOf(va), liveReads{})
		s.attachment = va.DeepCopy()
		s.attachment.UID = "deleted"
		source, err := f.c.driver.currentSource(s)
		f.Must(err)
		s.attachment.Finalizers = []string{f.c.driver.finalizer}
		s.attachment.Annotations = map[string]string{annNodeID: "id-1", annVolumeHandle: source.handle}
		_ = term.publish(t.Context(), s, step{action: doPublish, source: source, nodeID: "id-1"}) // its status cannot be written
		if _, err = term.sync(t.Context(), keyOf(s.attachment)); err == nil || !strings.Contains(err.Error(), "was created again") {
			t.Errorf("got %v", err)
		}
		f.node("id-1")
		f.until("is attached", isAttached)
		kubetest.Eventually(t, "the cache has the finalizer", func(ctx context.Context) error {
			_, err := term.sync(ctx, keyOf(s.attachment))
			return err
		})
		f.Calls(unpublish, 0)
	})
	for name, tt := range map[string]struct {
		gate bool
		want string
	}{"024_exhausted": {true, "8"}, "024_exhausted_gate_off": {false, "none"}} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, func(c *Config) { c.StoreErrorCode = tt.gate })
			f.Plugin.Always(publish, csitest.Fail(codes.ResourceExhausted, "full"))
			f.node("id-1")
			f.volume(nil)
			f.attach("va1", nil)
			va := f.until("reports it", attachError("rpc error: code = ResourceExhausted desc = full"))
			if got := errorCode(va.Status.AttachError); got != tt.want {
				t.Errorf("error code %s", got)
			}
		})
	}
	t.Run("025_error_without_code", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(publish, csitest.Fail(codes.Internal, "x"))
		f.secret(nil)
		f.node("id-1")
		f.volume(f.withSecret)
		f.attach("va1", nil)
		if va := f.until("reports it", attachError("code = Internal")); errorCode(va.Status.AttachError) != "13" {
			t.Errorf("error %v", va.Status.AttachError)
		}
		f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(t.Context(), "s", metav1.DeleteOptions{}))
		if va := f.until("reports it", attachError("failed to load secret")); errorCode(va.Status.AttachError) != "none" {
			t.Errorf("error %v", va.Status.AttachError)
		}
	})
	t.Run("028_back_off", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.RetryIntervalStart, c.RetryIntervalMax = 100*time.Millisecond, 400*time.Millisecond
		})
		f.Plugin.Always(publish, csitest.Fail(codes.Internal, "x"))
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.Wait(publish, 9)
		calls, ms := f.Plugin.Calls(publish), time.Millisecond
		f.distances(calls, 100*ms, 200*ms, 400*ms, 400*ms, 400*ms, 400*ms, 400*ms, 400*ms)
		if d := calls[8].Began.Sub(calls[7].Ended); d >= 12800*ms {
			t.Errorf("the maximum is not heeded: the last delay was %v", d)
		}
	})
	t.Run("030_status_refused", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var statuses sync.Map // by their order
		var n atomic.Int32
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if !f.patches(r, "va1/status") {
				pass.ServeHTTP(w, r)
				return
			}
			body, _ := io.ReadAll(r.Body) // an incomplete one is refused by the API server
			r.Body = io.NopCloser(bytes.NewReader(body))
			i := n.Add(1)
			statuses.Store(i, string(body))
			if i == 1 {
				refuse(w)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.node("id-1")
		f.volume(nil)
		f.restart()
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.Calls(publish, 2)
		statuses.Range(func(i, body any) bool {
			if !strings.Contains(body.(string), `"attached":true`) || !strings.Contains(body.(string), `"attachError":null`) {
				t.Errorf("status write %d was %s", i, body)
			}
			return true
		})
		if n.Load() != 2 {
			t.Errorf("%d status writes", n.Load())
		}
	})
	t.Run("032_056_of_others", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		other := func(va *storagev1.VolumeAttachment) { va.Spec.Attacher = "other." + f.Driver }
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", other)
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Spec.CSI.Driver = f.Unique("pv2"), "other."+f.Driver
			pv.Finalizers = []string{Finalizer("other." + f.Driver)}
		})
		f.deleteVolume("pv2")
		// The same events for objects of ours are handled afterwards.
		f.settles()
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name, pv.Finalizers = f.Unique("pv3"), []string{theirs, Finalizer(f.Driver)}
		})
		f.deleteVolume("pv3")
		f.released("pv3", theirs, protection)
		va := f.until("is there", func(va *storagev1.VolumeAttachment) bool { return va != nil })
		if va.Finalizers != nil || va.Annotations != nil || va.Status.Attached || va.Status.AttachError != nil {
			t.Errorf("got %+v", va)
		}
		if got := f.finalizersOf("pv1"); got != fmt.Sprint([]string{protection}) {
			t.Errorf("finalizers %s", got)
		}
		if got := f.finalizersOf("pv2"); got != fmt.Sprint([]string{Finalizer("other." + f.Driver), protection}) {
			t.Errorf("finalizers %s", got)
		}
		f.Calls(publish, 0)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.Calls(unpublish, 0)
	})
	t.Run("035_finalizer_removed_meanwhile", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		rest := fmt.Appendf(nil, `{"metadata":{"$deleteFromPrimitiveList/finalizers":[%q]}}`, theirs)
		var volume, attachment atomic.Bool // has lost it
		remove := func(what *atomic.Bool, write func() error) {
			if what.CompareAndSwap(false, true) {
				if err := write(); err != nil {
					t.Error(err)
				}
			}
		}
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			switch {
			case f.patches(r, "pv1"):
				remove(&volume, func() error {
					_, err := f.Client.CoreV1().PersistentVolumes().Patch(
						r.Context(), f.Unique("pv1"), types.StrategicMergePatchType, rest, metav1.PatchOptions{},
					)
					return err
				})
			case f.patches(r, "va1"):
				remove(&attachment, func() error {
					_, err := f.Client.StorageV1().VolumeAttachments().Patch(
						r.Context(), f.Unique("va1"), types.StrategicMergePatchType, rest, metav1.PatchOptions{},
					)
					return err
				})
			}
			pass.ServeHTTP(w, r)
		})
		f.node("id-1")
		f.volume(func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{theirs} })
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{theirs} })
		if va := f.until("is attached", isAttached); fmt.Sprint(va.Finalizers) != fmt.Sprint([]string{Finalizer(f.Driver)}) {
			t.Errorf("finalizers %v", va.Finalizers)
		}
		f.released("pv1", protection, Finalizer(f.Driver))

		// Once more at the end of their lives.
		add := fmt.Appendf(nil, `{"metadata":{"finalizers":[%q]}}`, theirs)
		_, err := f.Client.StorageV1().VolumeAttachments().Patch(
			t.Context(), f.Unique("va1"), types.StrategicMergePatchType, add, metav1.PatchOptions{},
		)
		f.Must(err)
		_, err = f.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), f.Unique("pv1"), types.StrategicMergePatchType, add, metav1.PatchOptions{},
		)
		f.Must(err)
		volume.Store(false)
		attachment.Store(false)
		f.deleteVolume("pv1")
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.released("pv1", protection)
		if !volume.Load() || !attachment.Load() {
			t.Error("no write came between")
		}
	})
	t.Run("050_status_without_response", func(t *testing.T) { // the volume of a running pod is not detached, even without the finalizer
		f := scenario(t, csitest.Config{}, oneWorker)
		var lost atomic.Bool
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.patches(r, "va1/status") && lost.CompareAndSwap(false, true) {
				pass.ServeHTTP(httptest.NewRecorder(), r)
				panic(http.ErrAbortHandler)
			}
			pass.ServeHTTP(w, r)
		})
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		va := f.until("is attached", isAttached)
		kubetest.Eventually(t, "the publication has ended", func(context.Context) error {
			if f.c.term.Load().calls.Get(va.UID).State.InProgress() {
				return errors.New("it has not")
			}
			return nil
		})
		_, err := f.Client.StorageV1().VolumeAttachments().Patch(
			t.Context(), f.Unique("va1"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		f.Must(err)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.settles()
		f.Calls(unpublish, 0)
	})
	t.Run("050_crash_before_the_status", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var crashed atomic.Bool
		crash := make(chan struct{})
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.patches(r, "va1/status") && f.Plugin.Count(unpublish) > 0 && crashed.CompareAndSwap(false, true) {
				_, _ = io.Copy(io.Discard, r.Body) // a server notices the end of a client only behind that
				close(crash)
				<-r.Context().Done()
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", func(va *storagev1.VolumeAttachment) { va.Finalizers = []string{theirs} })
		f.until("is attached", isAttached)
		f.detach("va1")
		<-crash
		_ = f.Stop(errors.New("killed"))
		f.cfg.WorkerThreads, f.API = 1, nil
		f.start()
		f.settles()
		f.Calls(unpublish, 1)
		va := f.until("is held by others", func(va *storagev1.VolumeAttachment) bool { return va != nil })
		if fmt.Sprint(va.Finalizers) != fmt.Sprint([]string{theirs}) {
			t.Errorf("finalizers %v", va.Finalizers)
		}
	})
	t.Run("051_release_refused", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var refused atomic.Bool
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.patches(r, "va1") && f.Plugin.Count(unpublish) > 0 && refused.CompareAndSwap(false, true) {
				refuse(w)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.Plugin.Next(unpublish, csitest.Default(), csitest.Hang())
		f.node("id-1")
		f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		va := f.until("reports it", detachError("could not mark as detached: "))
		if errorCode(va.Status.DetachError) != "none" || !va.Status.Attached {
			t.Errorf("status %+v", va.Status)
		}
		f.Wait(unpublish, 2)
		f.Plugin.Release()
		f.until("is deleted", isDeleted)
		f.Calls(unpublish, 2)
	})
	t.Run("054_living_volume", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.WorkerThreads, c.Resync = 1, 20*time.Millisecond })
		protected := func(name string) {
			f.volume(func(pv *corev1.PersistentVolume) {
				pv.Name, pv.Finalizers = f.Unique(name), []string{theirs, Finalizer(f.Driver)}
			})
		}
		protected("pv1")
		protected("pv2") // is on its way out, kept by an attachment of whatever driver
		f.attach("va2", func(va *storagev1.VolumeAttachment) {
			f.ofVolume("pv2")(va)
			va.Spec.Attacher = "other." + f.Driver
		})
		f.settles()
		f.deleteVolume("pv2")
		kubetest.Eventually(t, "all was looked at several times", func(context.Context) error {
			if n := f.samples("workqueue_adds_total", "name", "csi-attacher-pv"); n < 4 {
				return fmt.Errorf("%d times", n)
			}
			return nil
		})
		for _, name := range []string{"pv1", "pv2"} {
			if got := f.finalizersOf(name); got != fmt.Sprint([]string{theirs, Finalizer(f.Driver), protection}) {
				t.Errorf("%s: finalizers %s", name, got)
			}
		}
		f.detach("va2")
		f.released("pv2", theirs, protection)
	})
	// One after the other: the name of the driver is that of all of these, and of no other test.
	t.Run("055_058_volumes_of_a_built_in_plugin", func(t *testing.T) {
		f := scenario(t, csitest.Config{Name: gcePD}, oneWorker)
		f.Plugin.Always(publish, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
			return &csi.ControllerPublishVolumeResponse{}, nil // of a disk that the plugin has not made
		})
		f.node("id-1")
		plain := f.volume(nil).Spec.CSI.VolumeHandle
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.volume(func(pv *corev1.PersistentVolume) {
			pv.Name = f.Unique("pv2")
			onGCE(pv)
		})
		f.attach("va2", f.ofVolume("pv2"))
		f.untilOf("va2", "is attached", isAttached)
		const handle = "projects/UNSPECIFIED/zones/z/disks/disk"
		if got := f.published(handle); len(got) != 1 || fmt.Sprint(got[0].VolumeContext) != "map[partition:]" {
			t.Errorf("got %v", got)
		}
		if len(f.published(plain)) != 1 {
			t.Errorf("calls %v", f.Plugin.Calls(publish))
		}
		counts := func(method string) string {
			count := func(migrated string) int {
				return f.samples(
					"csi_sidecar_operations_seconds", "method_name", "/csi.v1.Controller/"+method, "driver_name", gcePD,
					"migrated", migrated,
				)
			}
			return fmt.Sprint(count("true"), " of it, ", count("false"), " of a CSI volume")
		}
		if got := counts(publish); got != "1 of it, 1 of a CSI volume" {
			t.Error(got)
		}

		// It does not belong to the driver anymore, but is attached; and it is deleted in the end.
		f.deleteVolume("pv2")
		_, err := f.Client.CoreV1().PersistentVolumes().Patch(
			t.Context(), f.Unique("pv2"), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
		)
		f.Must(err)
		f.detach("va2")
		f.untilOf("va2", "is deleted", isDeleted)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		if r := f.Plugin.Calls(unpublish)[0].Request.(*csi.ControllerUnpublishVolumeRequest); r.VolumeId != handle || r.NodeId != "id-1" {
			t.Errorf("got %v", r)
		}
		if got := counts(unpublish); got != "1 of it, 1 of a CSI volume" {
			t.Error(got)
		}

		for name, migratedTo := range map[string]string{"pv3": gcePD, "pv4": "", "pv5": "other"} {
			f.volume(func(pv *corev1.PersistentVolume) {
				pv.Name, pv.Finalizers = f.Unique(name), []string{theirs, Finalizer(gcePD)}
				pv.Annotations = map[string]string{storagehelpers.AnnMigratedTo: migratedTo}
				if migratedTo == "" {
					pv.Annotations = nil
				}
				onGCE(pv)
			})
		}
		f.released("pv4", theirs, protection)
		f.released("pv5", theirs, protection)
		f.volume(func(pv *corev1.PersistentVolume) { // what came before it has been looked at when it is released
			pv.Name, pv.Finalizers = f.Unique("pv6"), []string{theirs, Finalizer(gcePD)}
			onGCE(pv)
		})
		f.released("pv6", theirs, protection)
		f.released("pv3", theirs, Finalizer(gcePD), protection)
	})
	t.Run("057_release_of_the_volume_refused", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var mu sync.Mutex
		var at []time.Time
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.patches(r, "pv1") {
				mu.Lock()
				at = append(at, time.Now())
				again := len(at) < 3
				mu.Unlock()
				if again {
					refuse(w)
					return
				}
			}
			pass.ServeHTTP(w, r)
		})
		f.volume(func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{theirs, Finalizer(f.Driver)} })
		f.deleteVolume("pv1")
		f.released("pv1", theirs, protection)
		mu.Lock()
		defer mu.Unlock()
		if len(at) != 3 || at[1].Sub(at[0]) < f.cfg.RetryIntervalStart || at[2].Sub(at[1]) < 2*f.cfg.RetryIntervalStart {
			t.Errorf("attempts at %v", at)
		}
	})
}

// errorCode is that of e, or "none".
func errorCode(e *storagev1.VolumeError) string {
	if e == nil || e.ErrorCode == nil {
		return "none"
	}
	return fmt.Sprint(*e.ErrorCode)
}
