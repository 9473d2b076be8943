// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const publish, unpublish = "ControllerPublishVolume", "ControllerUnpublishVolume"

// TestAttacherScenario is the scenarios of the attacher that are about the process,
// under either of its names. Those about attachments and volumes are beside the attacher.
func TestAttacherScenario(t *testing.T) {
	t.Parallel()
	attacherScenarioStart(t)
	attacherScenarioConnection(t)
	attacherScenarioReplicas(t)
	attacherScenarioNumbers(t)
	attacherScenarioEnd(t)
	attacherScenarioRestart(t)
}

// attacherScenarioStart: what happens until the driver is known.
func attacherScenarioStart(t *testing.T) {
	t.Run("068_not_ready_at_first", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		e.notReadyAtFirst(e.linked("csi-attacher"))
	})
	for name, tt := range map[string]struct {
		method string
		code   codes.Code
	}{
		"068_probe_fails":                {"Probe", codes.FailedPrecondition},
		"068_probe_says_unavailable":     {"Probe", codes.Unavailable}, // the socket is open
		"068_identity_fails":             {"GetPluginInfo", codes.Unavailable},
		"068_plugin_capabilities_fail":   {"GetPluginCapabilities", codes.Internal},
		"068_controller_capability_fail": {"ControllerGetCapabilities", codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newEnv(t, csitest.Config{}, 0).failsAtFirst("attach", tt.method, tt.code)
		})
	}
	t.Run("068_probe_is_not_implemented", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		e.plugin.Next("Probe", csitest.Fail(codes.Unimplemented, "I am broken"))
		e.run("attach").fails("Probe", "I am broken")
		e.calls("Probe", 1)
	})
	t.Run("068_identity_without_a_name", func(t *testing.T) {
		t.Parallel()
		newEnv(t, csitest.Config{}, 0).needsAName("attach")
	})
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"070_no_workers":          {[]string{"-worker-threads=0"}, "--worker-threads"},
		"070_no_timeout":          {[]string{"-timeout", "0s"}, "--timeout"},
		"070_no_delay":            {[]string{"-retry-interval-start=0s"}, "--retry-interval-start"},
		"070_no_longest_delay":    {[]string{"-retry-interval-max=-1s"}, "--retry-interval-max"},
		"070_negative_comparison": {[]string{"-reconcile-sync=-1s"}, "--reconcile-sync"},
		"070_negative_page":       {[]string{"-max-entries", "-1"}, "--max-entries"},
		"070_page_too_large":      {[]string{"-max-entries=2147483648"}, "max-entries: must be at most 2147483647"},
		"070_two_addresses": {[]string{"-http-endpoint=127.0.0.1:0", "-metrics-address=127.0.0.1:0"},
			"--http-endpoint and --metrics-address"},
		"070_unknown_gate": {[]string{"-feature-gates=Nope=true"}, `--feature-gates: unknown gate "Nope"`},
		"070_renewal_longer_than_lease": {[]string{"-leader-election", "-leader-election-renew-deadline=20s"},
			"--leader-election-lease-duration"},
		"070_retry_longer_than_renewal": {[]string{"-leader-election", "-leader-election-retry-period=9s"},
			"--leader-election-renew-deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 0)
			e.refuses(e.linked("csi-attacher", tt.args...), tt.says)
		})
	}
}

// attacherScenarioConnection: the driver goes away.
func attacherScenarioConnection(t *testing.T) {
	t.Run("069_driver_restarts", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		p := e.start(e.linked("csi-attacher", quick...))
		e.attach("before", e.volume("before"), e.nodes[0])
		e.attached(1)
		e.plugin.Next(publish, csitest.DoAndHang())
		e.attach("running", e.volume("running"), e.nodes[0])
		e.wait(publish, 2)
		e.plugin.Stop()
		p.says("Lost the connection to the driver")
		e.attach("meanwhile", e.volume("meanwhile"), e.nodes[0])
		e.detach("before")
		if err := e.plugin.Start(e.plugin.Address()); err != nil {
			t.Fatal(err)
		}
		e.attached(2)
		e.agrees(3)
		p.lives()
		e.calls(publish, 4) // that one twice
		e.calls(unpublish, 1)
		for _, method := range []string{"Probe", "GetPluginInfo", "ControllerGetCapabilities"} {
			e.calls(method, 2)
		}
	})
	t.Run("069_driver_restarts_exit_wanted", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		args := append([]string{"-exit-on-connection-loss"}, quick...)
		p := e.start(e.linked("csi-attacher", args...))
		e.plugin.Next(publish, csitest.DoAndHang())
		e.attach("running", e.volume("v"), e.nodes[0])
		e.wait(publish, 1)
		e.plugin.Stop()
		p.fails("lost the connection to the driver at " + e.plugin.Address())
		if err := e.plugin.Start(e.plugin.Address()); err != nil {
			t.Fatal(err)
		}
		e.run("attach", args...) // as the kubelet would
		e.attached(1)
		e.agrees(1)
		e.calls(publish, 2)
	})
}

