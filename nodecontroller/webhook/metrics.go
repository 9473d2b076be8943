package webhook

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests  *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	inFlight  prometheus.Gauge
	liveReads prometheus.Counter
	reloads   *prometheus.CounterVec
	upkeep    *prometheus.CounterVec
}

// newMetrics makes the collectors; left is how long the certificate is still valid.
func newMetrics(reg prometheus.Registerer, left func() time.Duration) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_webhook_requests_total",
			Help: "Admission requests by path, HTTP status code and result: patched, allowed or error.",
		}, []string{"path", "code", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "storage_controller_webhook_request_duration_seconds",
			Help:    "Time that the answer to an admission request took.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"path"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "storage_controller_webhook_requests_in_flight",
			Help: "Admission requests that are being answered.",
		}),
		liveReads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "storage_controller_webhook_live_reads_total",
			Help: "Reads from the API server to answer an admission request.",
		}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_webhook_cert_reload_total",
			Help: "Serving certificates that were found, by result: ok, or error for one that was not taken.",
		}, []string{"result"}),
		upkeep: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_webhook_cert_upkeep_total",
			Help: "Steps of the leader to make and publish a self-signed certificate, by result: ok or error.",
		}, []string{"result"}),
	}
	expiry := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_expiry_seconds",
		Help: "Seconds until the serving certificate expires; negative after that, 0 without one.",
	}, func() float64 { return left().Seconds() })
	for _, result := range []string{"ok", "error"} { // so that an alert sees the first one, too
		m.reloads.WithLabelValues(result)
		m.upkeep.WithLabelValues(result)
	}
	reg.MustRegister(m.requests, m.seconds, m.inFlight, m.liveReads, m.reloads, m.upkeep, expiry)
	return m
}

// answered notes one request; path is one of a closed set.
func (m *metrics) answered(path string, code int, patched bool, after time.Duration) {
	result := "allowed"
	switch {
	case code != 200:
		result = "error"
	case patched:
		result = "patched"
	}
	m.requests.WithLabelValues(path, strconv.Itoa(code), result).Inc()
	m.seconds.WithLabelValues(path).Observe(after.Seconds())
}

func result(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}
