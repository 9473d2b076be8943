// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/internal/serving"
)

type metrics struct {
	requests  *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	inFlight  prometheus.Gauge
	liveReads prometheus.Counter
	untrusted prometheus.Counter
}

// newMetrics registers the collectors.
func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_webhook_requests_total",
			Help: "Admission requests by path, HTTP status code and result: patched, allowed or error.",
		}, []string{"path", "code", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "storage_controller_webhook_request_duration_seconds",
			Help:    "Duration of admission requests.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"path"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "storage_controller_webhook_requests_in_flight",
			Help: "Admission requests that are being served.",
		}),
		liveReads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "storage_controller_webhook_live_reads_total",
			Help: "Reads from the API server for admission requests.",
		}),
		untrusted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "storage_controller_webhook_tls_rejected_total",
			Help: "TLS handshakes in which the client rejected the serving certificate.",
		}),
	}
	registry.MustRegister(m.requests, m.seconds, m.inFlight, m.liveReads, m.untrusted)
	return m
}

// served counts one request; path is one of a closed set.
func (m *metrics) served(path string, code int, patched bool, duration time.Duration) {
	result := "allowed"
	switch {
	case code != 200:
		result = "error"
	case patched:
		result = "patched"
	}
	m.requests.WithLabelValues(path, strconv.Itoa(code), result).Inc()
	m.seconds.WithLabelValues(path).Observe(duration.Seconds())
}

// registerCertificate registers the metrics of c, which is not loaded yet.
func registerCertificate(c *serving.Certificate, registry prometheus.Registerer) {
	reloads := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_webhook_cert_reload_total",
		Help: "Serving certificates that were found, by result: ok, or error for files that cannot be used.",
	}, []string{"result"})
	ok, failed := reloads.WithLabelValues("ok"), reloads.WithLabelValues("error") // so that both are there from the start
	c.Loaded = func(err error) {
		if err != nil {
			failed.Inc()
		} else {
			ok.Inc()
		}
	}
	registry.MustRegister(reloads, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_expiry_seconds",
		Help: "Seconds until the serving certificate expires; negative after that, 0 without one.",
	}, func() float64 {
		if expiry, loaded := c.Expiry(); loaded {
			return time.Until(expiry).Seconds()
		}
		return 0
	}), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_rejected",
		Help: "1 if the files of the serving certificate cannot be used, else 0.",
	}, func() float64 {
		if c.Problem() != nil {
			return 1
		}
		return 0
	}))
}
