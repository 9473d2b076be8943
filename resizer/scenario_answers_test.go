// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// fails returns n failing steps.
func fails(n int, code codes.Code, message string) []csitest.Step {
	var steps []csitest.Step
	for range n {
		steps = append(steps, csitest.Fail(code, message))
	}
	return steps
}

// resizerScenarioAnswers: errors of the driver.
func resizerScenarioAnswers(t *testing.T) {
	t.Run("023_internal_twice", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, append(fails(2, codes.Internal, "x"), csitest.Hang())...)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 3)
		f.is("c1", "C=1Gi A=2Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		message := condition(f.claim("c1"), corev1.PersistentVolumeClaimControllerResizeError).Message
		if message != "failed to expand pvc with rpc error: code = Internal desc = x" {
			t.Errorf("message %q", message)
		}
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.distances(f.Plugin.Calls(expandMethod), f.cfg.RetryIntervalStart, 2*f.cfg.RetryIntervalStart)
		want := fmt.Sprintf("resize volume %q by resizer %q failed: rpc error: code = Internal desc = x", f.pvName("c1"), f.Driver)
		if got := f.events.messages(reasonResizeFailed); got != want+"\n"+want {
			t.Errorf("events %s", got)
		}
	})
	t.Run("024_internal_ten_times", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 10*time.Millisecond, 20*time.Millisecond })
		f.Plugin.Next(expandMethod, append(fails(10, codes.Internal, "x"), csitest.Hang())...)
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 11)
		f.wrote("c1 c1")
		f.sent("c1", "Resizing VolumeResizeFailed*10")
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.wrote("pv-c1 c1")
		f.called(strings.TrimSuffix(strings.Repeat("2Gi ", 11), " "))
	})
	t.Run("025_indeterminate", func(t *testing.T) {
		f := scenario(t, expands, nil)
		for _, code := range []codes.Code{codes.DeadlineExceeded, codes.Unavailable, codes.Canceled, codes.Aborted} {
			f.Plugin.Next(expandMethod, csitest.Fail(code, "x"))
		}
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 5)
		f.is("c1", "C=1Gi A=2Gi "+progress+" P=1Gi Resizing")
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi 2Gi 2Gi 2Gi")
		f.wrote("c1 pv-c1 c1")
		f.sent("c1", "Resizing VolumeResizeFailed*4 FileSystemResizeRequired")
	})
	t.Run("026_final", func(t *testing.T) {
		f := scenario(t, expands, nil)
		final := []codes.Code{codes.Unknown, codes.Unimplemented, codes.PermissionDenied, codes.FailedPrecondition}
		for _, code := range final {
			f.Plugin.Next(expandMethod, csitest.Fail(code, "x"))
		}
		f.Plugin.Next(expandMethod, csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 5)
		f.is("c1", "C=1Gi A=2Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		f.wrote("c1 c1 c1 c1 c1") // each code is news
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
	})
	for name, code := range map[string]codes.Code{
		"027_028_out_of_range": codes.OutOfRange, "027_028_invalid_argument": codes.InvalidArgument, "027_028_not_found": codes.NotFound,
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, func(c *Config) { c.RetryIntervalMax = 5 * time.Second }) // no third call before the process ends
			f.Plugin.Next(expandMethod, fails(2, code, "x")...)
			f.create("c1", nil)
			f.request("c1", "20Gi")
			f.Wait(expandMethod, 2)
			f.reaches("c1", "C=1Gi A=20Gi S=ControllerResizeInfeasible P=1Gi ControllerResizeError Resizing")
			f.distances(f.Plugin.Calls(expandMethod), f.cfg.RetryIntervalMax)
			f.wrote("c1 c1 c1 c1")
			f.sent("c1", "Resizing VolumeResizeFailed*2")
			f.drain()

			f.cfg.RetryIntervalMax = time.Hour
			f.spread = func(key) float64 { return 0.99 } // the wait of an earlier process ends late
			f.start()
			kubetest.Eventually(t, "the claim waits", func(context.Context) error {
				if n := f.samples("storage_controller_resizer_waiting", "reason", "infeasible"); n != 1 {
					return fmt.Errorf("%d claims wait", n)
				}
				return nil
			})
			f.request("c1", "4Gi")
			f.reaches("c1", "C=1Gi A=4Gi "+pending+" P=4Gi PRE=1Gi "+waitNode)
			f.called("20Gi 20Gi 4Gi")
		})
	}
	t.Run("029_slow_retry_times_out", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.Timeout = 2 * time.Second })
		f.Plugin.Next(expandMethod, csitest.Fail(codes.OutOfRange, "x"), csitest.DoAndHang(), csitest.Hang())
		f.create("c1", nil)
		f.request("c1", "20Gi")
		f.Wait(expandMethod, 2)
		f.is("c1", "C=1Gi A=20Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=20Gi "+pending+" P=20Gi PRE=1Gi "+waitNode)
		if got := f.sizes(""); !strings.HasPrefix(got, "20Gi 20Gi 20Gi") || strings.Contains(got, " 4Gi") {
			t.Errorf("calls %q", got)
		}
	})
	t.Run("030_full_backend", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.Plugin.Next(expandMethod, csitest.Fail(codes.ResourceExhausted, "full"))
		f.create("c1", nil)
		f.request("c1", "20Gi")
		f.reaches("c1", "C=1Gi A=20Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		f.request("c1", "4Gi")
		f.reaches("c1", "C=1Gi A=4Gi "+pending+" P=4Gi PRE=1Gi "+waitNode)
		f.called("20Gi 4Gi")
	})
	t.Run("031_back_off", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.RetryIntervalStart = 100 * time.Millisecond })
		f.Plugin.Always(expandMethod, csitest.Fail(codes.Internal, "x"))
		f.create("c1", nil)
		f.request("c1", "2Gi")
		for i := range 5 {
			f.Wait(expandMethod, i+1)
			f.patch("c1", fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"}}}`, i))
		}
		ms := time.Millisecond
		f.distances(f.Plugin.Calls(expandMethod), 100*ms, 200*ms, 400*ms, 400*ms)
	})
	t.Run("035_long_error", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.Plugin.Next(expandMethod, csitest.Fail(codes.Internal, strings.Repeat("ä", 2500)))
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+progress+" P=1Gi ControllerResizeError Resizing")
		for _, text := range []string{f.events.messages(reasonResizeFailed),
			condition(f.claim("c1"), corev1.PersistentVolumeClaimControllerResizeError).Message} {
			if len(text) > 1024 || len(text) < 1020 || !utf8.ValidString(text) {
				t.Errorf("%d bytes", len(text))
			}
		}
	})
}

