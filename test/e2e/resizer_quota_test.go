// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestExpansionWithinQuota: the API server refuses a size above the quota, and a size that the driver refuses
// can be replaced by a smaller one.
func TestExpansionWithinQuota(t *testing.T) {
	e := newEnv(t, resizable, 0)
	e.run("all", quick...)
	e.claim("c", e.expandableClass())
	e.bound("c")
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: corev1.ResourceQuotaSpec{
		Hard: corev1.ResourceList{corev1.ResourceRequestsStorage: resource.MustParse("3Gi")}}}
	quota, err := e.client.CoreV1().ResourceQuotas(e.ns).Create(t.Context(), quota, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard,
		Used: corev1.ResourceList{corev1.ResourceRequestsStorage: resource.MustParse("1Gi")}} // its controller does not run here
	if _, err := e.client.CoreV1().ResourceQuotas(e.ns).UpdateStatus(t.Context(), quota, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.eventually("the quota is in force", func(ctx context.Context) error { // a request that was allowed would use it up
		_, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Patch(ctx, "c", types.MergePatchType,
			[]byte(`{"spec":{"resources":{"requests":{"storage":"4Gi"}}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		if apierrors.IsForbidden(err) {
			return nil
		}
		return errors.Join(errors.New("4Gi were allowed"), err)
	})
	e.plugin.Next("ControllerExpandVolume", csitest.Fail(codes.OutOfRange, "too large"))
	e.request("c", "3Gi", "")
	e.eventually("the driver refuses the size", func(ctx context.Context) error {
		pvc, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, "c", metav1.GetOptions{})
		if err == nil &&
			pvc.Status.AllocatedResourceStatuses[corev1.ResourceStorage] != corev1.PersistentVolumeClaimControllerResizeInfeasible {
			err = fmt.Errorf("its status is %+v", pvc.Status)
		}
		return err
	})
	e.request("c", "2Gi", "")
	e.expanded("c", "2Gi")
}

// TestDriverRestartsDuringExpansion: the same size is requested again.
func TestDriverRestartsDuringExpansion(t *testing.T) {
	e := newEnv(t, resizable, 0)
	e.run("all", quick...)
	e.claim("c", e.expandableClass())
	e.bound("c")
	e.plugin.Next("ControllerExpandVolume", csitest.DoAndHang())
	e.request("c", "2Gi", "")
	e.wait("ControllerExpandVolume", 1)
	if err := e.plugin.Restart(nil); err != nil {
		t.Fatal(err)
	}
	e.expanded("c", "2Gi")
	for _, call := range e.plugin.Calls("ControllerExpandVolume") {
		if size := call.Request.(*csi.ControllerExpandVolumeRequest).GetCapacityRange().GetRequiredBytes(); size != 2<<30 {
			t.Errorf("size %d was requested", size)
		}
	}
}
