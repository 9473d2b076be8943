// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config holds the settings of the resizer.
type Config struct {
	// Timeout bounds one ControllerExpandVolume or ControllerModifyVolume call. A call that exceeds it
	// is indeterminate and is repeated with the same arguments (CSI spec, "Timeouts").
	Timeout time.Duration
	// ResizeTimeout and ModifyTimeout bound the calls of one kind instead of Timeout. Zero means Timeout.
	ResizeTimeout time.Duration
	ModifyTimeout time.Duration
	// Workers is the number of expansions and modifications that are in work concurrently.
	Workers int
	// RetryIntervalStart is the delay after the first failure of an operation. It doubles with each
	// further failure up to RetryIntervalMax, which is also the delay after an infeasible response.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// ResyncPeriod is the interval at which all claims with unfinished operations are enqueued. Zero
	// disables it: only events and failures enqueue.
	ResyncPeriod time.Duration
	// HandleVolumeInUseError delays the expansion of volumes in use that the driver cannot expand online.
	HandleVolumeInUseError bool
	// ExtraModifyMetadata passes the names of claim and volume to ControllerModifyVolume.
	ExtraModifyMetadata bool
	// Feature gates of the same names. Without VolumeAttributesClass, volumes are not modified.
	// AnnotateFsResize records the size before an expansion on the PersistentVolume.
	VolumeAttributesClass bool
	AnnotateFsResize      bool
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, Workers: 10, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		ResyncPeriod: 10 * time.Minute, HandleVolumeInUseError: true, VolumeAttributesClass: true, AnnotateFsResize: true,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.DurationVar(&c.ResizeTimeout, "resize-timeout", c.ResizeTimeout,
		"timeout of ControllerExpandVolume; 0 means that of --timeout. --timeout on the command line overrides it")
	fs.DurationVar(&c.ModifyTimeout, "modify-timeout", c.ModifyTimeout,
		"timeout of ControllerModifyVolume; 0 means that of --timeout. --timeout on the command line overrides it")
	fs.IntVar(&c.Workers, "workers", c.Workers, "number of volumes that are expanded or modified at the same time")
	fs.Lookup("workers").Annotations = map[string][]string{"alias": {"worker-threads"}}
	fs.DurationVar(&c.ResyncPeriod, "resync-period", c.ResyncPeriod,
		"time between two resyncs of all PersistentVolumeClaims that wait for an expansion or modification; 0 means never")
	fs.Lookup("resync-period").Annotations = map[string][]string{"alias": {"resync"}}
	fs.BoolVar(&c.HandleVolumeInUseError, "handle-volume-inuse-error", c.HandleVolumeInUseError,
		"delay the expansion of a volume that is in use if the driver cannot expand it online")
	fs.BoolVar(&c.ExtraModifyMetadata, "extra-modify-metadata", c.ExtraModifyMetadata, "pass PVC and PV metadata to ControllerModifyVolume")
}

// callTimeout returns the timeout of the CSI call of an operation.
func (c Config) callTimeout(o operation) time.Duration {
	if o == expand {
		return cmp.Or(c.ResizeTimeout, c.Timeout)
	}
	return cmp.Or(c.ModifyTimeout, c.Timeout)
}

// LongestTimeout returns the longest time that a CSI call may take.
func (c Config) LongestTimeout() time.Duration {
	return max(c.callTimeout(expand), c.callTimeout(modify))
}

// Validate returns all errors in c, joined.
func (c Config) Validate() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	notNegative := func(flag string, d time.Duration) {
		if d < 0 {
			errs = append(errs, fmt.Errorf("--%s: must not be negative, got %v", flag, d))
		}
	}
	notNegative("resize-timeout", c.ResizeTimeout)
	notNegative("modify-timeout", c.ModifyTimeout)
	if c.Workers <= 0 {
		errs = append(errs, fmt.Errorf("--workers: must be positive, got %d", c.Workers))
	}
	notNegative("resync-period", c.ResyncPeriod)
	return errors.Join(errs...)
}
