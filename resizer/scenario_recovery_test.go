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
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

var (
	online  = []csi.PluginCapability_VolumeExpansion_Type{csi.PluginCapability_VolumeExpansion_ONLINE}
	offline = []csi.PluginCapability_VolumeExpansion_Type{csi.PluginCapability_VolumeExpansion_OFFLINE}
)

// attach creates a VolumeAttachment for the volume of a claim.
func (f *fixture) attach(claim string) {
	f.Helper()
	_, err := f.Client.StorageV1().VolumeAttachments().Create(f.Context(), &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique("va-" + claim)},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: f.Driver, NodeName: "n1",
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(f.pvName(claim))}},
	}, metav1.CreateOptions{})
	f.Must(err)
}

func (f *fixture) detach(claim string) {
	f.Helper()
	f.Must(f.Client.StorageV1().VolumeAttachments().Delete(f.Context(), f.Unique("va-"+claim), metav1.DeleteOptions{}))
}

// unused waits until the watch of the resizer has no VolumeAttachment for the volume of a claim.
func (f *fixture) unused(claim string) {
	f.Helper()
	kubetest.Eventually(f.T, "the detachment is watched", func(context.Context) error {
		if f.c.users.Load().inUse(f.pvName(claim), "") {
			return errors.New("the volume has a VolumeAttachment")
		}
		return nil
	})
}

// wake enqueues the expansion of a claim, which ends its back-off.
func (f *fixture) wake(claim string) { f.c.term.Load().queue.Add(keyOf(f.claim(claim), expand)) }

// looks has the resizer decide n times about c1, which waits.
func (f *fixture) looks(n int) {
	f.Helper()
	for range n {
		f.wake("c1")
		f.create(fmt.Sprintf("look-%d", time.Now().UnixNano()), nil) // any request
		kubetest.Eventually(f.T, "the queue is empty", func(context.Context) error {
			if l := f.c.term.Load().queue; l.Len() > 0 || l.Processing(keyOf(f.claim("c1"), expand)) {
				return fmt.Errorf("%d keys wait", l.Len())
			}
			return nil
		})
	}
}

// quota limits the requests for storage in the namespace. The test plays the controller that fills its status.
func (f *fixture) quota(hard string) {
	f.Helper()
	kubetest.NeedReal(f)
	quotas := f.Client.CoreV1().ResourceQuotas(f.Namespace)
	q, err := quotas.Create(f.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourceRequestsStorage: resource.MustParse(hard)}}},
		metav1.CreateOptions{})
	f.Must(err)
	q.Status = corev1.ResourceQuotaStatus{Hard: q.Spec.Hard,
		Used: corev1.ResourceList{corev1.ResourceRequestsStorage: resource.MustParse("1Gi")}}
	_, err = quotas.UpdateStatus(f.Context(), q, metav1.UpdateOptions{})
	f.Must(err)
}

// charged returns what a quota charges for a claim: the larger of its request and its allocated size.
func (f *fixture) charged(name string) string {
	f.Helper()
	claim := f.claim(name)
	size := requestedSize(claim)
	if allocated, ok := allocatedSize(claim); ok && allocated.Cmp(size) > 0 {
		size = allocated
	}
	return size.String()
}

