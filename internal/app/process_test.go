package app

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
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
