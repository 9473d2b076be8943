package app

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestTerminationMessage is what Kubernetes shows of a container that ends with its driver.
func TestTerminationMessage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	plugin := csitest.Run(t, csitest.Config{})
	cfg := csiclient.DefaultConfig()
	cfg.Address, cfg.ExitOnConnectionLoss = plugin.Address(), true
	client, err := csiclient.New(cfg, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	plugin.Stop()
	if err := (&process{csi: client, terminationLog: file}).watchConnection(t.Context()); !errors.Is(err, csiclient.ErrConnectionLost) {
		t.Errorf("got %v", err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "Lost connection to CSI driver, exiting\n" {
		t.Errorf("%v: %q", err, text)
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
