// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestAlertsWhereTheDriverHangs: calls have no deadline to speak of, one worker waits for the
// driver, and everything else waits for the worker.
func TestAlertsWhereTheDriverHangs(t *testing.T) {
	t.Parallel()
	e, p, h := watched(t, "--timeout=1h", "--worker-threads=1", "--capacity-threads=1")
	class := e.class(false, nil)
	e.claim("c", class)
	e.bound("c")
	e.pool("late", nil)
	e.published(2)
	h.minute(p, "a")
	h.cluster(e, class)
	h.fires(t)

	e.plugin.Always("CreateVolume", csitest.Hang())
	e.plugin.Always("GetCapacity", csitest.Hang())
	const claims = 103 // one is worked on, and a hundred are still no alert
	e.parallel(claims, func(i int) {
		if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(t.Context(), newClaim(fmt.Sprint("waits-", i), class),
			metav1.CreateOptions{}); err != nil {
			t.Error(err)
		}
	})
	e.eventually("all claims but one wait", func(context.Context) error {
		if waiting := p.value("workqueue_depth", "name=claims"); waiting < claims-1 {
			return fmt.Errorf("%v do", waiting)
		}
		return nil
	})
	h.Clocks = []string{"workqueue_longest_running_processor_seconds", "storage_controller_capacity_oldest_seconds"}
	for range 2 { // that they are clocks is seen, not assumed
		before := p.metrics()
		h.minute(p, "a")
		e.eventually("what hangs gets older by a second", func(context.Context) error {
			now := p.metrics()
			for _, name := range h.Clocks {
				if older := greatest(now[name]) - greatest(before[name]); older < 1 {
					return fmt.Errorf("%s has grown by %v", name, older)
				}
			}
			return nil
		})
	}
	h.cluster(e, class)
	h.fires(t, "CapacityOld", "ClaimsPending", "QueueGrows", "WorkStuck")

	// Which call it is stands where the runbook sends its reader.
	if status, body := p.get("/statusz?format=json"); status != 200 || !strings.Contains(body, "CreateVolume") {
		t.Errorf("/statusz: %d %s", status, body)
	}
}

// TestAlertsWhereTheDriverIsSlow: attaching takes more than a minute. This goes by while the
// test waits for its turn to run beside others.
func TestAlertsWhereTheDriverIsSlow(t *testing.T) {
	e := newEnv(t,
		csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME}}, 1)
	e.restarted = true // tests that run before those in parallel restart the API server
	p := e.run("attach", "--http-endpoint=127.0.0.1:0", "--timeout=3m")
	h := newHistory()
	e.attach("first", e.volume("first"), e.nodes[0])
	e.attached(1)
	h.minute(p, "a")
	e.attach("quick", e.volume("quick"), e.nodes[0])
	e.attached(2)
	h.minute(p, "a")
	e.plugin.Next("ControllerPublishVolume", csitest.Delay(time.Minute+time.Second))
	e.attach("slow", e.volume("slow"), e.nodes[0])
	e.wait("ControllerPublishVolume", 3)
	t.Parallel()
	h.fires(t)

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := e.plugin.WaitIdle(ctx); err != nil {
		t.Fatal(err)
	}
	e.attached(3)
	h.minute(p, "a")
	h.fires(t, "AttachSlow", "DriverSlow")
}

// greatest is the greatest value of a gauge.
func greatest(family *dto.MetricFamily) (value float64) {
	for _, m := range family.GetMetric() {
		value = max(value, m.GetGauge().GetValue())
	}
	return value
}

// TestAlertAboutOneAttachmentThatFails: once it has failed for a while it is tried every five
// minutes only. What fails for a few minutes and then succeeds is not worth an alert.
func TestAlertAboutOneAttachmentThatFails(t *testing.T) {
	t.Parallel()
	e := newEnv(t,
		csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME}}, 1)
	p, h := e.run("attach", slices.Concat(quick, []string{"--http-endpoint=127.0.0.1:0", "--timeout=5m"})...), newHistory()
	answer := make(chan codes.Code) // of the next call, which waits for it
	e.plugin.Always("ControllerPublishVolume", func(ctx context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
		select {
		case code := <-answer:
			if code == codes.OK {
				return do()
			}
			return nil, status.Error(code, "broken")
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	})
	fails := func() {
		const name, labels = "storage_controller_attach_failures_total", "grpc_status_code=Internal operation=attach"
		before := p.value(name, labels)
		answer <- codes.Internal
		e.eventually("the failure is counted", func(context.Context) error {
			if n := p.value(name, labels); n != before+1 {
				return fmt.Errorf("%v are", n)
			}
			return nil
		})
	}
	e.attach("slow", e.volume("slow"), e.nodes[0])
	for range 4 {
		h.minute(p, "a")
		fails()
	}
	answer <- codes.OK
	e.attached(1)
	for range 2 {
		h.minute(p, "a")
	}
	h.fires(t)

	h.now += int64(longest.Seconds())
	h.minute(p, "a")
	e.attach("stuck", e.volume("stuck"), e.nodes[0])
	for range 12 {
		fails()
		for range 5 {
			h.minute(p, "a")
		}
	}
	h.fires(t, "AttachFails", "DriverFails")
}