// resizerScenarioWrites: writes that fail, and the changes of others.
func resizerScenarioWrites(t *testing.T) {
	t.Run("022_record_not_stored", func(t *testing.T) {
		f := scenario(t, expands, slowly)
		f.api.refuse(func(r *http.Request) *http.Response {
			if isWrite(r, "/status") {
				dropAllocated(t, r)
			}
			return nil
		})
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.sent("c1", "VolumeResizeFailed")
		f.drain()
		f.called("")
		f.wrote("c1")
	})
	t.Run("032_changed_before_the_first_write", func(t *testing.T) {
		f := scenario(t, expands, nil)
		var once sync.Once
		f.api.refuse(func(r *http.Request) *http.Response {
			if isWrite(r, "/status") {
				once.Do(func() {
					f.patch("c1", `{"metadata":{"labels":{"a":"b"}},"spec":{"resources":{"requests":{"storage":"3Gi"}}}}`)
				})
			}
			return nil
		})
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=3Gi "+pending+" P=3Gi PRE=1Gi "+waitNode)
		f.called("3Gi")
		f.sent("c1", "Resizing FileSystemResizeRequired")
		f.wrote("c1!409 c1 pv-c1 c1")
	})
	t.Run("033_label_during_the_call", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, csitest.Hang())
		var once sync.Once
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 1)
		f.api.refuse(func(r *http.Request) *http.Response {
			if isWrite(r, "/status") { // later than the watch can deliver it
				once.Do(func() { f.patch("c1", `{"metadata":{"labels":{"a":"b"}}}`) })
			}
			return nil
		})
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.sent("c1", "Resizing FileSystemResizeRequired")
		f.wrote("c1 pv-c1 c1!409 c1")
		f.called("2Gi")
		if got := f.claim("c1").Labels["a"]; got != "b" {
			t.Errorf("label %q", got)
		}
	})
	for name, tt := range map[string]struct {
		part          string
		nth           int
		writes, event string
	}{
		"034_volume_refused_once": {"/persistentvolumes/", 1, "c1 pv-c1!403 pv-c1 c1", "error updating pv"},
		"034_claim_refused_once":  {"/status", 2, "c1 pv-c1 c1!403 c1", "as node expansion required failed: "},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, nil)
			f.refuseOnce(tt.part, tt.nth)
			f.create("c1", nil)
			f.request("c1", "2Gi")
			f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
			f.drain()
			f.wrote(tt.writes)
			f.called("2Gi")
			f.sent("c1", "Resizing VolumeResizeFailed FileSystemResizeRequired")
			if got := f.events.messages(reasonResizeFailed); !strings.Contains(got, tt.event) {
				t.Errorf("events %q", got)
			}
		})
	}
	t.Run("034_refused_with_different_texts", func(t *testing.T) {
		f := scenario(t, expands, nil)
		var n atomic.Int32
		f.api.refuse(func(r *http.Request) *http.Response {
			if !isWrite(r, "/status") || n.Add(1) > 4 {
				return nil
			}
			return refusal(r, http.StatusForbidden, metav1.StatusReasonForbidden, fmt.Sprintf("exceeded quota: used %d", n.Load()))
		})
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.wrote("c1!403 c1!403 c1!403 c1!403 c1 pv-c1 c1")
		f.sent("c1", "VolumeResizeFailed Resizing FileSystemResizeRequired")
	})
	t.Run("036_what_others_write_survives", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.Plugin.Next(expandMethod, csitest.Hang())
		theirs := corev1.PersistentVolumeClaimConditionType("example.com/Theirs")
		f.create("c1", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Labels = map[string]string{"l": "1"}
			c.Annotations["a"], c.Annotations[annNodeExpansionNotRequired] = "1", "true"
			c.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Type: theirs, Status: corev1.ConditionFalse}}
			c.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{"example.com/other": pendingStatus}
			c.Status.AllocatedResources = corev1.ResourceList{"example.com/other": storage("1")[corev1.ResourceStorage]}
		})
		f.request("c1", "2Gi")
		f.Wait(expandMethod, 1)
		check := func() {
			t.Helper()
			c := f.claim("c1")
			if found := condition(c, theirs); c.Labels["l"] != "1" || c.Annotations["a"] != "1" || found == nil ||
				found.Status != corev1.ConditionFalse || c.Status.AllocatedResourceStatuses["example.com/other"] != pendingStatus {
				t.Errorf("got %+v", c)
			}
		}
		check()
		f.Plugin.Release()
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode+" example.com/Theirs")
		check()
	})
	t.Run("005_node_is_faster_than_the_watch", func(t *testing.T) {
		f := newFixture(t, expands, nil)
		var gate sync.Mutex // of the watch of PersistentVolumes
		f.Watch = kubetest.Proxy(t, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.URL.Query().Get("watch") != "" && strings.HasSuffix(r.URL.Path, "/persistentvolumes") {
				w = kubetest.GatedWriter{ResponseWriter: w, Gate: &gate}
			}
			pass.ServeHTTP(w, r)
		})
		f.start()
		f.create("c1", nil)
		f.create("fence", nil)
		gate.Lock()
		open := sync.OnceFunc(gate.Unlock)
		defer open()
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.nodeExpands("c1")
		f.request("fence", "2Gi")
		f.reaches("fence", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		open()
		f.reaches("c1", "C=2Gi A=2Gi P=2Gi")
		f.called("2Gi 2Gi")
		if got := f.api.take(); strings.Count(got, "pv-c1") != 2 { // with the record, and without it
			t.Errorf("the resizer wrote %q", got)
		}
	})
	t.Run("053_watch_is_late", func(t *testing.T) {
		f := newFixture(t, expands, nil)
		f.watch.refuse(func(r *http.Request) *http.Response {
			return nil
		})
		f.Watch = kubetest.Proxy(t, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.URL.Query().Get("watch") != "" && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims") {
				w = lateWriter{w}
			}
			pass.ServeHTTP(w, r)
		})
		f.start()
		f.create("c1", nil)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi")
		f.wrote("c1 pv-c1 c1")
		f.nodeExpands("c1")
		f.request("c1", "3Gi")
		f.reaches("c1", "C=2Gi A=3Gi "+pending+" P=3Gi PRE=2Gi "+waitNode)
		f.called("2Gi 3Gi")
		f.drain()
		f.called("2Gi 3Gi")
	})
}

