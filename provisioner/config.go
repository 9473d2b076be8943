// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
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
	Timeout time.Duration `mapstructure:"timeout"`
	// WorkerThreads is the number of claims, and separately of volumes to delete, that are
	// reconciled at the same time.
	WorkerThreads int `mapstructure:"worker-threads"`
	// RetryIntervalStart is the delay after the first failure of an object. It doubles with
	// each further failure, up to RetryIntervalMax, which is also the delay after an infeasible request.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// DefaultFSType is the file system type if the class has none; it may be empty.
	DefaultFSType string `mapstructure:"default-fstype"`
	// VolumeNamePrefix begins the name of every volume, before a dash and the UID of its claim.
	VolumeNamePrefix string `mapstructure:"volume-name-prefix"`
	// VolumeNameUUIDLength is the number of characters of the UID, without its dashes, in
	// the name. -1 means the whole UID with dashes.
	VolumeNameUUIDLength int `mapstructure:"volume-name-uuid-length"`
	// StrictTopology requires the topology of the selected node.
	StrictTopology bool `mapstructure:"strict-topology"`
	// ImmediateTopology passes the topologies of all nodes if no node is selected.
	ImmediateTopology bool `mapstructure:"immediate-topology"`
	// ExtraCreateMetadata passes the names of claim and volume to the driver.
	ExtraCreateMetadata bool `mapstructure:"extra-create-metadata"`
	// ControllerPublishReadonly marks ReadOnlyMany volumes as read-only.
	ControllerPublishReadonly bool `mapstructure:"controller-publish-readonly"`
	// ProvisioningProtection is ProtectionOff, ProtectionOnRetry or ProtectionAlways.
	ProvisioningProtection Protection `mapstructure:"provisioning-protection"`
	// PreventVolumeModeConversion refuses to restore a snapshot with another volume mode,
	// unless an annotation of the VolumeSnapshotContent permits it.
	PreventVolumeModeConversion bool `mapstructure:"prevent-volume-mode-conversion"`
	// CloningProtectionThreads is the number of cloned claims, and separately of restored
	// snapshots, whose finalizers are removed at the same time.
	CloningProtectionThreads int `mapstructure:"cloning-protection-threads"`
	// SnapshotOrphanSweepInterval is the interval of the search for snapshots with a leftover
	// finalizer; 0 or less disables it.
	SnapshotOrphanSweepInterval time.Duration `mapstructure:"snapshot-orphan-sweep-interval"`
	// SecretNamespaces are the namespaces in which secrets of classes may be; empty means all. The process sets it.
	SecretNamespaces []string `mapstructure:"-"`

	// NodeDeployment enables distributed provisioning: one instance per node.
	NodeDeployment bool `mapstructure:"node-deployment"`
	// NodeDeploymentImmediateBinding lets the instances compete for claims with immediate
	// binding. Before a try, each waits NodeDeploymentBaseDelay, doubled for each failed try up to NodeDeploymentMaxDelay,
	// less a random part of NodeDeploymentBaseDelay.
	NodeDeploymentImmediateBinding bool          `mapstructure:"node-deployment-immediate-binding"`
	NodeDeploymentBaseDelay        time.Duration `mapstructure:"node-deployment-base-delay"`
	NodeDeploymentMaxDelay         time.Duration `mapstructure:"node-deployment-max-delay"`
	// NodeName is the node of this instance; it must not be empty with NodeDeployment.
	NodeName string `mapstructure:"-"`

	// Feature gates of the same names. Without Topology, requests and PersistentVolumes have
	// none. Without VolumeAttributesClass, this field of a claim is ignored.
	Topology                       bool `mapstructure:"-"`
	VolumeAttributesClass          bool `mapstructure:"-"`
	CrossNamespaceVolumeDataSource bool `mapstructure:"-"`
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

// uuidCharacters is the length of a UID without its dashes.
const uuidCharacters = 32

// Validate reports every invalid field of c.
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
	if c.CloningProtectionThreads <= 0 {
		errs = append(errs, fmt.Errorf("--cloning-protection-threads: must be positive, got %d", c.CloningProtectionThreads))
	}
	if c.NodeDeployment {
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
