// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/metrics"
)

const livenessprobeName = "livenessprobe"

// Livenessprobe serves the health of a driver, with the flags of livenessprobe. It needs no API server.
type Livenessprobe struct {
	settings.Set // its options set the fields
	Common       settings.Common
	endpoint     settings.Endpoint
	healthPort   string // of /healthz, unless the endpoint is set
}

// newLivenessprobe returns the default settings.
func newLivenessprobe() *Livenessprobe {
	l := &Livenessprobe{Common: settings.DefaultCommon(), endpoint: settings.DefaultRole().Endpoint, healthPort: "9808"}
	flags := settings.NewFlags(l.Common.Logging.AddFlags)
	l.addFlags(flags)
	l.Groups = []settings.Group{{Flags: flags}}
	return l
}

// addFlags adds the flags of livenessprobe, but for those of the logs. Their defaults are the values in l.
func (l *Livenessprobe) addFlags(flags *pflag.FlagSet) {
	all := settings.NewFlags(l.Common.AddFlags)
	l.endpoint.AddFlags(all)
	for _, name := range []string{
		"csi-address", "probe-timeout", "http-endpoint", "metrics-address", "metrics-path", "automaxprocs", "version",
	} {
		flags.AddFlag(all.Lookup(name))
	}
	flags.StringVar(&l.healthPort, "health-port", l.healthPort, "port of /healthz, unless --http-endpoint is set")
	flags.Lookup("http-endpoint").Usage = "address that serves /healthz and the metrics, such as :9808"
	flags.Lookup("metrics-address").Usage = "deprecated: address of the metrics; --health-port serves /healthz"
	flags.Lookup("probe-timeout").Usage = "timeout of Probe, including the connection"
}

// RegisterLivenessprobe adds the flags of the command livenessprobe to fs.
func RegisterLivenessprobe(fs *pflag.FlagSet) {
	settings.Register(fs, func() settings.Set { return newLivenessprobe().Set })
	addRetired(fs)
}

// ReadLivenessprobe reads the settings from the flags and the environment. All errors are of the type [UsageError].
func ReadLivenessprobe(fs *pflag.FlagSet) (*Livenessprobe, error) {
	l := newLivenessprobe()
	err := l.Load(fs)
	l.Notes = append(l.Notes, retiredNotes(fs, "")...)
	if err == nil {
		err = l.validate()
	}
	if err != nil {
		return nil, &UsageError{err}
	}
	return l, nil
}

// validate returns every error in the settings.
func (l *Livenessprobe) validate() error {
	errs := []error{l.Common.Validate(false), l.endpoint.Validate(), metrics.CheckPath(l.endpoint.MetricsPath), l.driver().Validate()}
	if l.healthPort != newLivenessprobe().healthPort && l.endpoint.HTTPEndpoint != "" {
		errs = append(errs, errors.New("--health-port and --http-endpoint: only one of them may be set"))
	}
	if _, err := net.LookupPort("tcp", l.healthPort); err != nil {
		errs = append(errs, fmt.Errorf("--health-port: must be a port, got %q", l.healthPort))
	}
	return errors.Join(errs...)
}

func (l *Livenessprobe) driver() csiclient.Config {
	driver := csiclient.DefaultConfig()
	driver.Address, driver.Timeout, driver.MaxLogLength = l.Common.CSIAddress, l.Common.ProbeTimeout, -1
	return driver
}

func (l *Livenessprobe) server(registry *prometheus.Registry) metrics.Config {
	var server metrics.Config
	if address := l.endpoint.Address(); address != "" {
		server.Endpoints = []metrics.Endpoint{{Address: address, MetricsPath: l.endpoint.MetricsPath, Registry: registry}}
	}
	if l.endpoint.HTTPEndpoint == "" {
		server.HealthAddress = net.JoinHostPort("", l.healthPort)
	}
	return server
}

// Run serves until ctx ends.
func (l *Livenessprobe) Run(ctx context.Context, version string) error {
	klog.FromContext(ctx).Info("Starting", "version", version)
	for _, note := range l.Notes {
		klog.FromContext(ctx).Info(note)
	}
	registry := metrics.NewRegistry(version)
	p, err := l.listen(registry, registry)
	if err != nil {
		return err
	}
	defer p.driver.Close()
	return p.server.Run(ctx)
}

// probe is a running [Livenessprobe].
type probe struct {
	driver *csiclient.Client
	server *metrics.Server
}

// listen opens the addresses, which serve registry. It gets the metrics of calls, connection those of the connection. Nil has no
// addresses.
func (l *Livenessprobe) listen(registry, connection *prometheus.Registry) (probe, error) {
	if l == nil {
		return probe{}, nil
	}
	cfg := l.driver()
	cfg.Registry = func(string) prometheus.Registerer { return registry }
	driver, err := csiclient.New(cfg, connection)
	if err != nil {
		return probe{}, err
	}
	server, err := metrics.NewServer(l.server(registry))
	if err != nil {
		driver.Close()
		return probe{}, err
	}
	server.AddLive("driver", func(r *http.Request) error { return driver.CheckHealth(r.Context(), l.Common.ProbeTimeout) })
	return probe{driver, server}, nil
}

// run serves until ctx ends, if there is something to serve.
func (p probe) run(ctx context.Context) {
	if p.server == nil {
		return
	}
	defer p.driver.Close()
	if err := p.server.Run(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "The server of the section livenessprobe failed")
	}
}

// validateLivenessprobe returns every error in the settings of the livenessprobe that runs in the process, if one does.
func (c Config) validateLivenessprobe() error {
	if c.livenessprobe == nil {
		return nil
	}
	errs := split(c.livenessprobe.validate())
	own := c.livenessprobe.server(nil)
	for _, e := range c.endpoints() {
		used := own.HealthAddress == e.Address()
		for _, o := range own.Endpoints {
			used = used || o.Address == e.Address()
		}
		if used {
			errs = append(errs, fmt.Errorf("--http-endpoint and --health-port: %s is the address of %s, too. Set another", e.Address(),
				strings.Join(e.roles, ", ")))
		}
	}
	for i, err := range errs {
		errs[i] = fmt.Errorf("%s: %w", livenessprobeName, err)
	}
	return errors.Join(errs...)
}