// attacherScenarioReplicas: two processes and one Lease. Each has a driver of its own, by
// which it is seen who calls.
func attacherScenarioReplicas(t *testing.T) {
	t.Run("071_the_holder_is_killed", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		other := csitest.Run(t, csitest.Config{Name: e.plugin.Name()})
		volumes := map[string]string{}
		for _, name := range []string{"before", "running", "later"} {
			volumes[name] = e.volume(name)
			other.AddVolume(name, 1<<30) // with the same ID
		}
		args := append([]string{"-leader-election-labels=team:storage,tier:one", "-leader-election-labels", "stage:test"}, election...)
		first := e.start(e.linked("csi-attacher", args...))
		e.leads(first, e.attacherLease())
		second := e.start(e.linked("csi-attacher", append(args, "-http-endpoint=127.0.0.1:0", "-csi-address="+other.Address())...))
		second.says("Attempting to acquire leader lease")
		e.attach("before", volumes["before"], e.nodes[0])
		e.attached(1)
		if status, body := second.get("/healthz/leader-election"); status != http.StatusOK {
			t.Errorf("the replica without the Lease is unwell: %d %s", status, body)
		}
		if n := other.Count(publish); n > 0 {
			t.Errorf("the replica without the Lease published %d volumes", n)
		}
		e.plugin.Next(publish, csitest.DoAndHang())
		e.attach("running", volumes["running"], e.nodes[0])
		e.wait(publish, 2)
		first.kill()
		before, err := e.lease(t.Context(), e.attacherLease())
		if err != nil {
			t.Fatal(err)
		}
		e.attach("later", volumes["later"], e.nodes[0])
		e.attached(3)
		after := e.leads(second, e.attacherLease())
		e.calls(publish, 2)
		if n := other.Count(publish); n != 2 {
			t.Errorf("the replica with the Lease published %d volumes, want 2", n)
		}
		took := after.Spec.AcquireTime.Sub(before.Spec.RenewTime.Time)
		if most := leaseDuration + retryPeriod + 30*time.Second; took < leaseDuration || took > most { // the rest is for a busy machine
			t.Errorf("taken over %v after it was renewed, want no less than %v and no more than %v", took, leaseDuration, most)
		}
		leases, err := e.client.CoordinationV1().Leases(e.ns).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(leases.Items) != 1 {
			t.Fatalf("%v: %d Leases", err, len(leases.Items))
		}
		if want := map[string]string{"team": "storage", "tier": "one", "stage": "test"}; !maps.Equal(leases.Items[0].Labels, want) {
			t.Errorf("labels of the Lease: %v, want %v", leases.Items[0].Labels, want)
		}
	})
}

