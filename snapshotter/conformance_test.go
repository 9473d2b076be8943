// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestConformance(t *testing.T) {
	looptest.Conformance(t, looptest.Subject{
		Plugin: csitest.Config{Controller: capabilities()},
		Build: func(_ *looptest.Fixture, p looptest.Process, driver csi.ControllerClient, timeout time.Duration) (looptest.Loop, error) {
			cfg := DefaultConfig()
			cfg.Timeout, cfg.RetryIntervalStart, cfg.RetryIntervalMax = timeout, 50*time.Millisecond, 400*time.Millisecond
			c, err := New(cfg, Deps{
				Driver: p.Driver, Client: p.Client, API: p.Requests, Watches: p.Watches, CSI: driver, GroupCSI: p.CSI.GroupController(),
				Ready: p.CSI.WaitReady, Events: &events{}, Registry: p.Registry, Queues: p.Queues,
			})
			return served{c}, err
		},
		Setup: func(f *looptest.Fixture) {
			kubetest.InstallCRDs(f, f.ControlPlane)
			_, err := typedClientsOf(f).classes.Create(f.Context(), &snapshotv1.VolumeSnapshotClass{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique("c1")}, Driver: f.Driver,
				DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Method: createSnapshot,
		Work: func(f *looptest.Fixture, name string) {
			_, err := typedClientsOf(f).contents.Create(f.Context(), &snapshotv1.VolumeSnapshotContent{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name), Finalizers: []string{Finalizer}},
				Spec: snapshotv1.VolumeSnapshotContentSpec{
					VolumeSnapshotRef: corev1.ObjectReference{Kind: "VolumeSnapshot", Namespace: f.Namespace, Name: name,
						UID: types.UID(name)},
					DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete, Driver: f.Driver,
					VolumeSnapshotClassName: ptr.To(f.Unique("c1")),
					Source:                  snapshotv1.VolumeSnapshotContentSource{VolumeHandle: ptr.To(f.Plugin.AddVolume(name, 1<<30))},
				},
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Result: func(ctx context.Context, f *looptest.Fixture, name string) (metav1.Object, error) {
			o, err := typedClientsOf(f).contents.Get(ctx, f.Unique(name), metav1.GetOptions{})
			if err == nil && !isComplete(o) {
				err = errors.New("not complete")
			}
			return o, err
		},
	})
}
