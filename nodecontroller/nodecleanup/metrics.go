// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/internal/kube"
)

type metrics struct {
	actions *prometheus.CounterVec
	hold    prometheus.Histogram
	counts  func() counts

	missing, orphaned, blocked, open *prometheus.Desc
}

// counts are the values of the gauges. They are zero without the Lease.
type counts struct {
	missing, held int
	states        map[state]int
	blocked       map[check]int
}

func newMetrics(reg prometheus.Registerer, current func() counts) *metrics {
	const prefix = "storage_controller_"
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+name, help, labels, nil)
	}
	m := &metrics{
		counts: current,
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "cleanup_actions_total",
			Help: "Deletions and removals of finalizers because a node was deleted, by action, mode of the cleanup, and result: " +
				"ok, gone, conflict, forbidden or error.",
		}, []string{"action", "mode", "result"}),
		hold: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "node_finalizer_hold_seconds",
			Help:    "Time from the deletion of a Node until the finalizer of this controller was removed.",
			Buckets: []float64{1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600},
		}),
		missing: desc("nodes_missing", "Nodes that do not exist and have volumes."),
		orphaned: desc("volumes_orphaned", "Volumes of lost nodes, by the state of their cleanup: "+
			"suspect, held, terminating, claim, draining, released, force or verify.", "state"),
		blocked: desc("cleanup_blocked", "Volumes that are not cleaned up, and missing permissions, by the failed check: "+
			"mode, scope, absence, grace, breaker, sanity, use, rate, lock, policy, attached, finalizer or forbidden.", "gate"),
		open: desc("breaker_open", "1 while the cleanup of any node waits for an approval because too many nodes are lost."),
	}
	reg.MustRegister(m.actions, m.hold, m)
	return m
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.missing, m.orphaned, m.blocked, m.open} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	c := m.counts()
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(m.missing, c.missing)
	gauge(m.open, min(c.held, 1))
	for s, n := range c.states {
		gauge(m.orphaned, n, string(s))
	}
	for k, n := range c.blocked {
		gauge(m.blocked, n, string(k))
	}
}

// action counts a deletion.
func (m *metrics) action(name string, p Policy, err error) {
	m.actions.WithLabelValues(name, string(p.NodeCleanup), kube.WriteResult(err)).Inc()
}

func (m *metrics) held(since time.Time) { m.hold.Observe(time.Since(since).Seconds()) }
