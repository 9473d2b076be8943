// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

const isModifying = " ModifyingVolume"

// resizerScenarioModify: the course of a modification.
func resizerScenarioModify(t *testing.T) {
	for name, change := range map[string]func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume){
		"065_modify": nil, "065_modify_static": static,
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, modifies, nil)
			f.classes()
			f.Plugin.Next(modifyMethod, csitest.Hang())
			handle := f.create("c1", change)
			f.requestClass("c1", "gold")
			f.Wait(modifyMethod, 1)
			f.is("c1", "C=1Gi M=InProgress/gold P=1Gi"+isModifying)
			message := condition(f.claim("c1"), corev1.PersistentVolumeClaimVolumeModifyingVolume).Message
			if message != fmt.Sprintf("Modifying volume to %q is in progress.", f.Unique("gold")) {
				t.Errorf("message %q", message)
			}
			f.Plugin.Release()
			f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
			f.drain()
			f.wrote("c1 pv-c1 c1")
			f.sent("c1", "VolumeModify VolumeModifySuccessful")
			want := fmt.Sprintf("external resizer modified volume c1 with vac %s successfully", f.Unique("gold"))
			if got := f.events.messages(reasonModifySuccessful); got != want {
				t.Errorf("event %q", got)
			}
			r, ok := f.Plugin.Calls(modifyMethod)[0].Request.(*csi.ControllerModifyVolumeRequest)
			if !ok || r.VolumeId != handle || fmt.Sprint(r.MutableParameters) != "map[iops:9]" || r.Secrets != nil {
				t.Errorf("request %v", r)
			}
			f.Calls(modifyMethod, 1)
		})
	}
	t.Run("066_class_missing", func(t *testing.T) {
		f := scenario(t, modifies, slowly)
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi M=Pending/ P=1Gi")
		f.sent("c1", "VolumeModifyFailed")
		if got := f.events.messages(reasonModifyFailed); got != fmt.Sprintf("VAC %q does not exist.", f.Unique("gold")) {
			t.Errorf("event %q", got)
		}
		f.Calls(modifyMethod, 0)
		f.wrote("c1")
		f.classes()
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		f.modified("9")
	})
	t.Run("066_class_created_while_it_is_read", func(t *testing.T) {
		f := scenario(t, modifies, slowly)
		f.create("c1", nil)
		f.create("c2", nil)
		f.requestClass("c2", "bronze")
		f.reaches("c2", "C=1Gi M=Pending/ P=1Gi") // the classes are watched
		var read atomic.Bool
		f.api.refuse(func(r *http.Request) *http.Response {
			if !strings.HasSuffix(r.URL.Path, "/volumeattributesclasses/"+f.Unique("gold")) || !read.CompareAndSwap(false, true) {
				return nil
			}
			f.classes()
			f.reaches("c2", "C=1Gi K=bronze P=1Gi PV=bronze") // the event of gold was handled before
			return refusal(r, http.StatusNotFound, metav1.StatusReasonNotFound, "not created yet")
		})
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		f.modified("1 9")
	})
	t.Run("067_class_of_another_driver", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classOf("gold", "other.example.com", map[string]string{"iops": "9"})
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi M=Infeasible/gold P=1Gi ModifyVolumeError"+isModifying)
		f.sent("c1", "VolumeModifyFailed")
		want := fmt.Sprintf("VAC %q is for driver %q, not for %q.", f.Unique("gold"), "other.example.com", f.Driver)
		if got := f.events.messages(reasonModifyFailed); got != want {
			t.Errorf("event %q", got)
		}
		f.Calls(modifyMethod, 0)
		f.classOf("silver", f.Driver, map[string]string{"iops": "9"})
		f.requestClass("c1", "silver")
		f.reaches("c1", "C=1Gi K=silver P=1Gi PV=silver")
	})
	t.Run("074_metadata", func(t *testing.T) {
		f := scenario(t, modifies, func(c *Config) { c.ExtraModifyMetadata = true })
		f.classOf("gold", f.Driver, map[string]string{"iops": "9", parameterClaim: "user"})
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		r, ok := f.Plugin.Calls(modifyMethod)[0].Request.(*csi.ControllerModifyVolumeRequest)
		want := fmt.Sprint(map[string]string{"iops": "9", parameterClaim: "c1", parameterNamespace: f.Namespace,
			parameterVolume: f.pvName("c1")})
		if !ok || fmt.Sprint(r.MutableParameters) != want {
			t.Errorf("got %v", r)
		}
		class, err := f.Client.StorageV1().VolumeAttributesClasses().Get(t.Context(), f.Unique("gold"), metav1.GetOptions{})
		f.Must(err)
		if class.Parameters[parameterClaim] != "user" {
			t.Errorf("the class was changed to %v", class.Parameters)
		}
	})
	t.Run("075_secrets", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classes()
		f.secret("expand")
		f.secret("modify")
		want := map[string]string{}
		for name, annotations := range map[string]map[string]string{
			"modify": {volumerules.AnnModifySecretName: "modify", volumerules.AnnModifySecretNamespace: f.Namespace},
			"half":   {volumerules.AnnModifySecretName: "modify"},
			"expand": nil,
		} {
			handle := f.create(name, func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
				pv.Annotations = annotations
				pv.Spec.CSI.ControllerExpandSecretRef = &corev1.SecretReference{Namespace: f.Namespace, Name: "expand"}
			})
			if want[handle] = "map[k:expand]"; len(annotations) == 2 {
				want[handle] = "map[k:modify]"
			}
			f.requestClass(name, "gold")
			f.reaches(name, "C=1Gi K=gold P=1Gi PV=gold")
		}
		for _, c := range f.Plugin.Calls(modifyMethod) {
			if r, ok := c.Request.(*csi.ControllerModifyVolumeRequest); !ok || fmt.Sprint(r.Secrets) != want[r.VolumeId] {
				t.Errorf("secrets %v, want %s", r.Secrets, want[r.VolumeId])
			}
		}
	})
	t.Run("075_secret_missing", func(t *testing.T) {
		f := scenario(t, modifies, slowly)
		f.classes()
		f.create("c1", func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Annotations = map[string]string{volumerules.AnnModifySecretName: "s", volumerules.AnnModifySecretNamespace: f.Namespace}
		})
		f.requestClass("c1", "gold")
		f.sent("c1", "VolumeModifyFailed")
		f.wrote("")
		f.Calls(modifyMethod, 0)
	})
	t.Run("076_claim_refused_once", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classes()
		f.refuseOnce("/status", 2)
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi K=gold P=1Gi PV=gold")
		f.Calls(modifyMethod, 1)
		f.wrote("c1 pv-c1 c1!403 c1")
		f.sent("c1", "VolumeModify VolumeModifyFailed VolumeModifySuccessful")
	})
}

