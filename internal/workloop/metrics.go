package workloop

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
)

// Metrics are the collectors of all loops of a process: the standard workqueue
// family and the number of recovered panics.
type Metrics struct {
	queueMetrics
	panics  *prometheus.CounterVec
	running running
}

// queueMetrics are the workqueue metrics under the names and with the buckets
// that Kubernetes components use, so that existing dashboards keep working.
type queueMetrics struct {
	depth, unfinished, longest *prometheus.GaugeVec
	adds, retries              *prometheus.CounterVec
	latency, work              *prometheus.HistogramVec
}

// NewMetrics makes the collectors and registers them. One per registry: the
// loops of a process share it.
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
			depth:      gauge("workqueue_depth", "Items that wait in the queue."),
			unfinished: gauge("workqueue_unfinished_work_seconds", "Summed age of the items that are being worked on."),
			longest:    gauge("workqueue_longest_running_processor_seconds", "Age of the oldest item that is being worked on."),
			adds:       counter("workqueue_adds_total", "Items added to the queue."),
			retries:    counter("workqueue_retries_total", "Items that failed and were queued again."),
			latency:    histogram("workqueue_queue_duration_seconds", "Time that items waited in the queue."),
			work:       histogram("workqueue_work_duration_seconds", "Time that items were worked on."),
		},
		panics: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_worker_panics_total",
			Help: "Panics recovered while working on an item, by queue.",
		}, label),
	}
	reg.MustRegister(m.depth, m.unfinished, m.longest, m.adds, m.retries, m.latency, m.work, m.panics)
	return m
}

func (m *Metrics) provider() workqueue.MetricsProvider { return provider{m} }

// provider hands the collectors to client-go's queues, without its global registration.
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

// NewRetriesMetric counts nothing: client-go counts every delayed add here, also
// those that are no retry. The loop counts its failures itself.
func (p provider) NewRetriesMetric(name string) workqueue.CounterMetric {
	p.m.retries.WithLabelValues(name) // so that it is there before the first failure
	p.m.panics.WithLabelValues(name)
	return noCounter{}
}

type noCounter struct{}

func (noCounter) Inc() {}
