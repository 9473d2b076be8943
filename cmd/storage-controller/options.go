package main

import (
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/provisioner"
)

// commonConfig is what every role shares.
type commonConfig struct {
	CSIAddress           string        `mapstructure:"csi-address"`
	CSISocket            string        `mapstructure:"csi-socket"`
	ExitOnConnectionLoss bool          `mapstructure:"exit-on-connection-loss"`
	MaxGRPCLogLength     int           `mapstructure:"max-grpc-log-length"`
	Kubeconfig           string        `mapstructure:"kubeconfig"`
	Master               string        `mapstructure:"master"`
	KubeAPIQPS           float64       `mapstructure:"kube-api-qps"`
	KubeAPIBurst         int           `mapstructure:"kube-api-burst"`
	LeaderElection       bool          `mapstructure:"leader-election"`
	LeaseNamespace       string        `mapstructure:"leader-election-namespace"`
	LeaseDuration        time.Duration `mapstructure:"leader-election-lease-duration"`
	RenewDeadline        time.Duration `mapstructure:"leader-election-renew-deadline"`
	RetryPeriod          time.Duration `mapstructure:"leader-election-retry-period"`
	LeaseLabels          pairs         `mapstructure:"leader-election-labels"`
	HTTPEndpoint         string        `mapstructure:"http-endpoint"`
	MetricsAddress       string        `mapstructure:"metrics-address"`
	MetricsBindAddress   string        `mapstructure:"metrics-bind-address"`
	MetricsPath          string        `mapstructure:"metrics-path"`
	SecureMetrics        bool          `mapstructure:"secure-metrics-server"`
	HealthBindAddress    string        `mapstructure:"health-probe-bind-address"`
	ProfilingBindAddress string        `mapstructure:"profiling-bind-address"`
	EnablePprof          bool          `mapstructure:"enable-pprof"`
	AutoMaxProcs         bool          `mapstructure:"automaxprocs"`
	OTLPEndpoint         string        `mapstructure:"otlp-endpoint"`
	OTLPSamplingRatio    float64       `mapstructure:"otlp-sampling-ratio"`
	FeatureGates         gates         `mapstructure:"feature-gates"`
	Controllers          []string      `mapstructure:"controllers"`
	AuditInterval        time.Duration `mapstructure:"audit-interval"`
	Logging              loggingConfig `mapstructure:",squash"`
}

// flagOnly names the options that are no settings: they are in no file and no
// environment variable, but for that of config.
var flagOnly = []string{"config", "version", "print-config"}

// kubeconfigOfUser is what --kubeconfig means to a command that a person runs.
const kubeconfigOfUser = "kubeconfig file; empty means the service account of the pod, or outside of a pod ~/.kube/config. The environment variable KUBECONFIG, which may list several files, wins over it"

// forUser has the help of fs tell where such a command looks.
func forUser(fs *pflag.FlagSet) { fs.Lookup("kubeconfig").Usage = kubeconfigOfUser }

