package nodecontroller

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/internal/kube"
)

type metrics struct {
	actions *prometheus.CounterVec
	hold    prometheus.Histogram
	// tally is the numbers of this moment; they are zero between two terms.
	tally    func() tally
	notReady func() int

	missing, unready, orphaned, blocked, open *prometheus.Desc
}

func newMetrics(reg prometheus.Registerer, tally func() tally, notReady func() int) *metrics {
	const prefix = "storage_controller_"
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+name, help, labels, nil)
	}
	m := &metrics{
		tally: tally, notReady: notReady,
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "cleanup_actions_total",
			Help: "Deletions and removals of finalizers because a node was deleted, by action, mode of the cleanup, and result: ok, gone, conflict, forbidden or error.",
		}, []string{"action", "mode", "result"}),
		hold: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "node_finalizer_hold_seconds",
			Help:    "Time from the deletion of a Node until the finalizer of this controller was removed.",
			Buckets: []float64{1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600},
		}),
		missing:  desc("nodes_missing", "Nodes that do not exist and have volumes."),
		unready:  desc("nodes_not_ready", "Nodes that have the driver and are not ready. Nothing is cleaned up because of that."),
		orphaned: desc("volumes_orphaned", "Volumes whose nodes do not exist, by how far their clean-up is.", "state"),
		blocked:  desc("cleanup_blocked", "Volumes that are not cleaned up, by the failed check. A missing permission counts also for nodes, for kinds that are not watched, and for reads that all of them need.", "gate"),
		open:     desc("breaker_open", "1 while the clean-up of any node waits for an approval because too many nodes are lost."),
	}
	reg.MustRegister(m.actions, m.hold, m)
	return m
}

// Describe is that of a [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.missing, m.unready, m.orphaned, m.blocked, m.open} {
		ch <- d
	}
}

// Collect is that of a [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	t := m.tally()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(m.missing, float64(t.missing))
	gauge(m.unready, float64(m.notReady()))
	gauge(m.open, float64(min(t.held, 1)))
	for s, n := range t.orphaned {
		gauge(m.orphaned, float64(n), string(s))
	}
	for g, n := range t.blocked {
		gauge(m.blocked, float64(n), string(g))
	}
}

func (m *metrics) action(action string, p policy, err error) {
	mode, result := string(p.mode), resultOf(err)
	if p.dryRun {
		mode = string(CleanupDryRun)
	}
	if action == "finalizer_remove" && kube.IsPatchTestFailed(err) {
		result = "conflict"
	}
	m.actions.WithLabelValues(action, strings.ToLower(mode), result).Inc()
}

func (m *metrics) held(since time.Time) { m.hold.Observe(time.Since(since).Seconds()) }