// attacherScenarioNumbers checks the HTTP endpoints.
func attacherScenarioNumbers(t *testing.T) {
	t.Run("072_metrics", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
			csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		}}, 1)
		e.plugin.Next(publish, csitest.Fail(codes.Internal, "broken"))
		e.plugin.Next(unpublish, csitest.Fail(codes.Internal, "broken"))
		p := e.start(e.linked("csi-attacher", append([]string{"-http-endpoint=127.0.0.1:0", "-leader-election", "-reconcile-sync=1h"},
			quick...)...))
		e.attach("a", e.volume("v"), e.nodes[0])
		e.attached(1)
		e.detach("a")
		e.attached(0)
		want := map[string]family{
			"csi_sidecar_operations_seconds": e.called("Identity/Probe OK", "Identity/GetPluginInfo OK",
				"Identity/GetPluginCapabilities OK",
				"Controller/ControllerGetCapabilities OK", "Controller/ListVolumes OK", "Controller/ControllerPublishVolume OK",
				"Controller/ControllerPublishVolume Internal", "Controller/ControllerUnpublishVolume OK",
				"Controller/ControllerUnpublishVolume Internal"),
			"storage_controller_attach_failures_total": {[]string{"grpc_status_code=Internal operation=attach",
				"grpc_status_code=Internal operation=detach"},
				dto.MetricType_COUNTER, nil},
			"storage_controller_attach_comparisons_total": {[]string{"result=error", "result=ok"}, dto.MetricType_COUNTER, nil},
		}
		maps.Copy(want, ofEveryRole(e.attacherLease(), "csi-attacher-pv", "csi-attacher-va"))
		p.shows(want)
		for _, m := range p.metrics()["csi_sidecar_operations_seconds"].GetMetric() {
			if n := m.GetHistogram().GetSampleCount(); n != 1 {
				t.Errorf("%s was observed %d times, want once", labelsOf(m), n)
			}
		}
		for metric, want := range map[string]float64{
			"leader_election_master_status name=" + e.attacherLease(): 1,
			"workqueue_depth name=csi-attacher-va":                    0,
			"workqueue_retries_total name=csi-attacher-va":            2,
			"workqueue_retries_total name=csi-attacher-pv":            0,
		} {
			name, labels, _ := strings.Cut(metric, " ")
			e.eventually(fmt.Sprintf("%s is %v", metric, want), func(context.Context) error { // the deletion is an event, too
				if got := p.value(name, labels); got != want {
					return fmt.Errorf("it is %v", got)
				}
				return nil
			})
		}
		if status, body := p.get("/healthz/leader-election"); status != http.StatusOK || body != "ok" {
			t.Errorf("unwell: %d %s", status, body)
		}
	})
	for name, tt := range map[string]struct {
		args []string
		want map[string]int // paths and how they are answered
	}{
		"072_deprecated_address": {[]string{"-metrics-address=127.0.0.1:0", "-metrics-path=/numbers", "-leader-election"},
			map[string]int{"/numbers": http.StatusOK, "/healthz/leader-election": http.StatusOK, "/metrics": http.StatusNotFound}},
		"072_without_election": {[]string{"-http-endpoint=127.0.0.1:0"},
			map[string]int{"/metrics": http.StatusOK, "/healthz/leader-election": http.StatusNotFound}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 0)
			p := e.start(e.linked("csi-attacher", tt.args...))
			for path, want := range tt.want {
				if status, body := p.get(path); status != want {
					t.Errorf("%s: %d %s, want %d", path, status, body, want)
				}
			}
		})
	}
}

// attacherScenarioEnd: the process is told to stop.
func attacherScenarioEnd(t *testing.T) {
	t.Run("073_told_to_stop", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		// Who waited for the next attempt to win the Lease, or for its end, would wait for long.
		args := append([]string{"-leader-election", "-leader-election-lease-duration=5m", "-leader-election-renew-deadline=4m",
			"-leader-election-retry-period=2m"}, quick...)
		first := e.start(e.linked("csi-attacher", args...))
		e.leads(first, e.attacherLease())
		second := e.start(e.linked("csi-attacher", args...))
		second.says("Attempting to acquire leader lease")
		e.attach("leaves", e.volume("leaves"), e.nodes[0])
		e.attached(1)
		e.plugin.Next(publish, csitest.Hang())
		e.plugin.Next(unpublish, csitest.Hang())
		e.attach("comes", e.volume("comes"), e.nodes[0])
		e.detach("leaves")
		e.wait(publish, 2)
		e.wait(unpublish, 1)

		second.signal(syscall.SIGTERM)
		if code := second.codeWithin(30 * time.Second); code != 0 {
			t.Errorf("the replica without the Lease: exit code %d, want 0", code)
		}
		first.lives()
		e.leads(first, e.attacherLease())

		first.signal(syscall.SIGTERM)
		first.says("Shutting down")
		e.attach("later", e.volume("later"), e.nodes[0])
		e.plugin.Release()
		if code := first.code(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if va := e.attachment("comes"); va == nil || !va.Status.Attached {
			t.Errorf("the call has ended, and the attachment is %+v", va)
		}
		if va := e.attachment("leaves"); va != nil {
			t.Errorf("the call has ended, and the attachment is %+v", va)
		}
		if va := e.attachment("later"); va == nil || va.Finalizers != nil || va.Status.Attached {
			t.Errorf("work was begun after the signal: %+v", va)
		}
		lease, err := e.lease(t.Context(), e.attacherLease())
		if err != nil || ptr.Deref(lease.Spec.HolderIdentity, "") != "" {
			t.Errorf("%v: the Lease is not released: %+v", err, lease)
		}
		e.start(e.linked("csi-attacher", args...))
		e.attached(2)
		e.agrees(3)
		e.calls(publish, 3)
		e.calls(unpublish, 1)
	})
	t.Run("073_the_driver_never_answers", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		p := e.start(e.linked("csi-attacher", "-timeout=2s"))
		e.plugin.Next(publish, csitest.Hang())
		e.attach("a", e.volume("v"), e.nodes[0])
		e.wait(publish, 1)
		p.signal(syscall.SIGTERM)
		if code := p.code(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		va := e.attachment("a")
		if failed := va.Status.AttachError; failed == nil || !strings.Contains(failed.Message, "DeadlineExceeded") || va.Finalizers == nil {
			t.Errorf("the attachment is %+v", va)
		}
		e.calls(publish, 1)
	})
	t.Run("073_a_second_signal", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 1)
		p := e.start(e.linked("csi-attacher", "-timeout=10m"))
		e.plugin.Next(publish, csitest.Hang())
		e.attach("a", e.volume("v"), e.nodes[0])
		e.wait(publish, 1)
		p.signal(syscall.SIGTERM)
		p.says("Shutting down")
		p.lives()
		p.signal(syscall.SIGTERM)
		if code := p.code(); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
	})
}