// commonOptions are the options that every role has, for the command that runs roles.
// all tells whether it is "all", where the clients have no rate limit unless one is set.
func commonOptions(all bool, roles ...role) []option {
	lease, driver := election.DefaultConfig(), csiclient.DefaultConfig()
	qps, burst, limit := 5.0, 10, "requests per second of each role to the API server; 0 means no limit"
	elect, electUsage := false, "work only while holding the Lease of a role, so that several replicas can run"
	if all {
		qps, burst = 0, 0
		electUsage += "; needed for what deletes after the loss of a node"
	}
	if !all && roles[0].section == nodecontrollerSection {
		// As its counterpart has it, and unlike the sidecars: two of it must not delete
		// at the same time.
		elect, lease.RetryPeriod = true, 2*time.Second
	}
	options := []option{
		{name: "config", def: "", usage: "configuration file in YAML; its keys are the names of the flags"},
		{name: "csi-address", def: driver.Address, usage: "socket of the CSI driver: an absolute path or unix://PATH"},
		{name: "exit-on-connection-loss", def: false, usage: "exit when the connection to the driver is lost, instead of waiting for the driver to come back"},
		{name: "max-grpc-log-length", def: -1, usage: "cut logged responses of the driver to this number of bytes; 0 or less means no limit"},
		{name: "kubeconfig", def: "", usage: "kubeconfig file; empty means the service account of the pod. The environment variable KUBECONFIG, which may list several files, wins over it"},
		{name: "master", def: "", usage: "URL of the API server"},
		{name: "kube-api-qps", def: qps, usage: limit},
		{name: "kube-api-burst", def: burst, usage: "requests to the API server that may exceed --kube-api-qps at once"},
		{name: "leader-election", def: elect, usage: electUsage},
		{name: "leader-election-namespace", def: "", usage: "namespace of the Leases; empty means POD_NAMESPACE, else that of the service account, else default"},
		{name: "leader-election-lease-duration", def: lease.LeaseDuration, usage: "how long other replicas wait for a leader that does not renew"},
		{name: "leader-election-renew-deadline", def: lease.RenewDeadline, usage: "how long a leader that cannot renew goes on"},
		{name: "leader-election-retry-period", def: lease.RetryPeriod, usage: "time between two attempts to win or renew the Lease"},
		{name: "leader-election-labels", def: pairs{}, usage: "labels of the Lease while this replica leads"},
		{name: "http-endpoint", def: "", usage: "address of the server for metrics, health and diagnosis, such as :8080; empty means none"},
		{name: "metrics-address", def: "", usage: "deprecated name of --http-endpoint; only one of them may be set"},
		{name: "metrics-path", def: "/metrics", usage: "path of the metrics"},
		{name: "enable-pprof", def: false, usage: "serve profiles under /debug/pprof/ at the HTTP endpoint"},
		{name: "otlp-endpoint", def: "", usage: "URL of an OpenTelemetry collector for traces (OTLP over gRPC), such as http://collector:4317, or https:// for TLS; empty means no tracing"},
		{name: "otlp-sampling-ratio", def: 1.0, usage: "part of the operations that is traced, from 0 to 1"},
		{name: "automaxprocs", def: false, usage: "accepted for compatibility: the number of threads always follows the CPU limit of the container"},
		{name: "feature-gates", def: gates{}, usage: gatesUsage()},
		{name: "version", def: false, usage: "print the version and exit"},
		{name: "v", def: 0, usage: "verbosity of the logs: 1 a line per sync, 2 reasons, 5 calls of the driver, 6 and 7 requests to the API server; more is 7, since bodies of requests have secrets in them"},
		{name: "vmodule", def: "", usage: "verbosity per source file, as pattern=N,..."},
		{name: "logging-format", def: "text", usage: "text or json"},
		{name: "log-flush-frequency", def: 5 * time.Second, usage: "how often buffered logs are written"},
		{name: "log-text-split-stream", def: false, usage: "with text: errors to stderr and everything else to stdout"},
		{name: "log-json-split-stream", def: false, usage: "with json: errors to stderr and everything else to stdout"},
		{name: "log-text-info-buffer-size", def: "0", usage: "with --log-text-split-stream: buffer stdout up to this size"},
		{name: "log-json-info-buffer-size", def: "0", usage: "with --log-json-split-stream: buffer stdout up to this size"},
	}
	if slices.ContainsFunc(roles, func(r role) bool { return r.section == nodecontrollerSection }) {
		options = append(options, nodecontrollerCommonOptions()...)
	}
	if having(roles, provisionerRole.section) {
		options = append(options, option{name: "audit-interval", def: time.Duration(0), usage: "time between two comparisons of the volumes that the driver lists with the PersistentVolumes, for metrics and the log; 0 means none"})
	}
	if all {
		options = append(options, option{name: "controllers", def: "", usage: "roles to run, as provisioner,attacher; empty means all that the driver supports"})
	}
	return options
}

func provisionerOptions(bool) roleOptions {
	d := provisioner.DefaultConfig()
	return roleOptions{"provisioner", []option{
		{name: "timeout", def: d.Timeout, usage: "deadline of each call of the driver"},
		{name: "worker-threads", def: uint(d.WorkerThreads), usage: "claims, and separately volumes to delete, that are worked on at the same time"},
		{name: "retry-interval-start", def: d.RetryIntervalStart, usage: "first delay after a failure; doubles with each further one"},
		{name: "retry-interval-max", def: d.RetryIntervalMax, usage: "longest delay after a failure"},
		{name: "default-fstype", def: d.DefaultFSType, usage: "file system of volumes whose class names none"},
		{name: "volume-name-prefix", def: d.VolumeNamePrefix, usage: "first part of the names of volumes"},
		{name: "volume-name-uuid-length", def: d.VolumeNameUUIDLength, usage: "characters of the UID of the claim in the name of its volume; -1 means all, with dashes"},
		{name: "strict-topology", def: d.StrictTopology, usage: "late binding: ask for the topology of the selected node only"},
		{name: "immediate-topology", def: d.ImmediateTopology, usage: "immediate binding: ask for the topologies of the cluster; false means any, unless the class restricts them"},
		{name: "extra-create-metadata", def: d.ExtraCreateMetadata, usage: "tell the driver the names of claim and volume"},
		{name: "controller-publish-readonly", def: d.ControllerPublishReadonly, usage: "mark volumes that are only read, by many nodes, as read-only"},
		{name: "provisioning-protection", def: string(d.ProvisioningProtection), usage: "keep a claim, by a finalizer, while its volume may be coming into being: off, on-retry (from the first uncertain answer on) or always"},
		{name: "prevent-volume-mode-conversion", def: d.PreventVolumeModeConversion, usage: "refuse to restore a snapshot with another volume mode, unless an annotation of its content allows that"},
		{name: "cloning-protection-threads", def: uint(d.CloningProtectionThreads), usage: "sources of clones, and separately snapshots, that are released at the same time"},
		{name: "snapshot-orphan-sweep-interval", def: d.SnapshotOrphanSweepInterval, usage: "time between two looks for snapshots that were left protected; 0 or less means never"},
		{name: "secret-namespaces", def: []string{}, usage: "namespaces, separated by commas, whose secrets StorageClasses may name; empty means all"},
		{name: "node-deployment", def: d.NodeDeployment, usage: "run once per node, for the volumes of that node; needs the environment variable NODE_NAME"},
		{name: "node-deployment-immediate-binding", def: d.NodeDeploymentImmediateBinding, usage: "with --node-deployment: compete for claims with immediate binding"},
		{name: "node-deployment-base-delay", def: d.NodeDeploymentBaseDelay, usage: "with --node-deployment: each instance waits for a random part of this before it tries to own a claim; doubles with each unsuccessful try"},
		{name: "node-deployment-max-delay", def: d.NodeDeploymentMaxDelay, usage: "with --node-deployment: longest such delay"},
	}}
}

