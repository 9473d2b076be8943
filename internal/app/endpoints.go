// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/metrics"
)

// endpoint is an address of metrics, health and debug endpoints. The address serves the metrics of its roles, so that each series
// is served once. Health and debug endpoints are the same at each address.
type endpoint struct {
	settings.Endpoint
	roles []string // of that address
}

// endpoints returns the addresses of the roles of c, each once. The first one also serves the metrics of the process, and of
// the roles without an address.
func (c Config) endpoints() []endpoint {
	var all []endpoint
	for _, r := range c.roles {
		own := c.Role(r.Name).Endpoint
		i := slices.IndexFunc(all, func(e endpoint) bool { return e.Address() == own.Address() })
		switch {
		case own.Address() == "":
		case i < 0:
			all = append(all, endpoint{own, []string{r.Name}})
		default:
			all[i].roles = append(all[i].roles, r.Name)
		}
	}
	return all
}

// validateEndpoints returns an error for each option of an address on which its roles differ, and for each option without the
// address that it needs.
func (c Config) validateEndpoints() error {
	var errs []error
	endpoints := c.endpoints()
	for _, e := range endpoints {
		for _, role := range e.roles {
			other := c.Role(role).Endpoint
			if other.MetricsPath != e.MetricsPath || other.Pprof != e.Pprof {
				errs = append(errs, fmt.Errorf("the roles %s and %s share the address %s: --metrics-path and --enable-pprof must be the "+
					"same for both", e.roles[0], role, e.Address()))
			}
		}
	}
	if c.Common.SecureMetrics && len(endpoints) == 0 {
		errs = append(errs, errors.New("--secure-metrics-server: requires an address. Set --metrics-bind-address or --http-endpoint"))
	}
	return errors.Join(errs...)
}

// serverConfig returns the configuration of the HTTP server without its handlers. The registries are those of c.endpoints.
func (c Config) serverConfig(registries registries) metrics.Config {
	cfg := metrics.Config{
		HealthAddress: settings.Address(c.Common.HealthBindAddress), ProfilingAddress: settings.Address(c.Common.ProfilingBindAddress),
		DriverHealthAddress: c.Common.DriverHealthEndpoint,
		LeaderElection:      slices.ContainsFunc(c.roles, func(r Role) bool { return c.Role(r.Name).Election.Enabled }),
	}
	for _, e := range c.endpoints() {
		cfg.Endpoints = append(cfg.Endpoints, metrics.Endpoint{
			Address: e.Address(), MetricsPath: e.MetricsPath, Pprof: e.Pprof, Registry: registries.of(e.roles[0]),
		})
	}
	return cfg
}

// registries holds a registry for each address.
type registries struct {
	first  registry
	byRole map[string]registry // for roles with another address than the first one
}

// registry is a [prometheus.Registry].
type registry interface {
	prometheus.Registerer
	prometheus.Gatherer
}

// newRegistries returns the registries of endpoints, or one without an address.
func newRegistries(version string, endpoints []endpoint) registries {
	r := registries{first: metrics.NewRegistry(version), byRole: map[string]registry{}}
	for i, e := range endpoints {
		if i == 0 {
			continue
		}
		own := prometheus.NewRegistry()
		for _, role := range e.roles {
			r.byRole[role] = own
		}
	}
	return r
}

// of returns the registry of a role.
func (r registries) of(role string) registry {
	if own := r.byRole[role]; own != nil {
		return own
	}
	return r.first
}

// all returns each registry once, the first one first.
func (r registries) all() []registry {
	all := []registry{r.first}
	for _, own := range r.byRole {
		if !slices.Contains(all, own) {
			all = append(all, own)
		}
	}
	return all
}

// ofMethod returns the registry of the role that calls a method of the driver, with its service.
func (r registries) ofMethod(method string) prometheus.Registerer {
	return r.of(callers[path.Base(method)])
}

// callers has the role that calls a method of the driver. The others belong to no role.
var callers = map[string]string{
	"CreateVolume": provisionerName, "DeleteVolume": provisionerName, "GetCapacity": capacityName,
	"ControllerPublishVolume": attacherName, "ControllerUnpublishVolume": attacherName, "ListVolumes": attacherName,
	"ControllerExpandVolume": resizerName, "ControllerModifyVolume": resizerName,
	"CreateSnapshot": snapshotterName, "DeleteSnapshot": snapshotterName, "ListSnapshots": snapshotterName, "GetSnapshot": snapshotterName,
	"CreateVolumeGroupSnapshot": snapshotterName, "DeleteVolumeGroupSnapshot": snapshotterName, "GetVolumeGroupSnapshot": snapshotterName,
}
