// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Config holds the settings of the snapshotter.
type Config struct {
	// Timeout bounds one CSI call. CreateSnapshot blocks until the snapshot is cut. A call that
	// exceeds it is indeterminate and is repeated with the same arguments (CSI spec, "Timeouts").
	Timeout time.Duration
	// WorkerThreads is the number of VolumeSnapshotContents, and separately of
	// VolumeGroupSnapshotContents, that are reconciled concurrently.
	WorkerThreads uint
	// RetryIntervalStart is the delay after the first failure of an object, and after the first
	// check of a snapshot that is not ready. Both double up to RetryIntervalMax, separately.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// ResyncPeriod is the interval at which all unfinished objects are enqueued. Zero disables it.
	ResyncPeriod time.Duration
	// SnapshotNamePrefix begins the name of every snapshot. A dash and the UID of the VolumeSnapshot follow.
	// SnapshotNameUUIDLength is the number of characters of that UID, 1 to 32, without dashes; -1: the whole UID with dashes.
	// The fields with Group do the same for VolumeGroupSnapshots.
	SnapshotNamePrefix          string
	SnapshotNameUUIDLength      int
	GroupSnapshotNamePrefix     string
	GroupSnapshotNameUUIDLength int
	// ExtraCreateMetadata passes the names of VolumeSnapshot and VolumeSnapshotContent to the driver.
	ExtraCreateMetadata bool
	// SecretNamespaces are the namespaces in which secrets may be; empty means all. The process sets it.
	SecretNamespaces []string
	// NodeDeployment enables distributed snapshotting: one instance per node, for the contents with LabelManagedBy=NodeName.
	NodeDeployment bool
	NodeName       string
	// Groups is the feature gate CSIVolumeGroupSnapshot.
	Groups bool
	// RecheckInterval is the longest time between two searches for CRDs that are not installed. A watch is closed after a third of
	// it without them.
	RecheckInterval time.Duration
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		Timeout: time.Minute, WorkerThreads: 10, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		ResyncPeriod: 15 * time.Minute, SnapshotNamePrefix: "snapshot", SnapshotNameUUIDLength: -1,
		GroupSnapshotNamePrefix: "groupsnapshot", GroupSnapshotNameUUIDLength: -1, Groups: true,
		RecheckInterval: 30 * time.Second,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.UintVar(&c.WorkerThreads, "worker-threads", c.WorkerThreads,
		"number of VolumeSnapshotContents, and separately of VolumeGroupSnapshotContents, that are reconciled at the same time")
	fs.DurationVar(&c.ResyncPeriod, "resync-period", c.ResyncPeriod,
		"time between two resyncs of all contents that are not in their final state; 0 means never")
	fs.StringVar(&c.SnapshotNamePrefix, "snapshot-name-prefix", c.SnapshotNamePrefix, "prefix of snapshot names")
	fs.IntVar(&c.SnapshotNameUUIDLength, "snapshot-name-uuid-length", c.SnapshotNameUUIDLength,
		"number of characters of the VolumeSnapshot's UID in the snapshot name; -1 means the whole UID with dashes")
	fs.StringVar(&c.GroupSnapshotNamePrefix, "groupsnapshot-name-prefix", c.GroupSnapshotNamePrefix,
		"prefix of the names of group snapshots")
	fs.IntVar(&c.GroupSnapshotNameUUIDLength, "groupsnapshot-name-uuid-length", c.GroupSnapshotNameUUIDLength,
		"number of characters of the VolumeGroupSnapshot's UID in the name of the group; -1 means the whole UID with dashes")
	fs.BoolVar(&c.ExtraCreateMetadata, "extra-create-metadata", c.ExtraCreateMetadata,
		"pass the names of VolumeSnapshot and VolumeSnapshotContent to CreateSnapshot")
	fs.BoolVar(&c.NodeDeployment, "node-deployment", c.NodeDeployment,
		"distributed snapshotting: run once per node, for the VolumeSnapshotContents with its label; "+
			"requires the environment variable NODE_NAME")
}

// uuidCharacters is the length of a UID without its dashes.
const uuidCharacters = 32

// Validate returns all errors in c, joined.
func (c Config) Validate() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	fail := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flag+": "+format, args...))
	}
	if c.ResyncPeriod < 0 {
		fail("resync-period", "must not be negative, got %v", c.ResyncPeriod)
	}
	if c.WorkerThreads == 0 {
		fail("worker-threads", "must be positive, got %d", c.WorkerThreads)
	}
	for prefix, length := range map[[2]string]int{
		{"snapshot", c.SnapshotNamePrefix}:           c.SnapshotNameUUIDLength,
		{"groupsnapshot", c.GroupSnapshotNamePrefix}: c.GroupSnapshotNameUUIDLength,
	} {
		if prefix[1] == "" {
			fail(prefix[0]+"-name-prefix", "must not be empty")
		}
		if length != -1 && (length < 1 || length > uuidCharacters) { // 0 gives all snapshots the same name
			fail(prefix[0]+"-name-uuid-length", "must be -1, or between 1 and %d, got %d", uuidCharacters, length)
		}
	}
	if c.NodeDeployment && c.NodeName == "" {
		fail("node-deployment", "the environment variable NODE_NAME must name the node")
	}
	return errors.Join(errs...)
}