func attacherOptions(bool) roleOptions {
	d := attacher.DefaultConfig()
	return roleOptions{"attacher", []option{
		{name: "timeout", def: d.Timeout, usage: "deadline of each call of the driver"},
		{name: "worker-threads", def: uint(d.WorkerThreads), usage: "attachments, and separately volumes, that are worked on at the same time"},
		{name: "retry-interval-start", def: d.RetryIntervalStart, usage: "first delay after a failure; doubles with each further one"},
		{name: "retry-interval-max", def: d.RetryIntervalMax, usage: "longest delay after a failure"},
		{name: "default-fstype", def: d.DefaultFSType, usage: "file system of volumes that name none"},
		{name: "resync", def: d.Resync, usage: "time between two looks at all attachments that are not done; 0 means none"},
		{name: "reconcile-sync", def: d.ReconcileSync, usage: "time between two comparisons of the attachments with the volumes that the driver lists, for drivers that report where they are published; 0 means none"},
		{name: "max-entries", def: d.MaxEntries, usage: "volumes per page of such a list; 0 leaves that to the driver"},
	}}
}

// capacityOptions come after those that the role shares with the provisioner. In "all"
// capacity is published where the driver can tell it, and without a rate limit.
func capacityOptions(all bool) roleOptions {
	d := capacity.DefaultConfig()
	if all {
		d.Enabled, d.QPS, d.Burst = true, 0, 0
	}
	return roleOptions{"capacity", []option{
		{name: "timeout", def: d.Timeout, usage: "deadline of each call of the driver"},
		{name: "retry-interval-start", def: d.RetryIntervalStart, usage: "first delay after a failure; doubles with each further one"},
		{name: "retry-interval-max", def: d.RetryIntervalMax, usage: "longest delay after a failure"},
		{name: "node-deployment", def: d.NodeDeployment, usage: "run once per node, for the capacity of that node; needs the environment variable NODE_NAME"},
		{name: "enable-capacity", def: d.Enabled, usage: "publish the capacity of the driver as CSIStorageCapacity objects, as the command capacity does in any case; needs the environment variable NAMESPACE, and POD_NAME unless the objects have no owner"},
		{name: "capacity-threads", def: uint(d.Threads), usage: "pairs of a class and a topology segment that are worked on at the same time"},
		{name: "capacity-poll-interval", def: d.PollInterval, usage: "age at which a capacity is asked for again"},
		{name: "capacity-ownerref-level", def: d.OwnerRefLevel, usage: "owner of the CSIStorageCapacity objects: 0 the pod of this process, 1 its controller (StatefulSet, DaemonSet), 2 the controller of that (Deployment), and so on; negative: none"},
		{name: "capacity-for-immediate-binding", def: d.ImmediateBinding, usage: "publish capacity also for classes with immediate binding"},
		{name: "capacity-removal-grace", def: d.RemovalGrace, usage: "how long the objects of a topology segment stay after its last node has left"},
		{name: "kube-api-capacity-qps", def: d.QPS, usage: "requests per second to the API server for CSIStorageCapacity objects; 0 means no limit"},
		{name: "kube-api-capacity-burst", def: d.Burst, usage: "requests for CSIStorageCapacity objects that may exceed --kube-api-capacity-qps at once"},
	}}
}
