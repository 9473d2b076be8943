// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"time"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
)

// Config holds the settings of the role. The tags are the names of the flags. A name that is empty after
// [Config.Resolve] has no effect.
type Config struct {
	// DriverName is required if the process has no connection to the driver.
	DriverName string `mapstructure:"driver-name"`
	// Workers is the number of lost nodes, and separately of claims, that are processed concurrently.
	Workers int `mapstructure:"nodecontroller-workers"`
	// Timeout bounds each request, or a read together with the deletion that depends on it.
	Timeout time.Duration `mapstructure:"timeout"`
	// RetryIntervalStart is the delay after the first failure of an item. It doubles with each further
	// failure up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// LeaderElectionID is the name of the Lease.
	LeaderElectionID string `mapstructure:"leader-election-id"`

	nodecleanup.Settings `mapstructure:",squash"`

	PVCFinalizer          string            `mapstructure:"pvc-finalizer"`
	PVCFinalizerMode      pvcfinalizer.Mode `mapstructure:"pvc-finalizer-mode"`      // ModeEnforce is for TopoLVM only
	PVCObsoleteFinalizers []string          `mapstructure:"pvc-obsolete-finalizers"` // removed from claims
	// ResizeNudge updates the pods whose file system must grow.
	ResizeNudge      bool   `mapstructure:"resize-nudge"`
	ResizeAnnotation string `mapstructure:"resize-annotation"` // of these pods

	EnableWebhooks bool   `mapstructure:"enable-webhooks"`
	WebhookAddr    string `mapstructure:"webhook-addr"` // host:port
	// WebhookClientCA is a file with the authorities of the clients that may call the webhooks; empty: every client.
	WebhookClientCA string `mapstructure:"webhook-client-ca"`
	CertDir         string `mapstructure:"cert-dir"` // of tls.crt and tls.key
	// CapacityResource is the extended resource that pods with unprovisioned volumes request.
	CapacityResource         string `mapstructure:"capacity-resource"`
	CapacityAnnotationPrefix string `mapstructure:"capacity-annotation-prefix"` // of pods, with the slash; the value is in bytes
	DeviceClassParameter     string `mapstructure:"device-class-parameter"`     // of StorageClasses
	DefaultDeviceClass       string `mapstructure:"default-device-class"`       // of StorageClasses without the parameter
	// ShutdownDelay is the time for which the webhooks keep serving after SIGTERM; 0: none.
	ShutdownDelay time.Duration `mapstructure:"shutdown-delay"`

	// Explicit has the source of each setting that was set, by the name of its flag. If it is nil, every
	// setting that differs from its default counts as set by a flag.
	Explicit map[string]Origin `mapstructure:"-"`
}

// DefaultConfig returns the defaults. Names that are empty depend on the driver; see [Config.Resolve].
func DefaultConfig() Config {
	return Config{
		Workers: 4,
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Settings:         nodecleanup.DefaultSettings(),
		PVCFinalizerMode: pvcfinalizer.ModeOff, ResizeNudge: true,
		WebhookAddr: ":9443", DefaultDeviceClass: "00default", ShutdownDelay: 5 * time.Second,
	}
}

// Empty returns a configuration with only the values that no flag sets.
func Empty() *Config {
	d := DefaultConfig()
	return &Config{Settings: nodecleanup.Settings{
		ClockGap: d.ClockGap, CheckInterval: d.CheckInterval, MinMissingGrace: d.MinMissingGrace,
	}}
}

// HasWork reports whether any feature is enabled. Without one, "all" does not run the role.
func (c Config) HasWork() bool {
	return c.NodeCleanup != nodecleanup.ModeOff || c.NodeFinalizerMode != nodecleanup.FinalizerOff ||
		c.PVCFinalizerMode != pvcfinalizer.ModeOff || c.ResizeNudge || c.EnableWebhooks
}

// RetainedFields returns the fields that the informers must retain for c, which is resolved.
func (c Config) RetainedFields() kube.RetainedFields {
	return kube.RetainedFields{
		Nodes: true, Claims: true, PodAnnotations: []string{c.ResizeAnnotation},
		ClaimAnnotations: []string{nodecleanup.CleanupAnnotation(c.DriverName)},
	}
}
