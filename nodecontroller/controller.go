package nodecontroller

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Deps is what the program hands to the controller. All fields are required.
type Deps struct {
	Driver  string // its name, as it reports it or as the operator set it
	Client  kubernetes.Interface
	Dynamic dynamic.Interface // for custom resources
	// Informers must keep [kube.Details] as [Config.Details] says.
	Informers *kube.Informers
	Locks     *volumelock.Locks // shared with the loops that call the driver
	Events    record.EventRecorder
	Registry  prometheus.Registerer
	Queues    *workloop.Metrics
}
