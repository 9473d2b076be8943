// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestConformance(t *testing.T) {
	looptest.Conformance(t, looptest.Subject{
		Build: func(_ *looptest.Fixture, p looptest.Process, driver csi.ControllerClient, timeout time.Duration) (looptest.Loop, error) {
			cfg := DefaultConfig()
			cfg.Timeout, cfg.RetryIntervalStart, cfg.RetryIntervalMax = timeout, 50*time.Millisecond, 400*time.Millisecond
			return New(cfg, Deps{
				Driver: p.Driver, Client: p.Client, UnthrottledClient: p.Client, Metadata: p.Metadata, Informers: p.Informers, CSI: driver,
				Ready: p.CSI.WaitReady, Events: &record.FakeRecorder{}, Registry: p.Registry, Queues: p.Queues,
			})
		},
		Setup: func(f *looptest.Fixture) {
			_, err := f.Client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique("fast")}, Provisioner: f.Driver,
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Method: create,
		Work: func(f *looptest.Fixture, name string) {
			_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Create(f.Context(), &corev1.PersistentVolumeClaim{
				ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{storagehelpers.AnnStorageProvisioner: f.Driver}},
				Spec: corev1.PersistentVolumeClaimSpec{
					StorageClassName: ptr.To(f.Unique("fast")), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
						corev1.ResourceStorage: resource.MustParse("1Gi")}},
				},
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Result: func(ctx context.Context, f *looptest.Fixture, name string) (metav1.Object, error) {
			claim, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return nil, err
			}
			return f.Client.CoreV1().PersistentVolumes().Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
		},
	})
}