// resizerScenarioRecovery: smaller and larger requests during an expansion.
func resizerScenarioRecovery(t *testing.T) {
	t.Run("037_quota", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.create("c1", nil)
		f.quota("20Gi")
		f.Plugin.Next(expandMethod, csitest.Fail(codes.OutOfRange, "x"))
		f.request("c1", "11Gi")
		f.reaches("c1", "C=1Gi A=11Gi S=ControllerResizeInfeasible P=1Gi ControllerResizeError Resizing")
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=4Gi "+pending+" P=4Gi PRE=1Gi "+waitNode)
		if got := f.charged("c1"); got != "4Gi" {
			t.Errorf("the quota charges %s", got)
		}
		f.called("11Gi 4Gi")
	})
	t.Run("038_final_error", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.Plugin.Next(expandMethod, csitest.Fail(codes.Internal, "x"))
		handle := f.create("c1", nil)
		f.request("c1", "11Gi")
		f.reaches("c1", "C=1Gi A=11Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		f.c.term.Load().volumeAdded(f.pv("c1")) // delivered late
		f.settles()
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=4Gi "+pending+" P=4Gi PRE=1Gi "+waitNode)
		if got := f.sizes(handle); got != "11Gi 4Gi" {
			t.Errorf("calls %q", got)
		}
	})
	t.Run("039_timeout", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.Timeout, c.ResizeTimeout = time.Hour, 2*time.Second })
		f.Plugin.Next(expandMethod, csitest.Hang(), csitest.Hang(), csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "11Gi")
		f.Wait(expandMethod, 1)
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=11Gi "+pending+" P=11Gi PRE=1Gi "+waitNode)
		f.called("11Gi 11Gi 11Gi 11Gi")
		if got := f.charged("c1"); got != "11Gi" {
			t.Errorf("the quota charges %s", got)
		}
		f.nodeExpands("c1")
		f.reaches("c1", "C=11Gi A=11Gi P=11Gi")
		f.called("11Gi 11Gi 11Gi 11Gi")
	})
	t.Run("040_042_larger_request", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.Timeout, c.Workers = 2*time.Second, 1 })
		f.Plugin.Next(expandMethod, csitest.Hang())
		handle := f.create("c1", nil)
		f.request("c1", "5Gi")
		f.Wait(expandMethod, 1)
		f.request("c1", "10Gi")
		f.reaches("c1", "C=1Gi A=5Gi "+pending+" P=5Gi PRE=1Gi "+waitNode)
		f.settles()
		if got := f.sizes(handle); got != "5Gi 5Gi" {
			t.Errorf("calls %q", got)
		}
		f.nodeExpands("c1")
		f.reaches("c1", "C=5Gi A=10Gi "+pending+" P=10Gi PRE=5Gi "+waitNode)
		if got := f.sizes(handle); got != "5Gi 5Gi 10Gi" {
			t.Errorf("calls %q", got)
		}
	})
	t.Run("041_restart_after_a_final_error", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.Plugin.Next(expandMethod, fails(2, codes.Internal, "x")...)
		f.create("c1", nil)
		f.request("c1", "11Gi")
		f.reaches("c1", "C=1Gi A=11Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		f.drain()
		f.request("c1", "4Gi")
		f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 50*time.Millisecond
		f.start()
		f.reaches("c1", "C=1Gi A=4Gi "+pending+" P=4Gi PRE=1Gi "+waitNode)
		f.called("11Gi 11Gi 4Gi")
	})
	t.Run("042_043_node_finishes_first", func(t *testing.T) {
		f := scenario(t, expands, oneWorker)
		handle := f.create("c1", nil)
		f.request("c1", "3Gi")
		f.reaches("c1", "C=1Gi A=3Gi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		f.api.take()
		f.request("c1", "2Gi") // lowered
		f.settles()
		f.is("c1", "C=1Gi A=3Gi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		f.request("c1", "10Gi")
		f.settles()
		f.is("c1", "C=1Gi A=3Gi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		if got := f.sizes(handle); got != "3Gi" {
			t.Errorf("calls %q", got)
		}
		f.nodeExpands("c1")
		f.reaches("c1", "C=3Gi A=10Gi "+pending+" P=10Gi PRE=3Gi "+waitNode)
		if got := f.sizes(handle); got != "3Gi 10Gi" {
			t.Errorf("calls %q", got)
		}
	})
	t.Run("042_kubelet_keeps_the_status", func(t *testing.T) {
		f := scenario(t, expands, nil)
		keeps := func() {
			f.status("c1", func(c *corev1.PersistentVolumeClaim) {
				c.Status.Capacity = c.Status.AllocatedResources
				removeConditions(c, expansionConditions...)
			})
		}
		f.create("c1", nil)
		f.request("c1", "3Gi")
		f.reaches("c1", "C=1Gi A=3Gi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		f.request("c1", "5Gi")
		keeps()
		f.reaches("c1", "C=3Gi A=5Gi "+pending+" P=5Gi PRE=3Gi "+waitNode)
		keeps()
		f.reaches("c1", "C=5Gi A=5Gi "+pending+" P=5Gi")
		f.drain()
		f.request("c1", "10Gi")
		f.start()
		f.reaches("c1", "C=5Gi A=10Gi "+pending+" P=10Gi PRE=5Gi "+waitNode)
		f.called("3Gi 5Gi 10Gi")
	})
}

// resizerScenarioNode: expansions that are infeasible on the node.
func resizerScenarioNode(t *testing.T) {
	t.Run("044_infeasible_on_the_node", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.create("c1", nil)
		f.request("c1", "9Gi")
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		f.drain()
		f.nodeFails("c1")
		f.request("c1", "5Gi")
		f.start()
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		f.called("9Gi 9Gi")
	})
	t.Run("045_infeasible_on_the_node_only", func(t *testing.T) {
		f := scenario(t, nodeOnly, nil)
		f.create("c1", nil)
		f.request("c1", "9Gi")
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		f.drain()
		f.api.take()
		f.nodeFails("c1")
		f.request("c1", "5Gi")
		begun := f.hold("/persistentvolumeclaims/", 1)
		f.start()
		<-begun
		f.is("c1", "C=1Gi A=9Gi S=NodeResizeInfeasible P=5Gi PRE=1Gi "+waitNode) // never larger than the volume
		f.restart()
		f.reaches("c1", "C=1Gi A=5Gi "+pending+" P=5Gi PRE=1Gi "+waitNode)
		f.wrote("pv-c1 c1")
	})
	t.Run("046_resets_are_slow", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.RetryIntervalMax = 2 * time.Second })
		f.create("c1", nil)
		f.request("c1", "9Gi")
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		for range 3 {
			f.nodeFails("c1")
			f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode)
		}
		f.Calls(expandMethod, 4)
		f.distances(f.Plugin.Calls(expandMethod)[1:], time.Second, time.Second) // a reset begins before its call
	})
}

