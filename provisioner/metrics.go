// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// metrics has the names and labels of csi-provisioner.
type metrics struct {
	provisioned, provisionFailed *prometheus.CounterVec
	provisionSeconds             *prometheus.HistogramVec
	deleted, deleteFailed        *prometheus.CounterVec
	deleteSeconds                *prometheus.HistogramVec
	conflicts                    prometheus.Counter
	classExists                  func(name string) bool
}

// newMetrics registers the metrics. unresolved is called at each scrape for the number of
// indeterminate claims and of volumes without PersistentVolume.
func newMetrics(reg prometheus.Registerer, classExists func(name string) bool, unresolved func() (indeterminateClaims, unsaved float64),
) *metrics {
	gauge := func(name, help string, value func() float64) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("storage_controller_provisioner_volumes_indeterminate", "PVCs whose CreateVolume outcome is unknown.", func() float64 {
		n, _ := unresolved()
		return n
	})
	const unsaved = "Volumes that exist and whose PersistentVolume is not created yet."
	gauge("storage_controller_provisioner_volumes_unsaved", unsaved, func() float64 {
		_, n := unresolved()
		return n
	})
	conflicts := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "storage_controller_provisioner_ownership_conflicts_total",
		Help: "Conflicts while selecting this node for a PVC (distributed provisioning).",
	})
	reg.MustRegister(conflicts)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		reg.MustRegister(v)
		return v
	}
	histogram := func(name, help string, labels ...string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.DefBuckets}, labels)
		reg.MustRegister(v)
		return v
	}
	const claims, volumes = "controller_persistentvolumeclaim_", "controller_persistentvolume_"
	return &metrics{
		conflicts: conflicts, classExists: classExists,
		provisioned:     counter(claims+"provision_total", "Volumes provisioned.", "class", "source"),
		provisionFailed: counter(claims+"provision_failed_total", "Failed attempts to provision a volume.", "class", "source"),
		provisionSeconds: histogram(claims+"provision_duration_seconds",
			"Seconds from the first reconcile of a PVC until its PersistentVolume was created.", "class", "source"),
		deleted:      counter(volumes+"delete_total", "Volumes deleted.", "class"),
		deleteFailed: counter(volumes+"delete_failed_total", "Failed attempts to delete a volume.", "class"),
		deleteSeconds: histogram(volumes+"delete_duration_seconds",
			"Seconds from the first attempt to delete a volume until the driver deleted it.", "class"),
	}
}

// labelsOf returns the labels for a claim. Users choose the names of classes and kinds: those that do not exist get no series.
func (m *metrics) labelsOf(claim *corev1.PersistentVolumeClaim) (class, source string) {
	if name := claim.Spec.StorageClassName; name != nil && m.classExists(*name) {
		class = *name
	}
	if s := claim.Spec.DataSource; s != nil && (s.Kind == kube.KindSnapshot || s.Kind == kube.KindClaim) {
		source = s.Kind
	}
	return class, source
}

func (m *metrics) claimFailed(claim *corev1.PersistentVolumeClaim) {
	class, source := m.labelsOf(claim)
	m.provisionFailed.WithLabelValues(class, source).Inc()
}

func (m *metrics) claimDone(claim *corev1.PersistentVolumeClaim, took time.Duration) {
	class, source := m.labelsOf(claim)
	m.provisioned.WithLabelValues(class, source).Inc()
	m.provisionSeconds.WithLabelValues(class, source).Observe(took.Seconds())
}
