// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/fips140"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
)

// tracingGrace bounds the export of the last spans at shutdown.
const tracingGrace = 5 * time.Second

// process is one run of the program.
type process struct {
	Config
	registries registries
	server     *diagnostics
	page       *status
	own        *ownDriver        // nil unless the process serves the driver
	csi        *csiclient.Client // nil if no role calls the driver
	health     driverHealth
	driver     csiclient.Driver
	terms      atomic.Pointer[terms] // nil until the roles are built
}

func newProcess(c Config) *process {
	return &process{
		Config: c, registries: newRegistries(c.Version, c.endpoints()), server: &diagnostics{}, page: newStatus(c),
	}
}

// Run runs the roles until ctx ends, or until an error occurs that no retry fixes. Components stop in the
// reverse order of their start: the workers first, the HTTP server last.
func (c Config) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	log.Info("Starting", "version", c.Version, "fips140", fips140.Enabled())
	for _, gate := range c.gatesWithoutEffect() {
		log.Info("Feature gate has no effect", "featureGate", gate)
	}
	for _, note := range c.Notes {
		log.Info(note)
	}
	limitMemory(ctx)
	ctx = kube.WithSecretNamespaces(ctx, c.Common.SecretNamespaces)
	p := newProcess(c)
	// Services outlive the workers that use them.
	services, stopServices := context.WithCancel(context.WithoutCancel(ctx))
	server, err := p.serve(services)
	if err != nil {
		stopServices()
		return err
	}
	p.server = server
	defer server.wait()
	server.done.Go(func() { (&reloader{cfg: c, page: p.page}).run(services) })
	defer stopServices()
	// The metrics of its connection are those of the roles: only its calls are served.
	probe, err := c.livenessprobe.listen(prometheus.NewRegistry(), prometheus.NewRegistry())
	if err != nil {
		return err
	}
	server.done.Go(func() { probe.run(services) })
	server.ready("shutdown", func() error { // the first to fail, so that no more requests are sent here
		if ctx.Err() != nil {
			return errors.New("the process is shutting down")
		}
		return nil
	})
	server.ready("roles", p.rolesReady)
	config, err := restConfig(c)
	if err != nil {
		return err
	}
	if c.service {
		p.own, err = p.startDriver(ctx)
		if err != nil {
			return err
		}
		defer p.own.close(ctx)
		server.ready("csidriver", p.own.service.CheckCSIDriver)
	}
	err = p.connect(ctx)
	if p.csi != nil {
		defer p.csi.Close()
	}
	if err != nil {
		if errors.Is(context.Cause(ctx), workloop.ErrDrain) {
			return nil
		}
		return err
	}
	terms, err := p.build(ctx, services, config)
	if err != nil {
		return ignoreDrain(ctx, err)
	}
	defer terms.stop()
	defer stopServices() // stop waits for the watches
	return p.work(ctx, services, stopServices, terms)
}

// rolesReady is [terms.rolesReady], and fails before that.
func (p *process) rolesReady() error {
	if t := p.terms.Load(); t != nil {
		return t.rolesReady()
	}
	return errors.New("the roles are not built yet")
}

// work runs the terms until they end, or the connection to the driver does. Then it stops the services.
func (p *process) work(ctx, services context.Context, stopServices func(), terms *terms) error {
	log := klog.FromContext(ctx)
	traced, stopTracing, err := tracing.Start(ctx, p.tracingConfig(p.driver.Name))
	if err != nil {
		return err
	}
	defer func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), tracingGrace)
		defer cancel()
		if err := stopTracing(grace); err != nil {
			log.Info("Exporting the last spans failed", "err", err)
		}
	}()
	work, cancel := context.WithCancelCause(traced)
	defer cancel(nil)
	var group errgroup.Group
	if p.csi != nil {
		work = p.csi.Limited(work)
		group.Go(func() error { return cancelOn(cancel, p.watchConnection(ctx, services)) })
	}
	if p.own != nil {
		group.Go(func() error { return cancelOn(cancel, p.own.wait()) })
	}
	group.Go(func() error {
		defer stopServices()
		err := cancelOn(cancel, terms.run(work))
		if p.own != nil { // running calls on the socket need the watches
			p.own.stop()
			_ = p.own.wait()
		}
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	log.Info("Stopped")
	return nil
}

// cancelOn cancels the other components without draining them if err is not nil. It returns err.
func cancelOn(cancel context.CancelCauseFunc, err error) error {
	if err != nil {
		cancel(err)
	}
	return err
}

// ignoreDrain returns err, or nil if ctx ended because the process shuts down.
func ignoreDrain(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), workloop.ErrDrain) {
		return nil
	}
	return err
}

// connect connects to the driver, unless no role calls it, and reads its name and capabilities.
func (p *process) connect(ctx context.Context) error {
	log := klog.FromContext(ctx)
	if name := p.nameWithoutConnection(); name != "" {
		log.Info("Running without a connection to the driver", "driver", name)
		p.driver = csiclient.Driver{Name: name}
		metrics.RegisterDriver(p.registries.first, name)
		return nil
	}
	cfg := p.own.driverConfig(p.DriverConfig())
	cfg.Registry = p.registries.ofMethod
	csi, err := csiclient.New(cfg, p.registries.first)
	if err != nil {
		return err
	}
	p.csi = csi
	p.page.connecting(csi)
	p.health.client.Store(csi)
	p.server.ready("driver", csi.CheckReady)
	if p.driver, err = csi.Connect(ctx); err != nil {
		return err
	}
	p.page.serving(p.driver, true)
	for _, registry := range p.registries.all() { // alerts select the series of a target by it
		metrics.RegisterDriver(registry, p.driver.Name)
	}
	log.Info("Connected to the driver", "driver", p.driver.Name, "version", p.driver.VendorVersion)
	return nil
}

// watchConnection returns an error when the process must exit because of the driver. During a shutdown, which ends ctx, the driver may
// end first.
func (p *process) watchConnection(ctx, services context.Context) error {
	return ignoreDrain(ctx, p.csi.Run(services))
}

// AskDriverName returns the name of the driver. It calls the driver only if the settings do not contain the name.
func (c Config) AskDriverName(ctx context.Context) (string, error) {
	if driver := c.DriverName(); driver != "" {
		return driver, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.DriverConfig().Timeout)
	defer cancel()
	p := newProcess(c)
	err := p.connect(ctx)
	if p.csi != nil {
		defer p.csi.Close()
	}
	if err != nil {
		return "", fmt.Errorf("reading the name of the driver: %w. Set --driver-name to run without a connection", err)
	}
	return p.driver.Name, nil
}
