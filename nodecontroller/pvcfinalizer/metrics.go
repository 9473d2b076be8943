package pvcfinalizer

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// The values of the metric label "action".
const (
	actionStrip     = "strip"
	actionDeletePod = "pod_delete"
	actionRelease   = "release"
)

func newActions(reg prometheus.Registerer) *prometheus.CounterVec {
	actions := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_pvc_finalizer_actions_total",
		Help: "Writes for finalizers of PersistentVolumeClaims, by action (strip, pod_delete or release) and result " +
			"(ok, gone, conflict, forbidden or error).",
	}, []string{"action", "result"})
	reg.MustRegister(actions)
	return actions
}

func (c *Controller) count(action string, err error) {
	c.actions.WithLabelValues(action, kube.WriteResult(err)).Inc()
}