// resizerScenarioModifyAnswers: errors of the driver, and other classes meanwhile.
func resizerScenarioModifyAnswers(t *testing.T) {
	t.Run("068_069_infeasible_and_back", func(t *testing.T) {
		f := scenario(t, modifies, func(c *Config) { c.RetryIntervalMax = 5 * time.Second }) // no third call before the process ends
		f.classes()
		f.create("c1", func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			c.Spec.VolumeAttributesClassName, c.Status.CurrentVolumeAttributesClassName = ptr.To(f.Unique("bronze")),
				ptr.To(f.Unique("bronze"))
			pv.Spec.VolumeAttributesClassName = ptr.To(f.Unique("bronze"))
		})
		f.Plugin.Next(modifyMethod, fails(2, codes.InvalidArgument, "too much")...)
		f.requestClass("c1", "gold")
		f.Wait(modifyMethod, 2)
		f.reaches("c1", "C=1Gi K=bronze M=Infeasible/gold P=1Gi PV=bronze ModifyVolumeError"+isModifying)
		f.distances(f.Plugin.Calls(modifyMethod), f.cfg.RetryIntervalMax)
		claim := f.claim("c1")
		message := condition(claim, corev1.PersistentVolumeClaimVolumeModifyingVolume).Message
		if message != fmt.Sprintf("Modifying volume to %q failed. Waiting for retry.", f.Unique("gold")) {
			t.Errorf("message %q", message)
		}
		if e := condition(claim, corev1.PersistentVolumeClaimVolumeModifyVolumeError); e.Reason != "InvalidArgument" ||
			e.Message != "too much" {
			t.Errorf("condition %+v", e)
		}
		f.drain()
		f.cfg.RetryIntervalMax = time.Hour
		f.start()
		f.requestClass("c1", "bronze")
		f.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		f.modified("9 9 1")
	})
	t.Run("070_infeasible_and_canceled", func(t *testing.T) {
		f := scenario(t, modifies, slowly)
		f.classes()
		f.Plugin.Next(modifyMethod, csitest.Fail(codes.InvalidArgument, "too much"))
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi M=Infeasible/gold P=1Gi ModifyVolumeError"+isModifying)
		f.patch("c1", `{"spec":{"volumeAttributesClassName":null}}`)
		f.reaches("c1", "C=1Gi M=Infeasible/gold P=1Gi ModifyVolumeError")
		f.sent("c1", "VolumeModify VolumeModifyFailed VolumeModifyCanceled")
		f.Calls(modifyMethod, 1)
	})
	t.Run("071_indeterminate", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classes()
		f.Plugin.Next(modifyMethod, csitest.Fail(codes.Aborted, "busy"), csitest.Fail(codes.Aborted, "busy"), csitest.Hang())
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.Wait(modifyMethod, 1)
		f.requestClass("c1", "bronze")
		f.Wait(modifyMethod, 3)
		f.is("c1", "C=1Gi M=InProgress/gold P=1Gi ModifyVolumeError"+isModifying)
		message := condition(f.claim("c1"), corev1.PersistentVolumeClaimVolumeModifyingVolume).Message
		if message != fmt.Sprintf("Modifying volume to %q is still in progress.", f.Unique("gold")) {
			t.Errorf("message %q", message)
		}
		if writes := strings.ReplaceAll(f.api.take(), "c1!409 ", ""); writes != "c1 c1" { // the second error is equal
			t.Errorf("writes %q", writes)
		}
		if got := f.events.messages(reasonModifyFailed); !strings.HasSuffix(got, ". Still modifying to VAC "+f.Unique("gold")) {
			t.Errorf("events %q", got)
		}
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		f.modified("9 9 9 1")
	})
	for name, tt := range map[string]struct {
		second csitest.Step
		want   string
	}{
		"071_indeterminate_and_canceled_ok": {csitest.Hang(), "C=1Gi K=gold P=1Gi PV=gold"},
		"071_indeterminate_and_canceled_infeasible": {csitest.Fail(codes.InvalidArgument, "x"),
			"C=1Gi M=Infeasible/gold P=1Gi ModifyVolumeError"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, modifies, nil)
			f.classes()
			f.Plugin.Next(modifyMethod, csitest.Hang())
			f.create("c1", nil)
			f.requestClass("c1", "gold")
			f.Wait(modifyMethod, 1)
			f.patch("c1", `{"spec":{"volumeAttributesClassName":null}}`)
			f.Plugin.Next(modifyMethod, tt.second)
			f.restart()
			f.Wait(modifyMethod, 2)
			f.Plugin.Release()
			f.reaches("c1", tt.want)
			f.modified("9 9")
		})
	}
	for name, code := range map[string]codes.Code{
		"072_internal": codes.Internal, "072_out_of_range": codes.OutOfRange, "072_not_found": codes.NotFound,
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, modifies, slowly)
			f.classes()
			f.Plugin.Next(modifyMethod, csitest.Fail(code, "x"))
			f.create("c1", nil)
			f.requestClass("c1", "gold")
			f.reaches("c1", "C=1Gi M=InProgress/gold P=1Gi ModifyVolumeError"+isModifying)
			f.requestClass("c1", "bronze")
			f.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
			f.modified("9 1")
		})
	}
	t.Run("073_restart", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classes()
		f.Plugin.Next(modifyMethod, csitest.Hang())
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.Wait(modifyMethod, 1)
		f.Crash()
		f.requestClass("c1", "bronze")
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.start()
		f.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		f.modified("9 9 1")
	})
	t.Run("073_restart_and_the_class_is_deleted", func(t *testing.T) {
		f := scenario(t, modifies, nil)
		f.classes()
		f.Plugin.Next(modifyMethod, csitest.Hang())
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.Wait(modifyMethod, 1)
		f.Crash()
		f.requestClass("c1", "bronze")
		f.Must(f.Client.StorageV1().VolumeAttributesClasses().Delete(t.Context(), f.Unique("gold"), metav1.DeleteOptions{}))
		f.patchClass("gold", `{"metadata":{"finalizers":null}}`)
		f.Must(f.Plugin.WaitIdle(t.Context()))
		f.start()
		f.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		f.modified("9 1")
		f.sent("c1", "VolumeModify*2 VolumeModifyFailed VolumeModifySuccessful")
	})
}

