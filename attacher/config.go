// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config holds the settings of the attacher.
type Config struct {
	// Timeout bounds one ControllerPublishVolume or ControllerUnpublishVolume call, and one page of ListVolumes. A publish
	// or unpublish that exceeds it is indeterminate and is repeated with the same arguments (CSI spec, "Timeouts").
	Timeout time.Duration
	// WorkerThreads is the number of VolumeAttachments, and separately of
	// PersistentVolumes, that are reconciled concurrently.
	WorkerThreads uint
	// RetryIntervalStart is the delay after the first failure of a VolumeAttachment. It
	// doubles with each further failure up to RetryIntervalMax.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// Resync is the interval at which all unfinished objects are enqueued. Zero disables
	// it: only events and failures enqueue.
	Resync time.Duration
	// ReconcileSync is the interval of the reconciliation with ListVolumes. It is longer if
	// ListVolumes takes long. Zero disables the reconciliation.
	ReconcileSync time.Duration
	// MaxEntries is the page size of ListVolumes. Zero lets the driver choose.
	MaxEntries int
	// DefaultFSType is the fsType of volumes that specify none. It may be empty.
	DefaultFSType string
	// StoreErrorCode writes the gRPC code of a failed publish to status.attachError, where
	// the kubelet looks for ResourceExhausted (KEP-4876).
	StoreErrorCode bool
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, WorkerThreads: 100, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		Resync: 10 * time.Minute, ReconcileSync: time.Minute, StoreErrorCode: true,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.UintVar(&c.WorkerThreads, "worker-threads", c.WorkerThreads,
		"number of VolumeAttachments, and separately of PersistentVolumes, that are reconciled at the same time")
	fs.StringVar(&c.DefaultFSType, "default-fstype", c.DefaultFSType, "file system of PersistentVolumes that do not set one")
	fs.DurationVar(&c.Resync, "resync", c.Resync,
		"time between two resyncs of all VolumeAttachments that are not in their final state; 0 means never")
	fs.DurationVar(&c.ReconcileSync, "reconcile-sync", c.ReconcileSync,
		"time between two reconciliations of VolumeAttachments with ListVolumes, for drivers with LIST_VOLUMES_PUBLISHED_NODES; "+
			"longer if listing takes long; 0 means never")
	fs.IntVar(&c.MaxEntries, "max-entries", c.MaxEntries, "maximum entries per ListVolumes page; 0 lets the driver decide")
}

// Validate returns all errors in c, joined.
func (c Config) Validate() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	if c.WorkerThreads == 0 {
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
