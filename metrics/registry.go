// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package metrics provides the metrics registry of the process and the HTTP server for metrics,
// health checks and profiles.
package metrics

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// NewRegistry returns a registry with the metrics of the Go runtime, of the process, and of the
// build.
func NewRegistry(version string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "storage_controller_build_info", Help: "Always 1, with the version and the Go version of the binary.",
	}, []string{"version", "goversion"})
	build.WithLabelValues(version, runtime.Version()).Set(1)
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		build,
	)
	return reg
}

// RegisterDriver registers a gauge with the name of the driver. Alerts select the metrics of this program by it.
func RegisterDriver(reg prometheus.Registerer, name string) {
	driver := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "storage_controller_driver_info", Help: "Always 1, with the name of the driver. Absent before the driver is connected.",
	}, []string{"driver_name"})
	driver.WithLabelValues(name).Set(1)
	reg.MustRegister(driver)
}
