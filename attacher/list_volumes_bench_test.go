// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// counting passes on the requests of a client and counts them.
type counting struct {
	http.RoundTripper
	requests *atomic.Int64
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Query().Get("watch") == "" { // watches are restarted from time to time
		c.requests.Add(1)
	}
	return c.RoundTripper.RoundTrip(r)
}

// settled is a controller whose many attachments are all attached. It reconciles only when
// a test calls reconcile.
type settled struct {
	testing.TB
	*term
	plugin   *csitest.Plugin
	requests atomic.Int64
}

func newSettled(tb testing.TB, volumes, pageSize int) *settled {
	tb.Helper()
	s := &settled{TB: tb}
	cp := kubetest.Get(tb)
	name := kubetest.Namespace(tb, cp)
	plugin := lists()
	plugin.Name, plugin.DiscardCalls = name+".example.com", true
	s.plugin = csitest.Run(tb, plugin)
	s.attachAll(cp.Client(), name, volumes)

	cfg := DefaultConfig()
	cfg.ReconcileSync, cfg.Resync, cfg.MaxEntries = 0, 0, pageSize
	counted := rest.CopyConfig(cp.Config())
	counted.Wrap(func(rt http.RoundTripper) http.RoundTripper { return counting{rt, &s.requests} })
	client, err := kubernetes.NewForConfig(counted)
	s.must(err)
	meta, err := metadata.NewForConfig(counted)
	s.must(err)
	reg := prometheus.NewRegistry()
	csiConfig := csiclient.DefaultConfig()
	csiConfig.Address = s.plugin.Address()
	driver, err := csiclient.New(csiConfig, reg)
	s.must(err)
	found, err := driver.Connect(tb.Context())
	s.must(err)
	informers := kube.NewInformers(client, meta, found.Name)
	c, err := New(
		cfg,
		Deps{
			Driver: found, Client: client, Informers: informers, CSI: driver.Controller(), Ready: driver.WaitReady,
			Registry: reg, Queues: workloop.NewMetrics(reg),
		},
	)
	s.must(err)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(tb.Context()))
	informers.Start(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
	}()
	tb.Cleanup(func() {
		cancel(errors.New("the test is over"))
		<-done
		informers.Shutdown()
		driver.Close()
	})
	kubetest.Eventually(tb, "it works", func(context.Context) error {
		if s.term = c.term.Load(); s.term == nil {
			return errors.New("it does not")
		}
		return nil
	})
	if n := len(s.c.attachments.ByIndex(kube.ByNode, name)); n != volumes {
		tb.Fatalf("%d attachments of the driver, want %d", n, volumes)
	}
	return s
}

func (s *settled) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// attachAll has everything as after an attach, at the driver and at the API server.
func (s *settled) attachAll(client kubernetes.Interface, name string, volumes int) {
	s.Helper()
	driver := s.plugin.Name()
	_, err := client.StorageV1().CSINodes().Create(s.Context(), &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: storagev1.CSINodeSpec{
			Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: "id-1"}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
	group, ctx := errgroup.WithContext(s.Context())
	group.SetLimit(32)
	for i := range volumes {
		one := fmt.Sprintf("%s-%d", name, i)
		handle := s.plugin.AddVolume(one, 1<<30)
		_, err := s.plugin.ControllerPublishVolume(ctx,
			&csi.ControllerPublishVolumeRequest{VolumeId: handle, NodeId: "id-1", VolumeCapability: &csi.VolumeCapability{
				AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			}})
		s.must(err)
		group.Go(func() error {
			_, err := client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Name: one, Finalizers: []string{Finalizer(driver)}},
				Spec: corev1.PersistentVolumeSpec{
					AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
					PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
					PersistentVolumeSource: corev1.PersistentVolumeSource{
						CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle},
					},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			va, err := client.StorageV1().VolumeAttachments().Create(ctx, &storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{
					Name: one, Finalizers: []string{Finalizer(driver)},
					Annotations: map[string]string{annNodeID: "id-1", annVolumeHandle: handle},
				},
				Spec: storagev1.VolumeAttachmentSpec{
					Attacher: driver, NodeName: name,
					Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(one)},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			va.Status.Attached = true
			_, err = client.StorageV1().VolumeAttachments().UpdateStatus(ctx, va, metav1.UpdateOptions{})
			return err
		})
	}
	s.must(group.Wait())
}

// costs runs reconcile and fails tb if that causes anything but pages ListVolumes calls for
// each of times.
func (s *settled) costs(tb testing.TB, pages int, reconcile func() (times int)) {
	tb.Helper()
	requests, listed := s.requests.Load(), s.plugin.Count(list)
	times := reconcile()
	if n := s.requests.Load() - requests; n != 0 {
		tb.Fatalf("%d API requests", n)
	}
	if n := s.plugin.Count(list) - listed; n != times*pages {
		tb.Fatalf("%d ListVolumes calls in %d reconciliations, want %d each", n, times, pages)
	}
	if n := s.plugin.Count(publish) + s.plugin.Count(unpublish) + s.vaQueue.Len(); n != 0 {
		tb.Fatalf("%d attachments were enqueued", n)
	}
	for _, reported := range []string{"published", "unpublished"} {
		if n := testutil.ToFloat64(s.c.metrics.mismatches.WithLabelValues(reported)); n != 0 {
			tb.Fatalf("%v attachments differ: %s", n, reported)
		}
	}
}

func TestReconcileCostsNoRequest(t *testing.T) {
	t.Parallel()
	s := newSettled(t, 200, 50)
	s.costs(t, 4, func() int {
		for range 3 {
			if err := s.reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return 3
	})
}

// BenchmarkReconcile reconciles 5000 attachments that agree with the driver. "whole"
// includes the driver, which runs in this process; "without_listing" is the controller alone.
func BenchmarkReconcile(b *testing.B) {
	s := newSettled(b, 5000, 500)
	b.Run("whole", func(b *testing.B) {
		b.ReportAllocs()
		s.costs(b, 10, func() int {
			for b.Loop() {
				if err := s.reconcile(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			return b.N
		})
	})
	b.Run("without_listing", func(b *testing.B) {
		reported := publishedVolumes{}
		if err := csiclient.EachVolume(b.Context(), s.c.deps.CSI, s.c.cfg.Timeout, s.c.cfg.MaxEntries, reported.add); err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		s.costs(b, 0, func() int {
			for b.Loop() {
				s.enqueueDifferences(b.Context(), reported)
			}
			return b.N
		})
	})
}
