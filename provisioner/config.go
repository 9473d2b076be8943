// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Protection selects when a claim gets the finalizer that keeps it while the outcome of its
// CreateVolume is unknown.
type Protection string

const (
	// ProtectionOff never adds the finalizer. A volume is leaked if the process exits while its
	// CreateVolume is indeterminate and the claim is deleted before another process repeats it.
	ProtectionOff Protection = "off"
	// ProtectionOnRetry adds the finalizer after the first indeterminate response. With distributed
	// provisioning it adds the finalizer to clones and restores before the first call, so that
	// other nodes see that the source is in use.
	ProtectionOnRetry Protection = "on-retry"
	// ProtectionAlways adds the finalizer before the first call.
	ProtectionAlways Protection = "always"
)

// Config holds the settings of the provisioner.
type Config struct {
	// Timeout bounds one CreateVolume, DeleteVolume or GetCapacity call. A creation or deletion that times out is
	// indeterminate and is repeated with the same arguments (CSI spec, "Timeouts").
	Timeout time.Duration
	// WorkerThreads is the number of claims, and separately of volumes to delete, that are
	// reconciled at the same time.
	WorkerThreads uint
	// RetryIntervalStart is the delay after the first failure of an object. It doubles with
	// each further failure, up to RetryIntervalMax, which is also the delay after an infeasible request.
	RetryIntervalStart time.Duration
	RetryIntervalMax   time.Duration
	// DefaultFSType is the file system type if the class has none; it may be empty.
	DefaultFSType string
	// VolumeNamePrefix begins the name of every volume, before a dash and the UID of its claim.
	VolumeNamePrefix string
	// VolumeNameUUIDLength is the number of characters of the UID, without its dashes, in
	// the name. -1 means the whole UID with dashes.
	VolumeNameUUIDLength int
	// StrictTopology requires the topology of the selected node.
	StrictTopology bool
	// ImmediateTopology passes the topologies of all nodes if no node is selected.
	ImmediateTopology bool
	// ExtraCreateMetadata passes the names of claim and volume to the driver.
	ExtraCreateMetadata bool
	// ControllerPublishReadonly marks ReadOnlyMany volumes as read-only.
	ControllerPublishReadonly bool
	// ProvisioningProtection is ProtectionOff, ProtectionOnRetry or ProtectionAlways.
	ProvisioningProtection Protection
	// PreventVolumeModeConversion refuses to restore a snapshot with another volume mode,
	// unless an annotation of the VolumeSnapshotContent permits it.
	PreventVolumeModeConversion bool
	// CloningProtectionThreads is the number of cloned claims, and separately of restored
	// snapshots, whose finalizers are removed at the same time.
	CloningProtectionThreads uint
	// SnapshotOrphanSweepInterval is the interval of the search for snapshots with a leftover
	// finalizer; 0 or less disables it.
	SnapshotOrphanSweepInterval time.Duration
	// SecretNamespaces are the namespaces in which secrets of classes may be; empty means all. The process sets it.
	SecretNamespaces []string

	// NodeDeployment enables distributed provisioning: one instance per node.
	NodeDeployment bool
	// NodeDeploymentImmediateBinding lets the instances compete for claims with immediate
	// binding. Before a try, each waits NodeDeploymentBaseDelay, doubled for each failed try up to NodeDeploymentMaxDelay,
	// less a random part of NodeDeploymentBaseDelay.
	NodeDeploymentImmediateBinding bool
	NodeDeploymentBaseDelay        time.Duration
	NodeDeploymentMaxDelay         time.Duration
	// NodeName is the node of this instance; it must not be empty with NodeDeployment.
	NodeName string

	// Feature gates of the same names. Without Topology, requests and PersistentVolumes have
	// none. Without VolumeAttributesClass, this field of a claim is ignored.
	Topology                       bool
	VolumeAttributesClass          bool
	CrossNamespaceVolumeDataSource bool
}

