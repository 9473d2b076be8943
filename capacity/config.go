// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Config holds the settings of the capacity role.
type Config struct {
	// Timeout bounds one GetCapacity call.
	Timeout time.Duration `mapstructure:"timeout"`
	// RetryIntervalStart is the delay after the first failure of a pair. It doubles with
	// each further failure up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// NodeDeployment selects distributed provisioning: each node has an instance that
	// publishes the capacity of that node. NodeName is then the name of the node.
	NodeDeployment bool   `mapstructure:"node-deployment"`
	NodeName       string `mapstructure:"-"`

	// Enabled turns the role on in a process with other roles.
	Enabled bool `mapstructure:"enable-capacity"`
	// Threads is the number of pairs that are reconciled concurrently.
	Threads int `mapstructure:"capacity-threads"`
	// PollInterval is the age at which a response is refreshed.
	PollInterval time.Duration `mapstructure:"capacity-poll-interval"`
	// OwnerRefLevel selects the owner of the objects: 0 is the pod of this process, 1 the
	// controller of the pod, 2 its controller, and so on. Negative: no owner.
	OwnerRefLevel int `mapstructure:"capacity-ownerref-level"`
	// ImmediateBinding includes StorageClasses with the binding mode Immediate.
	ImmediateBinding bool `mapstructure:"capacity-for-immediate-binding"`
	// RemovalGrace delays the deletion of a segment's objects after its last node was
	// deleted. A restart of the node plugin unregisters the driver for some seconds.
	RemovalGrace time.Duration `mapstructure:"capacity-removal-grace"`
	// QPS is the maximum number of API requests per second for the objects; 0 or less: no limit. Burst is the number of
	// requests that may exceed QPS at once; 0 means 10.
	QPS   float64 `mapstructure:"kube-api-capacity-qps"`
	Burst int     `mapstructure:"kube-api-capacity-burst"`
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Threads: 1, PollInterval: time.Minute, OwnerRefLevel: 1, RemovalGrace: 30 * time.Second, Burst: 5,
	}
}

// Validate returns all errors in c, joined.
func (c Config) Validate() error {
	var errs []error
	positive := func(flag string, d time.Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("--%s: must be positive, got %v", flag, d))
		}
	}
	positive("timeout", c.Timeout)
	positive("retry-interval-start", c.RetryIntervalStart)
	positive("retry-interval-max", c.RetryIntervalMax)
	positive("capacity-poll-interval", c.PollInterval)
	if c.Threads <= 0 {
		errs = append(errs, fmt.Errorf("--capacity-threads: must be positive, got %d", c.Threads))
	}
	if c.RemovalGrace < 0 {
		errs = append(errs, fmt.Errorf("--capacity-removal-grace: must not be negative, got %v", c.RemovalGrace))
	}
	if math.IsNaN(c.QPS) {
		errs = append(errs, errors.New("--kube-api-capacity-qps: must be a number, got NaN"))
	}
	if c.QPS > 0 && c.Burst < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-capacity-burst: must not be negative, got %d", c.Burst))
	}
	if c.NodeDeployment && c.NodeName == "" {
		errs = append(errs, errors.New("--node-deployment: "+
			"the environment variable NODE_NAME must name the node. Set it from spec.nodeName"))
	}
	return errors.Join(errs...)
}
