// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestConformance(t *testing.T) {
	conformance := func(t *testing.T, method string, changed func(*corev1.PersistentVolumeClaim, *looptest.Fixture),
		done func(*corev1.PersistentVolumeClaim) bool) {
		looptest.Conformance(t, looptest.Subject{
			Plugin: both,
			Build: func(_ *looptest.Fixture, p looptest.Process, driver csi.ControllerClient, timeout time.Duration) (looptest.Loop,
				error) {
				p.Informers.Retain(kube.RetainedFields{Resize: true})
				cfg := DefaultConfig()
				cfg.Timeout, cfg.RetryIntervalStart, cfg.RetryIntervalMax = timeout, 50*time.Millisecond, 400*time.Millisecond
				return New(cfg, Deps{
					Driver: p.Driver, Client: p.Client, Metadata: p.Metadata, Informers: p.Informers, CSI: driver, Ready: p.CSI.WaitReady,
					Events: &record.FakeRecorder{}, Registry: p.Registry, Queues: p.Queues,
				})
			},
			Setup: func(f *looptest.Fixture) {
				_, err := f.Client.StorageV1().VolumeAttributesClasses().Create(f.Context(), &storagev1.VolumeAttributesClass{
					ObjectMeta: metav1.ObjectMeta{Name: f.Unique("gold")}, DriverName: f.Driver, Parameters: map[string]string{"iops": "9"},
				}, metav1.CreateOptions{})
				f.Must(err)
			},
			Method: method,
			Work: func(f *looptest.Fixture, name string) {
				(&fixture{Fixture: f}).create(name, func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { changed(c, f) })
			},
			Result: func(ctx context.Context, f *looptest.Fixture, name string) (metav1.Object, error) {
				claim, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(ctx, name, metav1.GetOptions{})
				if err == nil && !done(claim) {
					err = errors.New(fmt.Sprint("not done: ", claim.Status))
				}
				return claim, err
			},
		})
	}
	t.Run("expand", func(t *testing.T) {
		conformance(t, expandMethod, func(c *corev1.PersistentVolumeClaim, _ *looptest.Fixture) {
			c.Spec.Resources.Requests = storage("2Gi")
		}, func(c *corev1.PersistentVolumeClaim) bool { return resizeStatus(c) == nodePending })
	})
	t.Run("modify", func(t *testing.T) {
		conformance(t, modifyMethod, func(c *corev1.PersistentVolumeClaim, f *looptest.Fixture) {
			c.Spec.VolumeAttributesClassName = ptr.To(f.Unique("gold"))
		}, func(c *corev1.PersistentVolumeClaim) bool { return currentClass(c) != "" })
	})
}
