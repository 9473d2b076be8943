// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

type metrics struct {
	waits    *prometheus.HistogramVec
	failures *prometheus.CounterVec
	panics   prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		waits: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "storage_controller_topolvm_wait_seconds", Help: "Time that a CSI call has waited for topolvm-node, by its gRPC code.",
			Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"operation", "result"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_topolvm_failures_total", Help: "CSI calls of the TopoLVM service that failed, by gRPC code.",
		}, []string{"operation", "code"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "storage_controller_topolvm_panics_total", Help: "CSI calls of the TopoLVM service that panicked.",
		}),
	}
	reg.MustRegister(m.waits, m.failures, m.panics)
	return m
}

// waited counts the time that a call with the result err has waited, if it has.
func (m *metrics) waited(operation string, d time.Duration, err error) {
	if d > 0 {
		m.waits.WithLabelValues(operation, status.Code(err).String()).Observe(d.Seconds())
	}
}

// operationOf returns the method of a gRPC call without its service.
func operationOf(method string) string { return method[strings.LastIndexByte(method, '/')+1:] }

// registerUnreferenced registers the number of [Unreferenced] LogicalVolumes.
func registerUnreferenced(reg prometheus.Registerer, n names, c *caches, informers *kube.Informers, now func() time.Time) {
	volumes, claims := informers.Volumes(), informers.Claims()
	withHandle := func(handle string) []*corev1.PersistentVolume {
		return volumes.ByIndex(kube.ByHandle, kube.Bucket(handle))
	}
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_topolvm_unreferenced_logical_volumes",
		Help: "LogicalVolumes older than a minute, except snapshots, that no PersistentVolume and no pending PersistentVolumeClaim names.",
	}, func() float64 {
		if !c.volumes.Synced() || !volumes.Synced() || !claims.Synced() {
			return 0
		}
		return float64(len(Unreferenced(string(n), c.volumes.List(), withHandle, claims.List(), now())))
	}))
}
