// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestTerminationMessage is what Kubernetes shows of a container that ends with its driver.
func TestTerminationMessage(t *testing.T) {
	draining, drain := context.WithCancelCause(t.Context())
	drain(workloop.ErrDrain)
	for name, tt := range map[string]struct {
		ctx        context.Context
		exitOnLoss bool
		want       error
		names      string // in the error
	}{
		"loss during the shutdown": {draining, true, nil, ""},
		"loss":                     {t.Context(), true, csiclient.ErrConnectionLost, ""},
		"another driver":           {t.Context(), false, csiclient.ErrDriverChanged, "other.example.com"},
	} {
		t.Run(name, func(t *testing.T) {
			plugin := csitest.Run(t, csitest.Config{})
			cfg := csiclient.DefaultConfig()
			cfg.Address, cfg.ExitOnConnectionLoss = plugin.Address(), tt.exitOnLoss
			client, err := csiclient.New(cfg, prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			if _, err := client.Connect(t.Context()); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				p := &process{csi: client}
				done <- p.watchConnection(tt.ctx, t.Context())
			}()
			if tt.exitOnLoss {
				plugin.Stop()
			} else if err := plugin.Restart(func(c *csitest.Config) { c.Name = "other.example.com" }); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, tt.want) || !strings.Contains(fmt.Sprint(err), tt.names) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// TestTracingThatDoesNotStart: the process returns the error although the watches run.
func TestTracingThatDoesNotStart(t *testing.T) {
	cp := kubetest.Get(t)
	ns := kubetest.Namespace(t, cp)
	plugin := csitest.Run(t, csitest.Config{Name: ns + ".example.com"})
	c := configOf(t, Attach, "--csi-address="+plugin.Address(), "--kubeconfig="+cp.Kubeconfig(),
		"--otlp-endpoint=http://[fe80::1%25en0]:4317")
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Run(t.Context()) }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("no error is returned")
		}
	case <-time.After(time.Minute):
		t.Fatal("the process hangs")
	}
}

// TestBuildThatFails: the collectors of a role that cannot be built are unregistered, so that it can be built again.
func TestBuildThatFails(t *testing.T) {
	registry := prometheus.NewRegistry()
	gauge := func() prometheus.Collector { return prometheus.NewGauge(prometheus.GaugeOpts{Name: "g", Help: "h"}) }
	for range 2 {
		a := &attempt{Registerer: registry}
		a.MustRegister(gauge())
		a.undo()
	}
	if err := registry.Register(gauge()); err != nil {
		t.Error(err)
	}
}

// TestDriverHealthEndpoint: the address answers as livenessprobe does, from before the connection on.
func TestDriverHealthEndpoint(t *testing.T) {
	plugin := csitest.Run(t, csitest.Config{})
	c := configOf(t, Attach, "--csi-address="+plugin.Address(), "--driver-health-endpoint=127.0.0.1:0", "--probe-timeout=10s")
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	p := newProcess(c)
	ctx, stop := context.WithCancel(t.Context())
	server, err := p.serve(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer server.wait()
	defer stop()
	p.server = server
	want := func(path string, code int, text string) {
		t.Helper()
		response, err := http.Get("http://" + server.server.Address() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != code || !strings.Contains(string(body), text) {
			t.Errorf("%s: %d %q, %v; want %d with %q", path, response.StatusCode, body, err, code, text)
		}
	}
	want("/healthz", http.StatusInternalServerError, "not connected to the driver yet")
	if err := p.connect(ctx); err != nil {
		t.Fatal(err)
	}
	defer p.csi.Close()
	want("/healthz", http.StatusOK, "ok")
	want("/metrics", http.StatusNotFound, "")
	if err := p.rolesReady(); err == nil {
		t.Error("ready before the roles are built")
	}
	plugin.Next("Probe", csitest.Alter(func(r *csi.ProbeResponse) { r.Ready = wrapperspb.Bool(false) }))
	want("/healthz", http.StatusInternalServerError, "driver responded but is not ready")
	plugin.Stop()
	want("/healthz", http.StatusInternalServerError, "DeadlineExceeded")
	if err := plugin.Restart(nil); err != nil {
		t.Fatal(err)
	}
	want("/healthz", http.StatusOK, "ok")
}

func TestDriverHealthNeedsAConnection(t *testing.T) {
	for args, want := range map[string]string{
		"--driver-health-endpoint=:9808":                                             "",
		"--driver-health-endpoint=:9808 --driver-name=a.b":                           "requires a connection",
		"--driver-health-endpoint=:9808 --driver-name=a.b --csi-address=/csi.socket": "",
		"--probe-timeout=0": "--probe-timeout: must be positive",
	} {
		err := configOf(t, Nodecontroller, strings.Fields(args)...).Validate()
		if got := fmt.Sprint(err); want == "" && strings.Contains(got, "driver-health") || want != "" && !strings.Contains(got, want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}

func TestWriteTerminationMessage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	WriteTerminationMessage(file, errors.New("outside of a container"))
	if _, err := os.Stat(file); err == nil {
		t.Error("the file was created")
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{errors.New("reading kubeconfig: no such file, which is a long text"), "reading kubeconfig: no such file, which is a long text\n"},
		{fmt.Errorf("csi: %w", csiclient.ErrConnectionLost), "Lost connection to CSI driver, exiting\n"},
	} {
		WriteTerminationMessage(file, tt.err)
		if text, err := os.ReadFile(file); err != nil || string(text) != tt.want {
			t.Errorf("%v: %q, %v", tt.err, text, err)
		}
	}
}
