// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestConformance(t *testing.T) {
	looptest.Conformance(t, looptest.Subject{
		Plugin: csitest.Config{Capacity: 1 << 40, Segments: []map[string]string{{"t/zone": "a"}},
			Controller: []csi.ControllerServiceCapability_RPC_Type{
				csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
			}},
		Build: func(f *looptest.Fixture, p looptest.Process, driver csi.ControllerClient, timeout time.Duration) (looptest.Loop, error) {
			cfg := DefaultConfig()
			cfg.Timeout, cfg.RetryIntervalStart, cfg.RetryIntervalMax, cfg.QPS = timeout, 50*time.Millisecond, 400*time.Millisecond, 0
			return New(cfg, Deps{
				Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: driver, Ready: p.CSI.WaitReady,
				Registry: p.Registry, Queues: p.Queues, Namespace: f.Namespace,
			})
		},
		Setup: func(f *looptest.Fixture) {
			f.Must(kubetest.CreateNode(f.Context(), f.Client, kubetest.NodeSpec{
				Name: f.Unique("n1"), Labels: map[string]string{"t/zone": "a"}, Driver: f.Driver, TopologyKeys: []string{"t/zone"},
			}))
		},
		Method: getCapacity,
		Work: func(f *looptest.Fixture, name string) {
			_, err := f.Client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{
				ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)}, Provisioner: f.Driver,
				VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
			}, metav1.CreateOptions{})
			f.Must(err)
		},
		Result: func(ctx context.Context, f *looptest.Fixture, name string) (metav1.Object, error) {
			list, err := f.Client.StorageV1().CSIStorageCapacities(f.Namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return nil, err
			}
			for i := range list.Items {
				if list.Items[i].StorageClassName == f.Unique(name) {
					return &list.Items[i], nil
				}
			}
			return nil, fmt.Errorf("no CSIStorageCapacity for StorageClass %q", name)
		},
	})
}
