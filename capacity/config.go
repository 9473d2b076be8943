package capacity

import (
	"errors"
	"fmt"
	"time"
)

// Config is what an operator may set.
type Config struct {
	// Timeout bounds one GetCapacity call.
	Timeout time.Duration `mapstructure:"timeout"`
	// RetryIntervalStart is the delay after the first failure of a pair; it doubles
	// with each further one up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// NodeDeployment tells that every node has an instance, which publishes what its
	// node has. NodeName is then the name of the node.
	NodeDeployment bool   `mapstructure:"node-deployment"`
	NodeName       string `mapstructure:"-"`

	// Enabled turns the publishing on where that is not the only thing that is done.
	Enabled bool `mapstructure:"enable-capacity"`
	// Threads is how many pairs are worked on at the same time.
	Threads int `mapstructure:"capacity-threads"`
	// PollInterval is the age at which a value is asked for again.
	PollInterval time.Duration `mapstructure:"capacity-poll-interval"`
	// OwnerRefLevel says who owns the objects: 0 the pod of this process, 1 the
	// controller of the pod, 2 the controller of that, and so on; negative: nobody.
	OwnerRefLevel int `mapstructure:"capacity-ownerref-level"`
	// ImmediateBinding includes the classes whose volumes are provisioned before a
	// pod needs them.
	ImmediateBinding bool `mapstructure:"capacity-for-immediate-binding"`
	// RemovalGrace is how long the objects of a segment outlive its last node. The
	// driver is away from a node for some seconds whenever its pod there restarts.
	RemovalGrace time.Duration `mapstructure:"capacity-removal-grace"`
	// QPS and Burst limit the requests for the objects; a QPS of 0 means no limit.
	QPS   float64 `mapstructure:"kube-api-capacity-qps"`
	Burst int     `mapstructure:"kube-api-capacity-burst"`
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Threads: 1, PollInterval: time.Minute, OwnerRefLevel: 1, RemovalGrace: 30 * time.Second, QPS: 1, Burst: 5,
	}
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	for flag, d := range map[string]time.Duration{
		"timeout": c.Timeout, "retry-interval-start": c.RetryIntervalStart, "retry-interval-max": c.RetryIntervalMax,
		"capacity-poll-interval": c.PollInterval,
	} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("--%s: must be positive, got %v", flag, d))
		}
	}
	if c.Threads <= 0 {
		errs = append(errs, fmt.Errorf("--capacity-threads: must be positive, got %d", c.Threads))
	}
	if c.RemovalGrace < 0 {
		errs = append(errs, fmt.Errorf("--capacity-removal-grace: must not be negative, got %v", c.RemovalGrace))
	}
	if c.QPS < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-capacity-qps: must not be negative, got %v", c.QPS))
	}
	if c.QPS > 0 && c.Burst < 1 {
		errs = append(errs, fmt.Errorf("--kube-api-capacity-burst: must be at least 1, got %d", c.Burst))
	}
	if c.NodeDeployment && c.NodeName == "" {
		errs = append(errs, errors.New("--node-deployment: the environment variable NODE_NAME must name the node; set it from spec.nodeName"))
	}
	return errors.Join(errs...)
}
