// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"slices"
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

// registerUnreferenced registers the number of volumes without a PersistentVolume, which nothing deletes automatically: a volume whose
// PersistentVolume was deleted with the policy Retain looks the same.
func registerUnreferenced(reg prometheus.Registerer, n names, c *caches, informers *kube.Informers, now func() time.Time) {
	volumes, claims := informers.Volumes(), informers.Claims()
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_topolvm_unreferenced_logical_volumes",
		Help: "LogicalVolumes older than a minute, except snapshots, that no PersistentVolume and no pending PersistentVolumeClaim names.",
	}, func() float64 {
		if !c.volumes.Synced() || !volumes.Synced() || !claims.Synced() {
			return 0
		}
		pending := map[string]bool{} // UIDs and keys
		for _, pvc := range claims.List() {
			if pvc.Spec.VolumeName == "" || slices.Contains(pvc.Finalizers, kube.ProvisioningFinalizer) {
				pending[string(pvc.UID)], pending[kube.Key(pvc)] = true, true
			}
		}
		count := 0
		for _, lv := range c.volumes.List() {
			candidates := volumes.ByIndex(kube.ByHandle, kube.HandleBucket(string(lv.UID)))
			named := slices.ContainsFunc(candidates, func(pv *corev1.PersistentVolume) bool {
				return pv.Spec.CSI != nil && pv.Spec.CSI.Driver == string(n) && pv.Spec.CSI.VolumeHandle == string(lv.UID)
			})
			if !named && !lv.isSnapshot() && now().Sub(lv.CreationTimestamp.Time) > time.Minute &&
				!pending[lv.Annotations[annotationClaim]] &&
				!pending[claimUID(lv.Name)] {
				count++
			}
		}
		return float64(count)
	}))
}

// claimUID returns the UID of the claim in the name that the provisioner gives a volume by default: a prefix, a dash and the UID.
func claimUID(name string) string {
	const uuid = 36
	if len(name) < uuid {
		return ""
	}
	return name[len(name)-uuid:]
}
