// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestConformance(t *testing.T) {
	looptest.Conformance(t, looptest.Subject{
		Build: func(_ *looptest.Fixture, p looptest.Process, driver csi.ControllerClient, timeout time.Duration) (looptest.Loop, error) {
			cfg := DefaultConfig()
			cfg.Timeout, cfg.RetryIntervalStart, cfg.RetryIntervalMax = timeout, 50*time.Millisecond, 400*time.Millisecond
			return New(cfg, Deps{
				Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: driver, Ready: p.CSI.WaitReady, Registry: p.Registry,
				Queues: p.Queues,
			})
		},
		Setup: func(f *looptest.Fixture) {
			_, err := f.Client.StorageV1().CSINodes().Create(f.Context(), &storagev1.CSINode{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique("n1")},
				Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: "id-1"}}},
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Method: publish,
		Work: func(f *looptest.Fixture, name string) {
			_, err := f.Client.CoreV1().PersistentVolumes().Create(f.Context(), &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)},
				Spec: corev1.PersistentVolumeSpec{
					AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
					PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
						Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume(name, 1<<30),
					}},
				},
			}, metav1.CreateOptions{})
			f.Must(err)
			_, err = f.Client.StorageV1().VolumeAttachments().Create(f.Context(), &storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)},
				Spec: storagev1.VolumeAttachmentSpec{
					Attacher: f.Driver, NodeName: f.Unique("n1"),
					Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.Unique(name))},
				},
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Result: func(ctx context.Context, f *looptest.Fixture, name string) (metav1.Object, error) {
			va, err := f.Client.StorageV1().VolumeAttachments().Get(ctx, f.Unique(name), metav1.GetOptions{})
			if err == nil && !va.Status.Attached {
				err = errors.New("not attached")
			}
			return va, err
		},
	})
}
