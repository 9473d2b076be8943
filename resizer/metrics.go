// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
)

type metricSet struct {
	seconds  *prometheus.HistogramVec
	failures *prometheus.CounterVec
}

// newMetrics registers the metrics. waiting returns the number of operations whose last decision had a
// reason.
func newMetrics(reg prometheus.Registerer, waiting func(reason string) float64) *metricSet {
	m := &metricSet{
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "storage_controller_resize_duration_seconds",
			Help: "Time from recording the request of a PVC until its volume was expanded or modified at the driver, by operation: " +
				"expand or modify.",
			Buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		}, []string{"operation"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_resize_failures_total",
			Help: "Failed attempts to expand or modify a volume, by the gRPC code that the driver returned, or \"none\" if it was not " +
				"called or returned an invalid response.",
		}, []string{"operation", "grpc_status_code"}),
	}
	reg.MustRegister(m.seconds, m.failures)
	waitingDesc := prometheus.NewDesc("storage_controller_resizer_waiting",
		"Expansions and modifications that wait, by reason: infeasible (retried after --retry-interval-max), "+
			"in_use (until the volume is not in use), class_missing (until the VolumeAttributesClass exists).", []string{"reason"}, nil)
	reg.MustRegister(prometheus.CollectorFunc(func(values chan<- prometheus.Metric) {
		for label, reason := range map[string]string{
			"infeasible": stageInfeasible, "in_use": stageInUse, "class_missing": stageClassMissing,
		} {
			values <- prometheus.MustNewConstMetric(waitingDesc, prometheus.GaugeValue, waiting(reason), label)
		}
	}))
	for o := range operations { // an alert needs the zero before the first increase
		m.failures.WithLabelValues(o.String(), "none")
	}
	return m
}

func (m *metricSet) failed(o operation, err error) {
	code := "none"
	if s, ok := status.FromError(err); ok {
		code = s.Code().String()
	}
	m.failures.WithLabelValues(o.String(), code).Inc()
}

func (m *metricSet) finished(o operation, took time.Duration) {
	m.seconds.WithLabelValues(o.String()).Observe(took.Seconds())
}
