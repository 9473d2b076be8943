package attacher

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Config is what an operator may set.
type Config struct {
	// Timeout bounds one ControllerPublishVolume or ControllerUnpublishVolume call. A
	// call that runs into it is in doubt and is repeated with the same arguments (CSI
	// spec, "Timeouts").
	Timeout time.Duration `mapstructure:"timeout"`
	// WorkerThreads is how many attachments, and separately how many volumes, are
	// worked on at the same time.
	WorkerThreads int `mapstructure:"worker-threads"`
	// RetryIntervalStart is the delay after the first failure of an attachment; it
	// doubles with each further one up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// Resync is the time between two looks at everything that is not done; zero
	// means that only events and failures cause one.
	Resync time.Duration `mapstructure:"resync"`
	// ReconcileSync is the time between two comparisons of the attachments with what
	// the driver reports; zero means none.
	ReconcileSync time.Duration `mapstructure:"reconcile-sync"`
	// MaxEntries is how many volumes are asked for in one page of such a report; zero
	// leaves that to the driver.
	MaxEntries int `mapstructure:"max-entries"`
	// DefaultFSType is the file system of volumes that name none; it may be empty.
	DefaultFSType string `mapstructure:"default-fstype"`
	// StoreErrorCode puts the gRPC code of a failed call into the status, where the
	// kubelet looks for ResourceExhausted (KEP-4876).
	StoreErrorCode bool `mapstructure:"-"`
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, WorkerThreads: 10, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Resync: 10 * time.Minute, ReconcileSync: time.Minute, StoreErrorCode: true,
	}
}

// Validate reports everything that is wrong with c.
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
	if c.WorkerThreads <= 0 {
		errs = append(errs, fmt.Errorf("--worker-threads: must be positive, got %d", c.WorkerThreads))
	}
	if c.Resync < 0 {
		errs = append(errs, fmt.Errorf("--resync: must not be negative, got %v", c.Resync))
	}
	if c.ReconcileSync < 0 {
		errs = append(errs, fmt.Errorf("--reconcile-sync: must not be negative, got %v", c.ReconcileSync))
	}
	if c.MaxEntries < 0 || c.MaxEntries > math.MaxInt32 {
		errs = append(errs, fmt.Errorf("--max-entries: must be between 0 and %d, got %d", math.MaxInt32, c.MaxEntries))
	}
	return errors.Join(errs...)
}
