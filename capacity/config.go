// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config holds the settings of the capacity role.
type Config struct {
	// Timeout bounds one GetCapacity call.
	Timeout time.Duration
	// RetryIntervalStart is the delay after the first failure of a pair. It doubles with
	// each further failure up to RetryIntervalMax.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// NodeDeployment selects distributed provisioning: each node has an instance that
	// publishes the capacity of that node. NodeName is then the name of the node.
	NodeDeployment bool
	NodeName       string

	// Enabled turns the role on in a process with other roles.
	Enabled bool
	// Threads is the number of pairs that are reconciled concurrently.
	Threads uint
	// PollInterval is the age at which a response is refreshed.
	PollInterval time.Duration
	// OwnerRefLevel selects the owner of the objects: 0 is the pod of this process, 1 the
	// controller of the pod, 2 its controller, and so on. Negative: no owner.
	OwnerRefLevel int
	// ImmediateBinding includes StorageClasses with the binding mode Immediate.
	ImmediateBinding bool
	// RemovalGrace delays the deletion of a segment's objects after its last node was
	// deleted. A restart of the node plugin unregisters the driver for some seconds.
	RemovalGrace time.Duration
	// QPS is the maximum number of API requests per second for the objects; 0 or less: no limit. Burst is the number of
	// requests that may exceed QPS at once; 0 means 10.
	QPS   float64
	Burst int
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Threads: 1, PollInterval: time.Minute, OwnerRefLevel: 1, RemovalGrace: 30 * time.Second, Burst: 5,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.BoolVar(&c.NodeDeployment, "node-deployment", c.NodeDeployment,
		"run once per node, for the capacity of that node; requires the environment variable NODE_NAME")
	fs.BoolVar(&c.Enabled, "enable-capacity", c.Enabled,
		"publish the available capacity of the driver as CSIStorageCapacity objects, which the command capacity always does; "+
			"requires the environment variable NAMESPACE, and POD_NAME unless the objects have no owner")
	fs.UintVar(&c.Threads, "capacity-threads", c.Threads,
		"number of pairs of StorageClass and topology segment that are reconciled at the same time")
	fs.DurationVar(&c.PollInterval, "capacity-poll-interval", c.PollInterval, "time after which GetCapacity is called again for a pair")
	fs.IntVar(&c.OwnerRefLevel, "capacity-ownerref-level", c.OwnerRefLevel,
		"owner of the CSIStorageCapacity objects: 0 the pod of this process, 1 its controller (StatefulSet, DaemonSet), "+
			"2 the controller of that (Deployment), and so on; negative means none")
	fs.BoolVar(&c.ImmediateBinding, "capacity-for-immediate-binding", c.ImmediateBinding,
		"publish capacity also for StorageClasses with Immediate binding")
	fs.DurationVar(&c.RemovalGrace, "capacity-removal-grace", c.RemovalGrace,
		"how long the CSIStorageCapacity objects of a topology segment are kept after its last node was removed")
	fs.Float64Var(&c.QPS, "kube-api-capacity-qps", c.QPS,
		"maximum requests per second to the API server for CSIStorageCapacity objects; 0 and negative values mean no limit")
	fs.IntVar(&c.Burst, "kube-api-capacity-burst", c.Burst,
		"number of requests for CSIStorageCapacity objects that may exceed --kube-api-capacity-qps at once; 0 means 10")
}

// Validate returns all errors in c, joined.
func (c Config) Validate() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	if c.PollInterval <= 0 {
		errs = append(errs, fmt.Errorf("--capacity-poll-interval: must be positive, got %v", c.PollInterval))
	}
	if c.Threads == 0 {
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
