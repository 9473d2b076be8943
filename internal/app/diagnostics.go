// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/serving"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/metrics"
)

// driverHealth checks the driver for --driver-health-endpoint, from before the first connection on.
type driverHealth struct {
	client atomic.Pointer[csiclient.Client]
}

func (h *driverHealth) check(ctx context.Context, timeout time.Duration) error {
	client := h.client.Load()
	if client == nil {
		return errors.New("not connected to the driver yet")
	}
	return client.CheckHealth(ctx, timeout)
}

// diagnostics is the HTTP server, if there is one, and what ends with it.
type diagnostics struct {
	server *metrics.Server      // nil: none
	files  *serving.Certificate // of the server; nil: it is self-signed, or there is none
	done   sync.WaitGroup
}

// serve starts the server before anything else, so that it shows what the start waits for.
func (p *process) serve(ctx context.Context) (*diagnostics, error) {
	cfg, d := p.serverConfig(p.registries), &diagnostics{}
	cfg.Handlers, cfg.Actions, p.page.checks = p.page.pages, p.page.actions(), d.checks
	p.page.granted = newPermissions(ctx, p.Config)
	cfg.DriverHealth = func(r *http.Request) error { return p.health.check(r.Context(), p.Common.ProbeTimeout) }
	if len(cfg.Endpoints) == 0 && cfg.HealthAddress == "" && cfg.ProfilingAddress == "" && cfg.DriverHealthAddress == "" {
		return d, nil
	}
	var err error
	if p.Common.SecureMetrics {
		config, err := restConfig(p.Config)
		if err == nil {
			cfg.Guard, err = newGuard(config, p.Version)
		}
		if err == nil {
			cfg.TLS, err = p.Common.TLS.Config(d.certificate(ctx, p.Common))
		}
		if err != nil {
			return nil, fmt.Errorf("--secure-metrics-server: %w", err)
		}
	}
	d.server, err = metrics.NewServer(cfg)
	if err != nil {
		return nil, err
	}
	if d.files != nil {
		d.ready("certificate", d.files.Ready)
	}
	d.done.Go(func() {
		if err := d.server.Run(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "HTTP server failed")
		}
	})
	return d, nil
}

// certificate returns that of the secure server. Until the files of a certificate are usable it is self-signed, so that probes of the
// kubelet are answered.
func (d *diagnostics) certificate(ctx context.Context, c settings.Common) serving.GetCertificate {
	own := &serving.SelfSigned{}
	if c.TLSCertFile == "" {
		return own.Get
	}
	files := &serving.Certificate{CertFile: c.TLSCertFile, KeyFile: c.TLSPrivateKeyFile, Flag: "--tls-cert-file"}
	files.Load(ctx)
	d.done.Go(func() { files.Run(ctx) })
	d.files = files
	return func(client *tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := files.Get(client)
		if err != nil {
			return own.Get(client)
		}
		return pair, nil
	}
}

// checks returns the results of all health checks.
func (d *diagnostics) checks() []statusz.Check {
	var checks []statusz.Check
	for _, r := range d.server.CheckResults(nil) {
		c := statusz.Check{Kind: r.Kind, Name: r.Name}
		var warning metrics.Warning
		if r.Err != nil && !errors.As(r.Err, &warning) { // the list of roles shows the warnings
			c.Error = r.Err.Error()
		}
		checks = append(checks, c)
	}
	return checks
}

// wait returns when the server has stopped, after its context has ended.
func (d *diagnostics) wait() { d.done.Wait() }

// ready adds a readiness check.
func (d *diagnostics) ready(name string, check func() error) {
	if d.server != nil {
		d.server.AddReady(name, func(*http.Request) error { return check() })
	}
}

// leaderElection adds a check of the renewal of a Lease.
func (d *diagnostics) leaderElection(name string, check func(*http.Request) error) {
	if d.server != nil {
		d.server.AddLeaderElection(name, check)
	}
}