// resizerScenarioRestart: the process exits between any two steps.
func resizerScenarioRestart(t *testing.T) {
	t.Run("047_048_killed_during_the_call", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "11Gi")
		f.Wait(expandMethod, 1)
		f.Crash()
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.request("c1", "4Gi")
		f.start()
		f.reaches("c1", "C=1Gi A=11Gi "+pending+" P=11Gi PRE=1Gi "+waitNode)
		f.called("11Gi 11Gi")
		f.wrote("c1 c1 pv-c1 c1")
	})
	t.Run("047_killed_during_a_modification_and_the_claim_requests_more", func(t *testing.T) {
		f := scenario(t, both, nil)
		f.classes()
		f.Plugin.Next(modifyMethod, csitest.Hang())
		f.create("c1", nil)
		f.requestClass("c1", "bronze")
		f.Wait(modifyMethod, 1)
		f.Crash()
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.requestClass("c1", "gold")
		f.request("c1", "2Gi")
		f.Plugin.Next(expandMethod, csitest.Hang()) // one write begins both operations
		f.start()
		f.Wait(modifyMethod, 3)
		f.modified("1 1 9")
	})
	t.Run("047_late_write_of_an_earlier_process", func(t *testing.T) {
		f := scenario(t, both, nil)
		f.Plugin.Next(expandMethod, csitest.Hang(), csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "11Gi")
		f.Wait(expandMethod, 1)
		f.Crash()
		f.Must(f.Plugin.WaitIdle(t.Context()))
		before := f.claim("c1")
		late := before.DeepCopy()
		setResizeStatus(late, controllerInfeasible)
		patch, err := patchOf(before, late)
		f.Must(err)
		f.start()
		f.Wait(expandMethod, 2)
		_, err = f.Client.CoreV1().PersistentVolumeClaims(before.Namespace).Patch(t.Context(), before.Name, types.StrategicMergePatchType,
			patch, metav1.PatchOptions{}, "status")
		if !apierrors.IsConflict(err) {
			t.Errorf("the record of the call that is repeated can be removed: %v", err)
		}
	})
	for name, tt := range map[string]struct {
		part   string
		nth    int
		before string
		writes string
	}{
		"047_killed_at_the_intent":            {"/status", 1, "C=1Gi P=1Gi", "c1 pv-c1 c1"},
		"049_killed_at_the_volume":            {"/persistentvolumes/", 1, "C=1Gi A=2Gi " + progress + " P=1Gi Resizing", "c1 c1 pv-c1 c1"},
		"050_killed_between_volume_and_claim": {"/status", 2, "C=1Gi A=2Gi " + progress + " P=2Gi PRE=1Gi Resizing", "c1 pv-c1 c1 c1"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, nil)
			begun := f.hold(tt.part, tt.nth)
			f.create("c1", nil)
			f.request("c1", "2Gi")
			<-begun
			f.is("c1", tt.before)
			f.restart()
			f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
			f.wrote(tt.writes)
			want := "2Gi 2Gi"
			if tt.nth == 1 && tt.part == "/status" {
				want = "2Gi"
			}
			f.called(want)
		})
	}
	t.Run("050_killed_between_volume_and_claim_and_the_repetition_needs_no_node", func(t *testing.T) {
		f := scenario(t, expands, nil)
		begun := f.hold("/status", 2)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		<-begun
		f.Plugin.Next(expandMethod, csitest.Alter(func(r *csi.ControllerExpandVolumeResponse) { r.NodeExpansionRequired = false }))
		f.restart()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi")
		f.nodeExpands("c1")
		f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
	})
	t.Run("051_record_of_an_earlier_claim", func(t *testing.T) {
		f := scenario(t, expands, oneWorker)
		recorded := func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			static(c, pv)
			pv.Annotations = map[string]string{annPreResize: "512Mi"}
		}
		f.create("c1", recorded)
		f.reaches("c1", "C=1Gi P=1Gi")
		f.create("c2", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			recorded(c, pv)
			pv.Spec.Capacity = storage("2Gi") // the node has not expanded it
		})
		f.settles()
		f.is("c2", "C=1Gi P=2Gi PRE=512Mi")
	})
	t.Run("050_killed_between_volume_and_claim_lowered", func(t *testing.T) {
		f := scenario(t, expands, nil)
		begun := f.hold("/status", 2)
		f.create("c1", nil)
		f.request("c1", "9Gi")
		<-begun
		f.request("c1", "5Gi")
		f.Plugin.Next(expandMethod, csitest.Fail(codes.Internal, "x"))
		f.restart()
		f.reaches("c1", "C=1Gi A=9Gi "+pending+" P=9Gi PRE=1Gi "+waitNode) // the volume has 9Gi
		f.called("9Gi 9Gi 9Gi")
		if got := f.charged("c1"); got != "9Gi" {
			t.Errorf("the quota charges %s", got)
		}
	})
	t.Run("051_killed_before_the_record_is_removed", func(t *testing.T) {
		f := scenario(t, expands, nil)
		begun := f.hold("/persistentvolumes/", 2)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.nodeExpands("c1")
		<-begun
		f.api.take()
		f.restart()
		f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
		f.wrote("pv-c1")
		f.called("2Gi")
	})
	t.Run("055_drained_during_the_call", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 1)
		stopped := make(chan struct{})
		go func() { defer close(stopped); f.drain() }()
		f.Plugin.Release()
		<-stopped
		f.is("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.wrote("c1 pv-c1 c1")
	})
}