const pendingStatus = nodePending

// lateWriter delays each write of a watch.
type lateWriter struct{ http.ResponseWriter }

// Write writes p later.
func (w lateWriter) Write(p []byte) (int, error) {
	<-time.After(time.Second)
	return w.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController flush the writer below.
func (w lateWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// dropAllocated removes the record of an expansion, as a mutating webhook may.
func dropAllocated(t *testing.T, r *http.Request) {
	var patch map[string]any
	if err := json.Unmarshal([]byte(bodyOf(t, r)), &patch); err != nil {
		t.Error(err)
		return
	}
	if status, ok := patch["status"].(map[string]any); ok {
		delete(status, "allocatedResources")
		delete(status, "allocatedResourceStatuses")
	}
	body, _ := json.Marshal(patch)
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
}

// bodyOf returns the body of r, which can be sent still.
func bodyOf(t *testing.T, r *http.Request) string {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Error(err)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return string(body)
}

// resizerScenarioInUse: volumes that are in use.
func resizerScenarioInUse(t *testing.T) {
	t.Run("056_attached", func(t *testing.T) {
		plugin := expands
		plugin.Controller = append(plugin.Controller[:1:1], canPublish)
		f := scenario(t, plugin, oneWorker)
		f.Plugin.Next(expandMethod, csitest.Fail(codes.FailedPrecondition, "in use"))
		f.create("c1", nil)
		f.attach("c1")
		f.request("c1", "2Gi")
		f.sent("c1", "Resizing VolumeResizeFailed*2")
		want := fmt.Sprintf("Unable to expand %s/c1 because CSI driver %s only supports offline expansion and volume is currently in-use",
			f.Namespace, f.Driver)
		if got := f.events.messages(reasonResizeFailed); !strings.HasSuffix(got, want) {
			t.Errorf("events %q", got)
		}
		f.api.take()
		f.looks(3)
		f.called("2Gi")
		f.wrote("")
		f.sent("c1", "Resizing VolumeResizeFailed*2")
		f.detach("c1")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi")
	})
	t.Run("056_detached_during_the_decision", func(t *testing.T) {
		plugin := expands
		plugin.Controller, plugin.Expansion = append(plugin.Controller[:1:1], canPublish), offline
		f := scenario(t, plugin, slowly)
		f.create("c1", nil)
		f.attach("c1")
		f.request("c1", "2Gi")
		f.sent("c1", "VolumeResizeFailed")
		k, term := keyOf(f.claim("c1"), expand), f.c.term.Load()
		a := &attempt{t: term, key: k}
		a.lock()
		s := term.gather(k, reads{})
		f.detach("c1")
		f.unused("c1")
		waits := a.isInUse(s)
		a.unlock()
		if s.usage != usageInUse || waits {
			t.Errorf("usage %v, waits %v", s.usage, waits)
		}
	})
	for name, ephemeral := range map[string]bool{"057_used_by_a_pod": false, "057_generic_ephemeral_volume": true} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, expands, slowly)
			f.Plugin.Next(expandMethod, csitest.Fail(codes.FailedPrecondition, "in use"))
			claim := "c1"
			if ephemeral {
				claim = "p-v"
			}
			f.create(claim, nil)
			f.pod(claim, ephemeral)
			f.c.cfg.RetryIntervalStart = time.Hour
			f.request(claim, "2Gi")
			f.sent(claim, "Resizing VolumeResizeFailed")
			f.wake(claim) // instead of the end of the back-off
			f.sent(claim, "Resizing VolumeResizeFailed*2")
			f.called("2Gi")
			f.endPod(corev1.PodSucceeded)
			f.reaches(claim, "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
			f.called("2Gi 2Gi")
		})
	}
	t.Run("058_online_driver", func(t *testing.T) {
		plugin := expands
		plugin.Expansion = online
		f := scenario(t, plugin, nil)
		f.Plugin.Next(expandMethod, fails(2, codes.FailedPrecondition, "policy")...)
		f.create("c1", nil)
		f.pod("c1", false)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi 2Gi")
		f.distances(f.Plugin.Calls(expandMethod), f.cfg.RetryIntervalStart, 2*f.cfg.RetryIntervalStart)
		if f.watch.has("/pods") {
			t.Error("the resizer reads pods")
		}
	})
	t.Run("059_offline_driver", func(t *testing.T) {
		plugin := expands
		plugin.Controller, plugin.Expansion = append(plugin.Controller[:1:1], canPublish), offline
		f := scenario(t, plugin, slowly)
		f.create("c1", nil)
		f.attach("c1")
		f.request("c1", "2Gi")
		f.sent("c1", "VolumeResizeFailed")
		f.wrote("")
		f.Calls(expandMethod, 0)
		f.detach("c1")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi")
	})
	t.Run("060_not_handled", func(t *testing.T) {
		f := scenario(t, expands, func(c *Config) { c.HandleVolumeInUseError = false })
		f.Plugin.Next(expandMethod, fails(3, codes.FailedPrecondition, "in use")...)
		f.create("c1", nil)
		f.pod("c1", false)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi 2Gi 2Gi")
		if f.watch.has("/pods") || f.watch.has("/volumeattachments") {
			t.Error("the resizer reads what may use the volume")
		}
	})
	t.Run("061_no_pods_are_listed", func(t *testing.T) {
		f := scenario(t, expands, nil)
		f.create("c1", nil)
		f.pod("c1", false)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		if f.watch.has("/pods") {
			t.Error("the resizer lists pods")
		}
	})
	t.Run("061_no_permission_for_pods", func(t *testing.T) {
		f := newFixture(t, expands, nil)
		f.watch.refuse(func(r *http.Request) *http.Response {
			if strings.Contains(r.URL.Path, "/pods") {
				return forbidden(r)
			}
			return nil
		})
		f.start()
		f.Plugin.Next(expandMethod, fails(2, codes.FailedPrecondition, "in use")...)
		f.create("c1", nil)
		f.pod("c1", false)
		f.request("c1", "2Gi")
		f.reaches("c1", "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode)
		f.called("2Gi 2Gi 2Gi")
		if !f.watch.has("/pods") {
			t.Error("the resizer did not try to read pods")
		}
	})
}

// pod creates the Pod p, which uses a claim, or has it as a generic ephemeral volume.
func (f *fixture) pod(claim string, ephemeral bool) {
	f.Helper()
	source := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}
	if ephemeral {
		source = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: storage("1Gi")},
			},
		}}}
	}
	_, err := f.Client.CoreV1().Pods(f.Namespace).Create(f.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "c", Image: "i"}}, Volumes: []corev1.Volume{{Name: "v", VolumeSource: source}},
		},
	}, metav1.CreateOptions{})
	f.Must(err)
}

// endPod sets the phase of the Pod p.
func (f *fixture) endPod(phase corev1.PodPhase) {
	f.Helper()
	_, err := f.Client.CoreV1().Pods(f.Namespace).Patch(f.Context(), "p", types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase), metav1.PatchOptions{}, "status")
	f.Must(err)
}