// DefaultConfig returns the defaults of the settings.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, WorkerThreads: 100, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		VolumeNamePrefix: "pvc", VolumeNameUUIDLength: -1, ImmediateTopology: true,
		ProvisioningProtection: ProtectionOnRetry, PreventVolumeModeConversion: true, CloningProtectionThreads: 1,
		SnapshotOrphanSweepInterval: 5 * time.Minute, NodeDeploymentImmediateBinding: true,
		NodeDeploymentBaseDelay: 20 * time.Second, NodeDeploymentMaxDelay: time.Minute,
		Topology: true, VolumeAttributesClass: true,
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	workloop.AddFlags(fs, &c.Timeout, &c.RetryIntervalStart, &c.RetryIntervalMax)
	fs.UintVar(&c.WorkerThreads, "worker-threads", c.WorkerThreads,
		"number of PersistentVolumeClaims, and separately of PersistentVolumes to delete, that are reconciled at the same time")
	fs.StringVar(&c.DefaultFSType, "default-fstype", c.DefaultFSType, "file system of volumes whose StorageClass does not set one")
	fs.StringVar(&c.VolumeNamePrefix, "volume-name-prefix", c.VolumeNamePrefix, "prefix of volume names")
	fs.IntVar(&c.VolumeNameUUIDLength, "volume-name-uuid-length", c.VolumeNameUUIDLength,
		"number of characters of the claim's UID in the volume name; -1 means the whole UID with dashes")
	fs.BoolVar(&c.StrictTopology, "strict-topology", c.StrictTopology,
		"with WaitForFirstConsumer: request only the topology segment of the selected node")
	fs.BoolVar(&c.ImmediateTopology, "immediate-topology", c.ImmediateTopology,
		"with Immediate binding: request the topology segments of the cluster; "+
			"false means no topology requirement unless the StorageClass restricts it")
	fs.BoolVar(&c.ExtraCreateMetadata, "extra-create-metadata", c.ExtraCreateMetadata, "pass PVC and PV metadata to CreateVolume")
	fs.BoolVar(&c.ControllerPublishReadonly, "controller-publish-readonly", c.ControllerPublishReadonly,
		"mark volumes whose only access mode is ReadOnlyMany as read-only")
	fs.StringVar((*string)(&c.ProvisioningProtection), "provisioning-protection", string(c.ProvisioningProtection),
		"when to add a finalizer to a PVC so that its volume cannot leak: "+
			"off, on-retry (after the first CreateVolume call with an unknown outcome, or if the PV cannot be created) or always "+
			"(before the first call; 2 more writes per volume)")
	fs.BoolVar(&c.PreventVolumeModeConversion, "prevent-volume-mode-conversion", c.PreventVolumeModeConversion,
		"refuse to restore a snapshot with another volume mode, unless an annotation of its VolumeSnapshotContent allows it")
	fs.UintVar(&c.CloningProtectionThreads, "cloning-protection-threads", c.CloningProtectionThreads,
		"number of clone sources, and separately of snapshots, whose finalizer is removed at the same time")
	fs.DurationVar(&c.SnapshotOrphanSweepInterval, "snapshot-orphan-sweep-interval", c.SnapshotOrphanSweepInterval,
		"time between two searches for snapshots that are still protected without need; 0 or less means never")
	fs.BoolVar(&c.NodeDeployment, "node-deployment", c.NodeDeployment,
		"distributed provisioning: run once per node, for its volumes; requires the environment variable NODE_NAME")
	fs.BoolVar(&c.NodeDeploymentImmediateBinding, "node-deployment-immediate-binding", c.NodeDeploymentImmediateBinding,
		"with --node-deployment: also compete for PVCs with Immediate binding")
	fs.DurationVar(&c.NodeDeploymentBaseDelay, "node-deployment-base-delay", c.NodeDeploymentBaseDelay,
		"with --node-deployment: maximum random delay before an instance tries to select its node for a PVC; "+
			"doubles with each unsuccessful attempt")
	fs.DurationVar(&c.NodeDeploymentMaxDelay, "node-deployment-max-delay", c.NodeDeploymentMaxDelay,
		"with --node-deployment: upper limit of that delay")
}

// uuidCharacters is the length of a UID without its dashes.
const uuidCharacters = 32

// Validate reports every invalid field of c.
func (c Config) Validate() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	if c.WorkerThreads == 0 {
		errs = append(errs, fmt.Errorf("--worker-threads: must be positive, got %d", c.WorkerThreads))
	}
	if c.CloningProtectionThreads == 0 {
		errs = append(errs, fmt.Errorf("--cloning-protection-threads: must be positive, got %d", c.CloningProtectionThreads))
	}
	if c.NodeDeployment {
		positive := func(flag string, d time.Duration) {
			if d <= 0 {
				errs = append(errs, fmt.Errorf("--%s: must be positive, got %v", flag, d))
			}
		}
		positive("node-deployment-base-delay", c.NodeDeploymentBaseDelay)
		positive("node-deployment-max-delay", c.NodeDeploymentMaxDelay)
		if c.NodeName == "" {
			errs = append(errs, errors.New("--node-deployment: the environment variable NODE_NAME must name the node"))
		}
	}
	characters := uuidCharacters + 4                                         // with the dashes
	if n := c.VolumeNameUUIDLength; n < -1 || n == 0 || n > uuidCharacters { // 0 gives all claims the same name
		errs = append(errs, fmt.Errorf("--volume-name-uuid-length: must be -1, or between 1 and %d, got %d", uuidCharacters, n))
	} else if n > 0 {
		characters = n
	}
	// With an invalid name, the driver would create volumes whose PersistentVolumes cannot be created.
	if problems := validation.IsDNS1123Subdomain(c.VolumeNamePrefix + "-" + strings.Repeat("0", characters)); len(problems) > 0 {
		errs = append(errs, fmt.Errorf("--volume-name-prefix: %q cannot begin the name of a PersistentVolume: %s",
			c.VolumeNamePrefix, strings.Join(problems, ", ")))
	}
	switch c.ProvisioningProtection {
	case ProtectionOff, ProtectionOnRetry, ProtectionAlways:
	default:
		errs = append(errs, fmt.Errorf("--provisioning-protection: must be %s, %s or %s, got %q",
			ProtectionOff, ProtectionOnRetry, ProtectionAlways, c.ProvisioningProtection))
	}
	return errors.Join(errs...)
}