// resizerScenarioBoth: expansion and modification of one claim, and drivers with one of them.
func resizerScenarioBoth(t *testing.T) {
	t.Run("077_expand_and_modify", func(t *testing.T) {
		f := scenario(t, both, nil)
		f.classes()
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.Plugin.Next(modifyMethod, csitest.Hang())
		f.create("c1", nil)
		f.patch("c1", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"2Gi"}},"volumeAttributesClassName":%q}}`, f.Unique("gold")))
		f.Wait(expandMethod, 1)
		f.Wait(modifyMethod, 1)
		f.is("c1", "C=1Gi A=2Gi "+progress+" M=InProgress/gold P=1Gi"+isModifying+" Resizing")
		f.wrote("c1")
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" K=gold P=2Gi PRE=1Gi PV=gold "+waitNode)
		f.drain()
		writes := strings.Fields(f.api.take())
		if len(writes) != 4 || strings.Contains(fmt.Sprint(writes), "!") {
			t.Errorf("writes %v", writes)
		}
		f.Calls(expandMethod, 1)
		f.Calls(modifyMethod, 1)
		for _, reason := range []string{reasonResizing, reasonNodeResizeRequired, reasonModify, reasonModifySuccessful} {
			if n := strings.Count(f.events.reasons("c1"), reason+" ") + strings.Count(f.events.reasons("c1")+" ", " "+reason+" "); n == 0 {
				t.Errorf("events %q", f.events.reasons("c1"))
			}
		}
	})
	t.Run("077_one_fails", func(t *testing.T) {
		f := scenario(t, both, slowly)
		f.classes()
		modified := make(chan struct{}) // the events of the modification may repeat an expansion that has failed before
		f.Plugin.Next(expandMethod, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			<-modified
			return csitest.Fail(codes.Internal, "x")(ctx, p, request, do)
		})
		f.create("c1", nil)
		f.patch("c1", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"2Gi"}},"volumeAttributesClassName":%q}}`, f.Unique("gold")))
		f.reaches("c1", "C=1Gi A=2Gi "+progress+" K=gold P=1Gi PV=gold Resizing")
		close(modified)
		f.reaches("c1", "C=1Gi A=2Gi "+progress+" K=gold P=1Gi PV=gold ControllerResizeError Resizing")
		f.wake("c1")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" K=gold P=2Gi PRE=1Gi PV=gold "+waitNode)
		f.Calls(modifyMethod, 1)
		f.Calls(expandMethod, 2)
	})
	for name, tt := range map[string]struct{ refused, reaches, event string }{
		"077_expansion_refused":    {`"allocatedResources":`, "C=1Gi K=gold P=1Gi PV=gold", "VolumeResizeFailed"},
		"077_modification_refused": {`"modifyVolumeStatus":`, "C=1Gi A=2Gi " + pending + " P=2Gi PRE=1Gi " + waitNode, "VolumeModifyFailed"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, both, slowly)
			f.classes()
			f.api.refuse(func(r *http.Request) *http.Response {
				if isWrite(r, "/status") && strings.Contains(bodyOf(t, r), tt.refused) {
					return forbidden(r)
				}
				return nil
			})
			f.create("c1", nil)
			f.patch("c1", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"2Gi"}},"volumeAttributesClassName":%q}}`, f.Unique("gold")))
			f.reaches("c1", tt.reaches)
			f.drain()
			if got := f.events.reasons("c1"); strings.Count(got, "Failed") != 1 || !strings.Contains(got, tt.event) {
				t.Errorf("events %q, want one failure: %s", got, tt.event)
			}
		})
	}
	t.Run("077_the_modification_begins", func(t *testing.T) {
		plugin := both
		plugin.Controller, plugin.Expansion = append(plugin.Controller[:2:2], canPublish), offline
		f := scenario(t, plugin, func(c *Config) { slowly(c); oneWorker(c) })
		f.classes()
		f.create("c1", static)
		f.attach("c1")
		f.request("c1", "11Gi")
		f.sent("c1", "VolumeResizeFailed") // it is in use
		var once sync.Once
		f.api.refuse(func(r *http.Request) *http.Response {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/c1") {
				once.Do(func() { f.detach("c1"); f.unused("c1") }) // the worker has begun the modification
			}
			return nil
		})
		f.Plugin.Next(expandMethod, csitest.Fail(codes.Internal, "x"))
		f.requestClass("c1", "gold")
		f.reaches("c1", "C=1Gi A=11Gi "+progress+" K=gold P=1Gi PV=gold ControllerResizeError Resizing")
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=4Gi "+pending+" K=gold P=4Gi PRE=1Gi PV=gold "+waitNode)
		f.called("11Gi 4Gi")
		f.drain()
		if got := f.charged("c1"); got != "4Gi" {
			t.Errorf("the quota charges %s", got)
		}
	})
	t.Run("078_no_permission_for_classes", func(t *testing.T) {
		f := newFixture(t, both, nil)
		f.classes()
		f.api.refuse(func(r *http.Request) *http.Response {
			if strings.Contains(r.URL.Path, "/volumeattributesclasses") {
				return forbidden(r)
			}
			return nil
		})
		f.start()
		if err := f.c.Ready(); err == nil || !strings.Contains(err.Error(), "refused by the test") {
			t.Errorf("readiness %v", err)
		}
		f.create("c1", nil)
		f.patch("c1", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"2Gi"}},"volumeAttributesClassName":%q}}`, f.Unique("gold")))
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.Calls(modifyMethod, 0)
		f.restart() // the permission is granted
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" K=gold P=2Gi PRE=1Gi PV=gold "+waitNode)
		if err := f.c.Ready(); err != nil {
			t.Error(err)
		}
	})
	t.Run("078_classes_cannot_be_listed", func(t *testing.T) {
		f := newFixture(t, both, nil)
		f.api.refuse(func(r *http.Request) *http.Response {
			if strings.HasSuffix(r.URL.Path, "/volumeattributesclasses") {
				return refusal(r, http.StatusInternalServerError, metav1.StatusReasonInternalError, "the test fails")
			}
			return nil
		})
		f.start()
		if err := f.c.Ready(); err == nil || !strings.Contains(err.Error(), "the test fails") {
			t.Errorf("readiness %v", err)
		}
	})
	t.Run("078_gate_is_off", func(t *testing.T) {
		f := scenario(t, both, func(c *Config) { c.VolumeAttributesClass, c.Workers = false, 1 })
		f.classes()
		f.create("c1", nil)
		f.requestClass("c1", "gold")
		f.settles()
		f.is("c1", "C=1Gi P=1Gi")
		f.Calls(modifyMethod, 0)
	})
	t.Run("080_metrics_and_watches", func(t *testing.T) {
		f := scenario(t, both, nil)
		f.classes()
		f.create("c1", nil)
		f.patch("c1", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"2Gi"}},"volumeAttributesClassName":%q}}`, f.Unique("gold")))
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" K=gold P=2Gi PRE=1Gi PV=gold "+waitNode)
		f.drain()
		for _, method := range []string{expandMethod, modifyMethod} {
			if n := f.samples("csi_sidecar_operations_seconds", "driver_name", f.Driver, "method_name", "/csi.v1.Controller/"+method,
				"grpc_status_code", "OK"); n != 1 {
				t.Errorf("%d calls of %s in the metrics, want 1", n, method)
			}
		}
		if n := f.samples("workqueue_adds_total", "name", f.Driver+"-pvc"); n < 2 {
			t.Errorf("%d keys were queued, want 2 at least", n)
		}
		for _, operation := range []string{"expand", "modify"} {
			if n := f.samples("storage_controller_resize_duration_seconds", "operation", operation); n != 1 {
				t.Errorf("%d of %s, want 1", n, operation)
			}
		}
		f.watch.mu.Lock()
		defer f.watch.mu.Unlock()
		for _, path := range f.watch.reads {
			if path != "/api/v1/persistentvolumeclaims" && path != "/api/v1/persistentvolumes" {
				t.Errorf("watch of %s", path)
			}
		}
	})
}

// patchClass patches a VolumeAttributesClass.
func (f *fixture) patchClass(name, patch string) {
	f.Helper()
	kubetest.Eventually(f.T, "the class is patched", func(ctx context.Context) error {
		_, err := f.Client.StorageV1().VolumeAttributesClasses().Patch(ctx, f.Unique(name), types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		return err
	})
}
