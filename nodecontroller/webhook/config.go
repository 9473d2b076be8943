// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/serving"
)

// Config configures a [Server]. It is validated by the node controller.
type Config struct {
	Driver  string // provisioner of the StorageClasses that count
	Address string // to listen at; the port may be the name of a service
	// Certificate is that of the server, which loads it while it serves.
	Certificate *serving.Certificate
	TLS         serving.TLS
	// ClientCA is a file with the authorities of clients, which is read at each handshake. Empty: clients need no certificate.
	ClientCA string
	// ShutdownDelay is how long requests are served after readiness ended: the API server needs
	// time to notice that.
	ShutdownDelay time.Duration

	ClaimFinalizer string // for claims of the driver; empty adds none

	CapacityResource         string // requested once by each pod with unbound claims
	CapacityAnnotationPrefix string // with the slash; the device class follows
	DeviceClassParameter     string // of a StorageClass
	DefaultDeviceClass       string // of a StorageClass without one
}

// Deps holds the dependencies of a [Server]. All fields are required.
type Deps struct {
	// Client makes the live reads. Pod creation waits for them, so it should have no rate limit.
	Client kubernetes.Interface
	// Claims must retain what [kube.RetainedFields] with Claims says: an unbound claim does not
	// name its driver.
	Claims   kube.Informer[*corev1.PersistentVolumeClaim]
	Classes  kube.Informer[*storagev1.StorageClass]
	Registry prometheus.Registerer
}
