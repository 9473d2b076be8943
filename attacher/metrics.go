package attacher

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
)

type metrics struct {
	seconds                 prometheus.Histogram
	failures                *prometheus.CounterVec
	comparisons, mismatches *prometheus.CounterVec
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
			Help: "Failed attempts to attach or detach, by the gRPC code of the driver, or \"none\" where it was not asked.",
		}, []string{"operation", "grpc_status_code"}),
	}
	m.comparisons = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_attach_comparisons_total",
		Help: "Comparisons of the attachments with the volumes that the driver lists, by their result: ok or error.",
	}, []string{"result"})
	m.mismatches = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_attach_mismatches_total",
		Help: "Attachments whose status differed from what the driver reported: published, or not.",
	}, []string{"reported"})
	for _, result := range []string{"ok", "error"} { // so that an alert sees the first one, too
		m.comparisons.WithLabelValues(result)
	}
	for _, reported := range []string{"published", "unpublished"} {
		m.mismatches.WithLabelValues(reported)
	}
	reg.MustRegister(m.seconds, m.failures, m.comparisons, m.mismatches)
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
