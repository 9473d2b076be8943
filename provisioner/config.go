package provisioner

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Protection says when a claim gets the finalizer that keeps it while its volume
// may be coming into being.
type Protection string

const (
	// ProtectionOff never: a volume whose creation was in doubt is lost when the
	// process ends and the claim is deleted before another one has taken over.
	ProtectionOff Protection = "off"
	// ProtectionOnRetry from the first uncertain answer of the driver on; for copies in
	// a node deployment from before the first call on, so that the instances of other
	// nodes know that the source is in use.
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
	// PreventVolumeModeConversion refuses to restore a snapshot with another volume mode,
	// unless an annotation of its content allows it.
	PreventVolumeModeConversion bool `mapstructure:"prevent-volume-mode-conversion"`
	// CloningProtectionThreads is how many sources of clones, and separately of
	// restored snapshots, are released at the same time.
	CloningProtectionThreads int `mapstructure:"cloning-protection-threads"`
	// SnapshotOrphanSweepInterval is the time between two looks for snapshots that were
	// left protected; 0 or less means never.
	SnapshotOrphanSweepInterval time.Duration `mapstructure:"snapshot-orphan-sweep-interval"`
	// SecretNamespaces are the namespaces whose secrets classes may name; none means all.
	SecretNamespaces []string `mapstructure:"secret-namespaces"`

	// NodeDeployment is for one instance per node, each of which provisions on its own.
	NodeDeployment bool `mapstructure:"node-deployment"`
	// NodeDeploymentImmediateBinding lets instances compete for claims with immediate
	// binding: each waits for a random part of NodeDeploymentBaseDelay, doubled with
	// each unsuccessful try up to NodeDeploymentMaxDelay.
	NodeDeploymentImmediateBinding bool          `mapstructure:"node-deployment-immediate-binding"`
	NodeDeploymentBaseDelay        time.Duration `mapstructure:"node-deployment-base-delay"`
	NodeDeploymentMaxDelay         time.Duration `mapstructure:"node-deployment-max-delay"`
	// NodeName is the node of this instance; it must not be empty with NodeDeployment.
	NodeName string `mapstructure:"-"`

	// Feature gates of the same names. Without Topology it is left out of everything,
	// without VolumeAttributesClass that field of a claim is ignored.
	Topology                       bool `mapstructure:"-"`
	VolumeAttributesClass          bool `mapstructure:"-"`
	CrossNamespaceVolumeDataSource bool `mapstructure:"-"`
}

// DefaultConfig is what is used where the operator sets nothing.
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
	if c.CloningProtectionThreads <= 0 {
		errs = append(errs, fmt.Errorf("--cloning-protection-threads: must be positive, got %d", c.CloningProtectionThreads))
	}
	for _, namespace := range c.SecretNamespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--secret-namespaces: %q is no name of a namespace: %s", namespace, strings.Join(problems, ", ")))
		}
	}
	if c.NodeDeployment {
		positive("node-deployment-base-delay", c.NodeDeploymentBaseDelay)
		positive("node-deployment-max-delay", c.NodeDeploymentMaxDelay)
		if c.NodeName == "" {
			errs = append(errs, errors.New("--node-deployment: the environment variable NODE_NAME must name the node"))
		}
	}
	characters := uuidCharacters + 4                                         // with the dashes
	if n := c.VolumeNameUUIDLength; n < -1 || n == 0 || n > uuidCharacters { // 0 gives all claims one name
		errs = append(errs, fmt.Errorf("--volume-name-uuid-length: must be -1, or between 1 and %d, got %d", uuidCharacters, n))
	} else if n > 0 {
		characters = n
	}
	// A driver would make volumes for which no PersistentVolume can ever be saved.
	if problems := validation.IsDNS1123Subdomain(c.VolumeNamePrefix + "-" + strings.Repeat("0", characters)); len(problems) > 0 {
		errs = append(errs, fmt.Errorf("--volume-name-prefix: %q cannot begin the name of a PersistentVolume: %s", c.VolumeNamePrefix, strings.Join(problems, ", ")))
	}
	switch c.ProvisioningProtection {
	case ProtectionOff, ProtectionOnRetry, ProtectionAlways:
	default:
		errs = append(errs, fmt.Errorf("--provisioning-protection: must be %s, %s or %s, got %q", ProtectionOff, ProtectionOnRetry, ProtectionAlways, c.ProvisioningProtection))
	}
	return errors.Join(errs...)
}
