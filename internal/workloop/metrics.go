// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
)

// Metrics holds the collectors of all loops of a process: the standard workqueue metrics and the
// numbers of recovered panics and of violated invariants.
type Metrics struct {
	queueMetrics
	panics *prometheus.CounterVec
	bugs   *prometheus.CounterVec
	loops  loops

	// Enqueue is called instead of adding a key to the queue of a loop, and calls add later. Nil: the key is added at once. Set it before
	// the first loop is created. It is for simulations, whose keys have an order of their own.
	Enqueue func(loop string, key any, add func())
}

// queueMetrics holds the workqueue metrics, with the names and buckets of Kubernetes components,
// so that existing dashboards work.
type queueMetrics struct {
	depth, unfinished, longest *prometheus.GaugeVec
	adds, retries              *prometheus.CounterVec
	latency, work              *prometheus.HistogramVec
}

// NewMetrics registers the collectors with reg. All loops of a process share them.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	buckets := prometheus.ExponentialBuckets(1e-8, 10, 10)
	label := []string{"name"}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, label)
	}
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, label)
	}
	histogram := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, label)
	}
	m := &Metrics{
		queueMetrics: queueMetrics{
			depth:      gauge("workqueue_depth", "Keys waiting in the queue."),
			unfinished: gauge("workqueue_unfinished_work_seconds", "Total seconds of unfinished work."),
			longest:    gauge("workqueue_longest_running_processor_seconds", "Seconds that the longest running attempt has taken so far."),
			adds:       counter("workqueue_adds_total", "Keys added to the queue."),
			retries:    counter("workqueue_retries_total", "Keys requeued after a failure."),
			latency:    histogram("workqueue_queue_duration_seconds", "Time that keys waited in the queue."),
			work:       histogram("workqueue_work_duration_seconds", "Time that processing a key took."),
		},
		panics: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_worker_panics_total",
			Help: "Panics recovered while processing a key, by queue.",
		}, label),
		bugs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_invariant_violations_total",
			Help: "Attempts that a violated invariant has ended, by queue. What was to follow was not called or written.",
		}, label),
	}
	reg.MustRegister(m.depth, m.unfinished, m.longest, m.adds, m.retries, m.latency, m.work, m.panics, m.bugs)
	return m
}

// reset sets the gauges of a queue that has no workers any more to zero.
func (m *Metrics) reset(name string) {
	for _, gauge := range []*prometheus.GaugeVec{m.depth, m.unfinished, m.longest} {
		gauge.WithLabelValues(name).Set(0)
	}
}

func (m *Metrics) provider() workqueue.MetricsProvider { return provider{m} }

// provider passes the collectors to the queues of client-go without its global registration.
type provider struct{ m *Metrics }

func (p provider) NewDepthMetric(name string) workqueue.GaugeMetric {
	return p.m.depth.WithLabelValues(name)
}

func (p provider) NewAddsMetric(name string) workqueue.CounterMetric {
	return p.m.adds.WithLabelValues(name)
}

func (p provider) NewLatencyMetric(name string) workqueue.HistogramMetric {
	return p.m.latency.WithLabelValues(name)
}

func (p provider) NewWorkDurationMetric(name string) workqueue.HistogramMetric {
	return p.m.work.WithLabelValues(name)
}

func (p provider) NewUnfinishedWorkSecondsMetric(name string) workqueue.SettableGaugeMetric {
	return p.m.unfinished.WithLabelValues(name)
}

func (p provider) NewLongestRunningProcessorSecondsMetric(name string) workqueue.SettableGaugeMetric {
	return p.m.longest.WithLabelValues(name)
}

// NewRetriesMetric returns a counter that counts nothing: client-go counts every delayed add as a
// retry. The loop counts its failures.
func (p provider) NewRetriesMetric(name string) workqueue.CounterMetric {
	p.m.retries.WithLabelValues(name) // exported before the first failure
	p.m.panics.WithLabelValues(name)
	p.m.bugs.WithLabelValues(name)
	return noCounter{}
}

type noCounter struct{}

func (noCounter) Inc() {}
