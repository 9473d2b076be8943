// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/topolvm"
)

// Config holds the settings of the role. A name that is empty after
// [Config.Complete] has no effect.
type Config struct {
	// DriverName is required if the process has no connection to the driver.
	DriverName string
	// Workers is the number of lost nodes, and separately of claims, that are processed concurrently.
	Workers int
	// Timeout bounds each request, or a read together with the deletion that depends on it.
	Timeout time.Duration
	// RetryIntervalStart is the delay after the first failure of an item. It doubles with each further
	// failure up to RetryIntervalMax.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// LeaderElectionID is the name of the Lease.
	LeaderElectionID string

	nodecleanup.Settings

	PVCFinalizer          string
	PVCFinalizerMode      pvcfinalizer.Mode // ModeEnforce is for TopoLVM only
	PVCObsoleteFinalizers []string          // removed from claims
	// ResizeNudge updates the pods whose file system must grow.
	ResizeNudge      bool
	ResizeAnnotation string // of these pods

	EnableWebhooks bool
	WebhookAddr    string // host:port
	// WebhookClientCA is a file with the authorities of the clients that may call the webhooks; empty: every client.
	WebhookClientCA string
	CertDir         string // of tls.crt and tls.key
	// CapacityResource is the extended resource that pods with unprovisioned volumes request.
	CapacityResource         string
	CapacityAnnotationPrefix string // of pods, with the slash; the value is in bytes
	DeviceClassParameter     string // of StorageClasses
	DefaultDeviceClass       string // of StorageClasses without the parameter
	// ShutdownDelay is the time for which the webhooks keep serving after SIGTERM; 0: none.
	ShutdownDelay time.Duration
}

// DefaultConfig returns the defaults. Names that are empty depend on the driver; see [Config.Complete].
func DefaultConfig() Config {
	return Config{
		Workers: 4,
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Settings:         nodecleanup.DefaultSettings(),
		PVCFinalizerMode: pvcfinalizer.ModeOff, ResizeNudge: true,
		WebhookAddr: ":9443", DefaultDeviceClass: "00default", ShutdownDelay: 5 * time.Second,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	const orDerived = "; empty means one derived from the name of the driver"
	fs.StringVar(&c.DriverName, "driver-name", c.DriverName,
		"name of the CSI driver. With it, and without --csi-address and --csi-socket, "+
			"the nodecontroller as the only role runs without a connection to the driver")
	fs.IntVar(&c.Workers, "nodecontroller-workers", c.Workers,
		"number of Nodes, and separately of PersistentVolumes and PersistentVolumeClaims, that are reconciled at the same time")
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.Lookup("timeout").Usage = "timeout of each request to the API server, or of a read together with the deletion that depends on it"
	fs.StringVar(&c.LeaderElectionID, "leader-election-id", c.LeaderElectionID, "name of the Lease of the nodecontroller"+orDerived)
	c.Settings.AddFlags(fs)
	fs.Lookup("node-finalizer").Usage += orDerived
	fs.StringVar(&c.PVCFinalizer, "pvc-finalizer", c.PVCFinalizer, "finalizer of PVCs"+orDerived)
	fs.StringVar((*string)(&c.PVCFinalizerMode), "pvc-finalizer-mode", string(c.PVCFinalizerMode),
		"off; strip: remove the obsolete finalizers from all PVCs; "+
			"enforce: keep a deleted PVC by the finalizer until all pods that use it are deleted, for TopoLVM up to v0.39 only; "+
			"requires --leader-election")
	fs.StringSliceVar(&c.PVCObsoleteFinalizers, "pvc-obsolete-finalizers", c.PVCObsoleteFinalizers,
		"finalizers, separated by commas, that are removed from PVCs")
	fs.BoolVar(&c.ResizeNudge, "resize-nudge", c.ResizeNudge,
		"update the pods of a volume whose file system must grow, so that the kubelet expands it at once; watches all pods")
	fs.StringVar(&c.ResizeAnnotation, "resize-annotation", c.ResizeAnnotation, "pod annotation that is updated for this"+orDerived)
	fs.BoolVar(&c.EnableWebhooks, "enable-webhooks", c.EnableWebhooks, "serve admission webhooks")
	fs.StringVar(&c.WebhookAddr, "webhook-addr", c.WebhookAddr, "address of the webhooks, host:port")
	fs.StringVar(&c.CertDir, "cert-dir", c.CertDir,
		"directory of tls.crt and tls.key; empty means k8s-webhook-server/serving-certs in the directory for temporary files")
	fs.StringVar(&c.WebhookClientCA, "webhook-client-ca", c.WebhookClientCA,
		"file with the CA certificates of the API servers' client certificates; other clients are rejected. "+
			"Empty: every client is served")
	fs.StringVar(&c.CapacityResource, "capacity-resource", c.CapacityResource,
		"extended resource that pods with unprovisioned volumes request"+orDerived)
	fs.StringVar(&c.CapacityAnnotationPrefix, "capacity-annotation-prefix", c.CapacityAnnotationPrefix,
		"prefix, including the slash, of the pod annotations that hold the requested bytes"+orDerived)
	fs.StringVar(&c.DeviceClassParameter, "device-class-parameter", c.DeviceClassParameter,
		"StorageClass parameter that names the device class"+orDerived)
	fs.StringVar(&c.DefaultDeviceClass, "default-device-class", c.DefaultDeviceClass,
		"device class of StorageClasses that do not name one")
	fs.DurationVar(&c.ShutdownDelay, "shutdown-delay", c.ShutdownDelay,
		"how long the webhooks keep serving after SIGTERM, so that the API server stops sending requests first")
	for name := range derived(topolvm.Driver, "") {
		fs.Lookup(name).Annotations = map[string][]string{"omitted": {}} // a printed default would replace the derived value
	}
}

// HasWork reports whether any feature is enabled. Without one, "all" does not run the role.
func (c Config) HasWork() bool {
	return c.NodeCleanup != nodecleanup.ModeOff || c.NodeFinalizerMode != nodecleanup.FinalizerOff ||
		c.PVCFinalizerMode != pvcfinalizer.ModeOff || c.ResizeNudge || c.EnableWebhooks
}

// RetainedFields returns the fields that the informers must retain for c, which is complete.
func (c Config) RetainedFields() kube.RetainedFields {
	return kube.RetainedFields{
		Nodes: true, Claims: true, PodAnnotations: []string{c.ResizeAnnotation},
		ClaimAnnotations: []string{nodecleanup.CleanupAnnotation(c.DriverName)},
	}
}
