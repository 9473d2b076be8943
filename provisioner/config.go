package provisioner

import (
	"errors"
	"fmt"
	"time"
)

// Protection says when a claim gets the finalizer that keeps it while its volume
// may be coming into being.
type Protection string

const (
	// ProtectionOff never: a volume whose creation was in doubt is lost when the
	// process ends and the claim is deleted before another one has taken over.
	ProtectionOff Protection = "off"
	// ProtectionOnRetry from the first uncertain answer of the driver on.
	ProtectionOnRetry Protection = "on-retry"
	// ProtectionAlways from before the first call on.
	ProtectionAlways Protection = "always"
)

// Config is what an operator may set.
type Config struct {
	// Timeout bounds one CreateVolume or DeleteVolume call. A call that runs into it
	// is in doubt and is repeated with the same arguments (CSI spec, "Timeouts").
	Timeout time.Duration `mapstructure:"timeout"`
	// WorkerThreads is how many claims, and separately how many volumes to delete,
	// are worked on at the same time.
	WorkerThreads int `mapstructure:"worker-threads"`
	// RetryIntervalStart is the delay after the first failure of an object; it
	// doubles with each further one up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`
	// DefaultFSType is the file system of volumes whose class names none; it may be empty.
	DefaultFSType string `mapstructure:"default-fstype"`
	// VolumeNamePrefix begins the name of every volume, before a dash and the UID of its claim.
	VolumeNamePrefix string `mapstructure:"volume-name-prefix"`
	// VolumeNameUUIDLength is how many characters of the UID, without its dashes, are
	// used; -1 means the whole UID with them.
	VolumeNameUUIDLength int `mapstructure:"volume-name-uuid-length"`
	// StrictTopology asks for the topology of the selected node and no other.
	StrictTopology bool `mapstructure:"strict-topology"`
	// ImmediateTopology asks for the topologies of the cluster where no node is selected.
	ImmediateTopology bool `mapstructure:"immediate-topology"`
	// ExtraCreateMetadata tells the driver the names of claim and volume.
	ExtraCreateMetadata bool `mapstructure:"extra-create-metadata"`
	// ControllerPublishReadonly marks volumes that are read by many nodes read-only.
	ControllerPublishReadonly bool `mapstructure:"controller-publish-readonly"`
	// ProvisioningProtection is one of the constants.
	ProvisioningProtection Protection `mapstructure:"provisioning-protection"`
	// Topology is the feature gate of that name: without it topology is left out of
	// everything.
	Topology bool `mapstructure:"-"`
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{
		Timeout: 15 * time.Second, WorkerThreads: 100, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,
		VolumeNamePrefix: "pvc", VolumeNameUUIDLength: -1, ImmediateTopology: true,
		ProvisioningProtection: ProtectionOnRetry, Topology: true,
	}
}

// uuidCharacters is the length of a UID without its dashes.
const uuidCharacters = 32

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
	if c.VolumeNamePrefix == "" {
		errs = append(errs, errors.New("--volume-name-prefix: must not be empty"))
	}
	if n := c.VolumeNameUUIDLength; n < -1 || n == 0 || n > uuidCharacters { // 0 gives all claims one name
		errs = append(errs, fmt.Errorf("--volume-name-uuid-length: must be -1, or between 1 and %d, got %d", uuidCharacters, n))
	}
	switch c.ProvisioningProtection {
	case ProtectionOff, ProtectionOnRetry, ProtectionAlways:
	default:
		errs = append(errs, fmt.Errorf("--provisioning-protection: must be %s, %s or %s, got %q", ProtectionOff, ProtectionOnRetry, ProtectionAlways, c.ProvisioningProtection))
	}
	return errors.Join(errs...)
}