// attachment is nil when there is none of that name.
func (e *env) attachment(name string) *storagev1.VolumeAttachment {
	e.t.Helper()
	va, err := e.client.StorageV1().VolumeAttachments().Get(e.t.Context(), e.ns+"-"+name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		e.t.Fatal(err)
	}
	return va
}

// attacherScenarioRestart: many attachments wait for a process.
func attacherScenarioRestart(t *testing.T) {
	t.Run("074_slow_list_of_csinodes", func(t *testing.T) {
		t.Parallel()
		const n = 100
		e := newEnv(t, csitest.Config{}, 1)
		args := append([]string{"-kube-api-qps=200", "-kube-api-burst=400", "-http-endpoint=127.0.0.1:0"}, quick...)
		e.plugin.Always(publish, csitest.Hang())
		first := e.start(e.linked("csi-attacher", args...))
		e.parallel(n, func(i int) { e.attach(fmt.Sprint("a", i), e.volume(fmt.Sprint("v", i)), e.nodes[0]) })
		e.wait(publish, 80) // of the 100 workers, as many as a node may hold: no other call is on its way
		first.kill()
		e.plugin.Always(publish, nil)
		before := e.plugin.Count(publish)

		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		list, err := e.client.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		// The API server ends watches whose client is slow.
		watch, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
			WatchFuncWithContext: e.client.StorageV1().VolumeAttachments().Watch})
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Stop()
		listed := make(chan struct{})
		proxy := kubetest.Proxy(t, e.account(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if strings.HasSuffix(r.URL.Path, "/csinodes") {
				select {
				case <-listed:
				case <-r.Context().Done():
				}
			}
			pass.ServeHTTP(w, r)
		})
		second := e.start(e.linked("csi-attacher", append(args, "-kubeconfig="+kubetest.WriteKubeconfig(t, proxy))...))
		e.eventually("the CSINodes are all that it waits for", func(context.Context) error {
			status, body := second.get("/readyz")
			if status == http.StatusOK || !strings.Contains(body, "waiting for the first list of csinodes\n") {
				return fmt.Errorf("%d: %s", status, body)
			}
			return nil
		})
		time.AfterFunc(2*time.Second, func() { close(listed) }) // in which workers that do not wait fail

		attached := map[string]bool{}
		for event := range watch.ResultChan() {
			va, ok := event.Object.(*storagev1.VolumeAttachment)
			if !ok {
				t.Fatalf("%v", event)
			}
			if va.Spec.Attacher != e.plugin.Name() {
				continue
			}
			if failed := va.Status.AttachError; failed != nil && strings.Contains(strings.ToLower(failed.Message), "csinode") {
				t.Fatalf("%s: %s", va.Name, failed.Message)
			}
			if va.Status.Attached {
				attached[va.Name] = true
			}
			if len(attached) == n {
				break
			}
		}
		if len(attached) != n {
			t.Fatalf("%d of %d are attached", len(attached), n)
		}
		e.agrees(n)
		e.calls(publish, before+n)
	})
}
