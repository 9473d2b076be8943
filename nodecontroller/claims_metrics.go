package nodecontroller

import (
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// What is counted as done for the finalizers of claims.
const (
	actionStrip     = "strip"
	actionDeletePod = "pod_delete"
	actionRelease   = "release"
)

// claimMetrics count what is done for claims.
type claimMetrics struct {
	nudges, finalizers *prometheus.CounterVec
}

func newClaimMetrics(reg prometheus.Registerer) *claimMetrics {
	m := &claimMetrics{
		nudges: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_resize_nudges_total",
			Help: "Pods annotated so that the kubelet grows a file system, by result: ok, gone, conflict, forbidden or error.",
		}, []string{"result"}),
		finalizers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "storage_controller_pvc_finalizer_actions_total",
			Help: "What was done for the finalizers of claims, by action (strip, pod_delete or release) and result (ok, gone, conflict, forbidden or error).",
		}, []string{"action", "result"}),
	}
	reg.MustRegister(m.nudges, m.finalizers)
	return m
}

func (m *claimMetrics) nudged(err error) { m.nudges.WithLabelValues(resultOf(err)).Inc() }

func (m *claimMetrics) finalizer(action string, err error) {
	m.finalizers.WithLabelValues(action, resultOf(err)).Inc()
}

// resultOf is the label of the outcome of a write.
func resultOf(err error) string {
	switch {
	case err == nil:
		return "ok"
	case apierrors.IsForbidden(err):
		return "forbidden"
	case kube.IsNotFound(err):
		return "gone"
	case apierrors.IsConflict(err):
		return "conflict"
	}
	return "error"
}
