// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/metrics"
)

// Livenessprobe serves the health of a driver, with the flags of livenessprobe. It needs no API server.
type Livenessprobe struct{ port *string }

const healthPort = "health-port"

// Register adds the flags to fs.
func (l *Livenessprobe) Register(fs *pflag.FlagSet) {
	settings.Register(fs, func() settings.Set { return newLivenessprobeSettings().Set })
	l.port = fs.String(healthPort, "9808", "port of /healthz, unless --http-endpoint is set")
	fs.Lookup("http-endpoint").Usage = "address that serves /healthz and the metrics, such as :9808"
	fs.Lookup("metrics-address").Usage = "deprecated: address of the metrics; --health-port serves /healthz"
	fs.Lookup("probe-timeout").Usage = "timeout of Probe, including the connection"
}

// newLivenessprobeSettings returns the default settings of livenessprobe. Its options are those that it has in common with the roles.
func newLivenessprobeSettings() *Settings {
	names := []string{"csi-address", "probe-timeout", "http-endpoint", "metrics-address", "metrics-path", "automaxprocs", "version"}
	s := &Settings{Common: settings.DefaultCommon()}
	logging := settings.NewFlags(s.Common.Logging.AddFlags)
	own, _ := settings.Split(settings.NewFlags(s.Common.AddFlags), func(name string) bool {
		return slices.Contains(names, name) || logging.Lookup(name) != nil
	})
	s.Groups = []settings.Group{{Flags: own}}
	return s
}

// Read reads the settings from the flags and the environment. All errors are of the type [UsageError].
func (l *Livenessprobe) Read(fs *pflag.FlagSet) (settings.Common, error) {
	s := newLivenessprobeSettings()
	if err := s.Load(fs); err != nil {
		return settings.Common{}, &UsageError{err}
	}
	c := s.Common
	if c.HTTPEndpoint == "" {
		c.HealthBindAddress = net.JoinHostPort("", *l.port)
	}
	driver := livenessprobeDriver(c)
	err := errors.Join(s.Common.Validate(false), driver.Validate(), livenessprobeServer(c).Validate())
	if *l.port != fs.Lookup(healthPort).DefValue && c.HTTPEndpoint != "" {
		err = errors.Join(err, fmt.Errorf("--%s and --http-endpoint: only one of them may be set", healthPort))
	}
	if _, invalid := net.LookupPort("tcp", *l.port); invalid != nil {
		err = errors.Join(err, fmt.Errorf("--%s: must be a port, got %q", healthPort, *l.port))
	}
	if err != nil {
		return c, &UsageError{err}
	}
	return c, nil
}

func livenessprobeDriver(c settings.Common) csiclient.Config {
	driver := csiclient.DefaultConfig()
	driver.Address, driver.Timeout, driver.MaxLogLength = c.CSIAddress, c.ProbeTimeout, -1
	return driver
}

func livenessprobeServer(c settings.Common) metrics.Config {
	server := metrics.Config{HealthAddress: c.HealthBindAddress, MetricsPath: c.MetricsPath}
	for _, address := range c.Endpoints() { // at most one
		server.Address = address
	}
	return server
}

// Run serves until ctx ends.
func (l *Livenessprobe) Run(ctx context.Context, c settings.Common, version string) error {
	klog.FromContext(ctx).Info("Starting", "version", version)
	registry := metrics.NewRegistry(version)
	driver, err := csiclient.New(livenessprobeDriver(c), registry)
	if err != nil {
		return err
	}
	defer driver.Close()
	server, err := metrics.NewServer(livenessprobeServer(c), registry)
	if err != nil {
		return err
	}
	server.AddLive("driver", func(r *http.Request) error { return driver.CheckHealth(r.Context(), c.ProbeTimeout) })
	return server.Run(ctx)
}
