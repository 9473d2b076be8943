// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
)

type metrics struct {
	seconds                     prometheus.Histogram
	failures                    *prometheus.CounterVec
	reconciliations, mismatches *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "storage_controller_attach_duration_seconds",
			Help:    "Time from the creation of a VolumeAttachment until it was attached.",
			Buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_attach_failures_total",
			Help: "Failed attempts to attach or detach, by the gRPC code that the driver returned, or \"none\" if it was not called.",
		}, []string{"operation", "grpc_status_code"}),
		reconciliations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_attach_comparisons_total",
			Help: "Reconciliations of VolumeAttachments with ListVolumes, by result: ok or error.",
		}, []string{"result"}),
		mismatches: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_attach_mismatches_total",
			Help: "VolumeAttachments whose status differed from ListVolumes, by what the driver reported: published or unpublished.",
		}, []string{"reported"}),
	}
	for _, result := range []string{"ok", "error"} { // an alert needs the zero before the first increase
		m.reconciliations.WithLabelValues(result)
	}
	for _, reported := range []string{"published", "unpublished"} {
		m.mismatches.WithLabelValues(reported)
	}
	reg.MustRegister(m.seconds, m.failures, m.reconciliations, m.mismatches)
	return m
}

func (m *metrics) attached(after time.Duration) { m.seconds.Observe(after.Seconds()) }

func (m *metrics) failed(detach bool, err error) {
	operation, code := "attach", "none"
	if detach {
		operation = "detach"
	}
	if s, ok := status.FromError(err); ok {
		code = s.Code().String()
	}
	m.failures.WithLabelValues(operation, code).Inc()
}

func (m *metrics) mismatch(published bool) {
	reported := "unpublished"
	if published {
		reported = "published"
	}
	m.mismatches.WithLabelValues(reported).Inc()
}
