// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/go-logr/zapr"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestHealthPort: like livenessprobe, the subcommand refuses only another port than the default beside --http-endpoint.
func TestHealthPort(t *testing.T) {
	for port, refused := range map[string]bool{"9808": false, "9809": true} {
		fs := pflag.NewFlagSet("livenessprobe", pflag.ContinueOnError)
		RegisterLivenessprobe(fs)
		if err := fs.Parse([]string{"--health-port=" + port, "--http-endpoint=:9810"}); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadLivenessprobe(fs); (err != nil) != refused {
			t.Errorf("port %s: %v", port, err)
		}
	}
}

// TestFailedHealthCheck: the log has the error, because the event of the kubelet has only the status code.
func TestFailedHealthCheck(t *testing.T) {
	plugin := csitest.Run(t, csitest.Config{})
	fs := pflag.NewFlagSet("livenessprobe", pflag.ContinueOnError)
	RegisterLivenessprobe(fs)
	if err := fs.Parse([]string{"--csi-address=" + plugin.Address(), "--http-endpoint=127.0.0.1:0"}); err != nil {
		t.Fatal(err)
	}
	l, err := ReadLivenessprobe(fs)
	if err != nil {
		t.Fatal(err)
	}
	core, entries := observer.New(zapcore.InfoLevel)
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), zapr.NewLogger(zap.New(core))))
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, "v1") }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var address string
	kubetest.Eventually(t, "it serves", func(context.Context) error {
		for _, e := range entries.FilterMessage("Serving metrics and health").All() {
			address = e.ContextMap()["address"].(string)
			return nil
		}
		return errors.New("it does not")
	})
	for _, status := range []int{http.StatusOK, http.StatusInternalServerError} {
		response, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != status {
			t.Errorf("status %d, want %d", response.StatusCode, status)
		}
		plugin.Always("Probe", csitest.Fail(codes.Internal, "no disks"))
	}
	if n := entries.FilterMessage("Health check of the driver failed").Len(); n != 1 {
		t.Errorf("the failure was logged %d times: %v", n, entries.All())
	}
}
