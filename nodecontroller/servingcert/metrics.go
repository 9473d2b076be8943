package servingcert

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct{ reloads, renewals *prometheus.CounterVec }

// newMetrics registers the collectors; remaining returns for how long the certificate is valid.
func newMetrics(registry prometheus.Registerer, remaining func() time.Duration) metrics {
	byResult := func(name, help string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help},
			[]string{"result"})
		for _, r := range []string{"ok", "error"} { // so that an alert sees the first increase
			c.WithLabelValues(r)
		}
		return c
	}
	m := metrics{
		reloads: byResult("storage_controller_webhook_cert_reload_total",
			"Serving certificates that were found, by result: ok, or error for one that was rejected."),
		renewals: byResult("storage_controller_webhook_cert_upkeep_total",
			"Writes of the leader to renew and publish a self-signed certificate (ok), and attempts that failed (error), by result."),
	}
	expiry := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_expiry_seconds",
		Help: "Seconds until the serving certificate expires; negative after that, 0 without one.",
	}, func() float64 { return remaining().Seconds() })
	registry.MustRegister(m.reloads, m.renewals, expiry)
	return m
}

func result(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}
