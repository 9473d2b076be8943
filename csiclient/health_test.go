// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestCheckHealth(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, reg := newClient(t, p, nil)
	ready := func(value *wrapperspb.BoolValue) csitest.Step {
		return csitest.Alter(func(r *csi.ProbeResponse) { r.Ready = value })
	}
	check := func(name, want string, timeout time.Duration) {
		t.Helper()
		err := c.CheckHealth(t.Context(), timeout)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", name, err, want)
		}
	}
	check("not connected yet", "", limit)
	if n := samples(t, reg, "/csi.v1.Identity/Probe"); n != 1 {
		t.Errorf("the metric has %d calls of Probe without Connect, want 1", n)
	}
	connect(t, c)
	accepted, _ := p.Connections()
	p.Next("Probe", ready(nil), ready(wrapperspb.Bool(false)), csitest.Fail(codes.FailedPrecondition, "no license"))
	check("no value", "", limit)
	check("not ready", "driver responded but is not ready", limit)
	check("error", "no license", limit)
	if now, _ := p.Connections(); now != accepted+3 {
		t.Errorf("%d connections for 3 checks", now-accepted)
	}
	p.Next("Probe", csitest.Hang())
	check("driver hangs", "DeadlineExceeded", 100*time.Millisecond)
	p.Stop()
	check("driver has exited", "DeadlineExceeded", 100*time.Millisecond)
	if failed := c.Status().Failed; len(failed) > 0 {
		t.Errorf("health checks are among the failed calls: %+v", failed)
	}
	if n := samples(t, reg, "/csi.v1.Identity/Probe"); n != 7 { // one of them of Connect
		t.Errorf("the metric has %d calls of Probe, want 7", n)
	}
}

// TestConcurrentHealthChecks: however many clients ask, a driver that hangs has one connection.
func TestConcurrentHealthChecks(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	p.Always("Probe", csitest.Hang())
	const clients = 50
	results := make(chan error)
	for range clients {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			results <- c.CheckHealth(ctx, limit) // which continues when this client has left
		}()
	}
	for range clients {
		if err := <-results; err == nil {
			t.Error("a driver that hangs is healthy")
		}
	}
	if err := p.Wait(within(t), "Probe", 1); err != nil {
		t.Fatal(err)
	}
	if accepted, _ := p.Connections(); accepted != 1 {
		t.Errorf("%d connections for %d checks", accepted, clients)
	}
	p.Always("Probe", nil)
	p.Release()
	if err := c.CheckHealth(t.Context(), limit); err != nil {
		t.Error(err)
	}
}

// samples returns the number of calls of a method in csi_sidecar_operations_seconds.
func samples(t *testing.T, reg *prometheus.Registry, method string) (n uint64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if l.GetName() == "method_name" && l.GetValue() == method {
					n += m.Histogram.GetSampleCount()
				}
			}
		}
	}
	return n
}
