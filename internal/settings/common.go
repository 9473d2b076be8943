// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
)

// Common holds the settings of the process as a whole.
type Common struct {
	CSIAddress           string
	CSISocket            string // alias of CSIAddress
	ExitOnConnectionLoss bool
	MaxGRPCLogLength     int      // in bytes; 0 or less: no limit
	Kubeconfig           string   // empty: the ServiceAccount of the pod
	Master               string   // URL of the API server; empty: from Kubeconfig
	KubeAPIQPS           float64  // requests per second of each role; 0 or less: no limit
	KubeAPIBurst         int      // requests that may exceed KubeAPIQPS at once; 0: 10
	SecretNamespaces     []string // of the Secrets that roles may read; empty: all
	LeaderElection       bool
	LeaseNamespace       string // empty: see [election.Namespace]
	// LeaseDuration is the time after which a standby acquires a Lease that is not renewed.
	LeaseDuration time.Duration
	// RenewDeadline is the time for which a leader works while it cannot renew its Lease.
	RenewDeadline        time.Duration
	RetryPeriod          time.Duration // between two attempts to acquire or renew a Lease
	LeaseLabels          Pairs         // while this replica is the leader
	HTTPEndpoint         string        // host:port, as all addresses; empty: none
	MetricsAddress       string        // deprecated name of HTTPEndpoint
	MetricsBindAddress   string        // alias of HTTPEndpoint; "0": none
	MetricsPath          string
	SecureMetrics        bool          // HTTPS with authentication at HTTPEndpoint
	HealthBindAddress    string        // only probes; "0": none
	ProfilingBindAddress string        // only profiles; "0": none
	DriverHealthEndpoint string        // replaces livenessprobe
	ProbeTimeout         time.Duration // of the driver, including the connection; positive
	EnablePprof          bool          // at HTTPEndpoint
	AutoMaxProcs         bool          // no effect
	OTLPEndpoint         string        // URL of an OpenTelemetry collector; empty: no traces
	OTLPSamplingRatio    float64       // of the operations, 0 to 1
	FeatureGates         Gates
	Controllers          Names         // names of roles, after a "-" of those that do not run; without others, the driver decides
	AuditInterval        time.Duration // between two audits; 0: none
	Logging              Logging
}

// Logging holds the settings of the logs.
type Logging struct {
	Verbosity       int
	VModule         string        // verbosity per source file, pattern=N,...
	Format          string        // text or json
	FlushFrequency  time.Duration // between two flushes of buffered logs; 0: 30 seconds
	TextSplitStream bool          // errors to stderr, everything else to stdout
	JSONSplitStream bool          // the same with the format json
	TextBufferSize  string        // a quantity, with TextSplitStream; "0": no buffer
	JSONBufferSize  string        // a quantity, with JSONSplitStream; "0": no buffer
}

// UserKubeconfigUsage describes --kubeconfig for commands that a person runs.
const UserKubeconfigUsage = "kubeconfig file; empty means the ServiceAccount of the pod, or outside of a pod ~/.kube/config. " +
	"The environment variable KUBECONFIG, which may list several files, takes precedence"

// DefaultCommon returns the defaults.
func DefaultCommon() Common {
	lease := election.DefaultConfig()
	return Common{
		CSIAddress: csiclient.DefaultConfig().Address, MaxGRPCLogLength: -1, KubeAPIBurst: 10, SecretNamespaces: []string{},
		LeaseDuration: lease.LeaseDuration, RenewDeadline: lease.RenewDeadline, RetryPeriod: lease.RetryPeriod,
		MetricsPath: "/metrics", ProbeTimeout: 3 * time.Second, OTLPSamplingRatio: 1,
		FeatureGates: Gates{}, Controllers: Names{},
		Logging: Logging{Format: "text", FlushFrequency: 5 * time.Second, TextBufferSize: "0", JSONBufferSize: "0"},
	}
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in c. A command may have only some of them.
func (c *Common) AddFlags(fs *pflag.FlagSet) {
	fs.String("config", "", "configuration file in YAML; its keys are the names of the flags")
	fs.StringVar(&c.CSIAddress, "csi-address", c.CSIAddress, "socket of the CSI driver: an absolute path or unix://PATH")
	fs.Lookup("csi-address").Annotations = map[string][]string{"omitted": {}} // its presence requests a connection to the driver
	fs.BoolVar(&c.ExitOnConnectionLoss, "exit-on-connection-loss", c.ExitOnConnectionLoss,
		"exit when the connection to the CSI driver is lost, instead of waiting until the driver is back")
	fs.IntVar(&c.MaxGRPCLogLength, "max-grpc-log-length", c.MaxGRPCLogLength,
		"truncate logged responses of the CSI driver to this number of bytes; 0 or less means no limit")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig, "kubeconfig file; empty means the ServiceAccount of the pod. "+
		"The environment variable KUBECONFIG, which may list several files, takes precedence")
	fs.StringVar(&c.Master, "master", c.Master, "URL of the API server")
	fs.Float64Var(&c.KubeAPIQPS, "kube-api-qps", c.KubeAPIQPS,
		"maximum requests per second of each role to the API server; 0 and negative values mean no limit")
	fs.IntVar(&c.KubeAPIBurst, "kube-api-burst", c.KubeAPIBurst,
		"number of requests to the API server that may exceed --kube-api-qps at once; 0 means 10")
	fs.StringSliceVar(&c.SecretNamespaces, "secret-namespaces", c.SecretNamespaces,
		"namespaces, separated by commas, of the Secrets that volumes and snapshots may reference; empty means all")
	c.addLeaseFlags(fs)
	c.addEndpointFlags(fs)
	fs.BoolVar(&c.AutoMaxProcs, "automaxprocs", c.AutoMaxProcs,
		"accepted for compatibility: the number of threads always follows the CPU limit of the container")
	fs.Var(&c.FeatureGates, "feature-gates", gatesUsage())
	fs.Bool("version", false, "print the version and exit")
	c.Logging.AddFlags(fs)
	fs.DurationVar(&c.AuditInterval, "audit-interval", c.AuditInterval,
		"time between two comparisons of ListVolumes with the PersistentVolumes, for metrics and the log; 0 means never")
	c.addTopolvmFlags(fs)
	fs.Var(&c.Controllers, "controllers", "roles to run, such as provisioner,attacher, or not to run, such as -capacity. "+
		"Without roles to run, the driver decides")
}

// addLeaseFlags adds the flags of leader election.
func (c *Common) addLeaseFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.LeaderElection, "leader-election", c.LeaderElection,
		"work only while holding the Lease of a role, so that several replicas can run")
	fs.StringVar(&c.LeaseNamespace, "leader-election-namespace", c.LeaseNamespace,
		"namespace of the Leases; empty means POD_NAMESPACE, else the namespace of the ServiceAccount, else default")
	fs.DurationVar(&c.LeaseDuration, "leader-election-lease-duration", c.LeaseDuration,
		"how long a standby waits before it acquires a Lease that is not renewed")
	fs.DurationVar(&c.RenewDeadline, "leader-election-renew-deadline", c.RenewDeadline,
		"how long the leader keeps working while it cannot renew its Lease")
	fs.DurationVar(&c.RetryPeriod, "leader-election-retry-period", c.RetryPeriod,
		"time between two attempts to acquire or renew a Lease")
	fs.Var(&c.LeaseLabels, "leader-election-labels", "labels of the Lease while this replica is the leader")
}

// addEndpointFlags adds the flags of metrics, health and traces.
func (c *Common) addEndpointFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.HTTPEndpoint, "http-endpoint", c.HTTPEndpoint,
		"address of the server for metrics, health and debug endpoints, such as :8080; empty means none")
	fs.StringVar(&c.MetricsAddress, "metrics-address", c.MetricsAddress,
		"deprecated name of --http-endpoint; only one of them may be set")
	fs.StringVar(&c.MetricsPath, "metrics-path", c.MetricsPath, "path of the metrics")
	fs.StringVar(&c.DriverHealthEndpoint, "driver-health-endpoint", c.DriverHealthEndpoint,
		"address that serves the health of the CSI driver at /healthz, such as :9808, for the livenessProbe of the "+
			"driver's container; replaces livenessprobe; empty means none")
	fs.DurationVar(&c.ProbeTimeout, "probe-timeout", c.ProbeTimeout,
		"timeout of Probe for --driver-health-endpoint, including the connection")
	fs.BoolVar(&c.EnablePprof, "enable-pprof", c.EnablePprof, "serve profiles under /debug/pprof/ at the HTTP endpoint")
	fs.StringVar(&c.OTLPEndpoint, "otlp-endpoint", c.OTLPEndpoint,
		"URL of an OpenTelemetry collector for traces (OTLP over gRPC), such as http://collector:4317, or https:// for TLS; "+
			"empty means no tracing")
	fs.Float64Var(&c.OTLPSamplingRatio, "otlp-sampling-ratio", c.OTLPSamplingRatio,
		"fraction of the operations that is traced, from 0 to 1")
}

// addTopolvmFlags adds flags of topolvm-controller that concern the whole process.
func (c *Common) addTopolvmFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.CSISocket, "csi-socket", c.CSISocket,
		"alias of --csi-address: the socket of the driver, which this program calls; only one of them may be set")
	fs.StringVar(&c.MetricsBindAddress, "metrics-bind-address", c.MetricsBindAddress, `alias of --http-endpoint; "0" or empty means none`)
	fs.BoolVar(&c.SecureMetrics, "secure-metrics-server", c.SecureMetrics,
		"serve metrics, debug endpoints and profiles of --http-endpoint over HTTPS with a self-signed certificate, "+
			"to clients with a bearer token and the permission (checked by TokenReview and SubjectAccessReview)")
	fs.StringVar(&c.HealthBindAddress, "health-probe-bind-address", c.HealthBindAddress,
		`address that serves only /healthz, /livez and /readyz, in plain HTTP; "0" or empty means none`)
	fs.StringVar(&c.ProfilingBindAddress, "profiling-bind-address", c.ProfilingBindAddress,
		"address that serves only profiles; empty means none")
	fs.Bool("print-config", false, "print value and origin (default, derived, flag, environment or file) of every setting of the "+
		"nodecontroller, and exit")
}

// AddFlags adds the flags of the settings to fs. Their defaults are the values in l.
func (l *Logging) AddFlags(fs *pflag.FlagSet) {
	fs.IntVarP(&l.Verbosity, "v", "v", l.Verbosity,
		"verbosity of the logs: 1 one line per reconcile, 2 reasons, 5 CSI calls, 6 and 7 requests to the API server. "+
			"Higher values mean 7, because request bodies contain secrets")
	fs.StringVar(&l.VModule, "vmodule", l.VModule, "verbosity per source file, as pattern=N,...")
	fs.StringVar(&l.Format, "logging-format", l.Format, "text or json")
	fs.DurationVar(&l.FlushFrequency, "log-flush-frequency", l.FlushFrequency, "time between two flushes of buffered logs")
	fs.BoolVar(&l.TextSplitStream, "log-text-split-stream", l.TextSplitStream,
		"with text: write errors to stderr and everything else to stdout")
	fs.BoolVar(&l.JSONSplitStream, "log-json-split-stream", l.JSONSplitStream,
		"with json: write errors to stderr and everything else to stdout")
	fs.StringVar(&l.TextBufferSize, "log-text-info-buffer-size", l.TextBufferSize,
		"with --log-text-split-stream: buffer stdout up to this size")
	fs.StringVar(&l.JSONBufferSize, "log-json-info-buffer-size", l.JSONBufferSize,
		"with --log-json-split-stream: buffer stdout up to this size")
}

// Validate returns every error in c. addressSet reports that --csi-address was set.
func (c Common) Validate(addressSet bool) error {
	var errs []error
	if set := slices.Sorted(maps.Keys(c.Endpoints())); len(set) > 1 {
		errs = append(errs, fmt.Errorf("%s: only one of them may be set", strings.Join(set, " and ")))
	}
	if addressSet && c.CSISocket != "" && c.CSISocket != c.CSIAddress {
		errs = append(errs, errors.New("--csi-address and --csi-socket: only one of them may be set"))
	}
	if c.SecureMetrics && len(c.Endpoints()) == 0 {
		errs = append(errs, errors.New("--secure-metrics-server: requires an address. Set --metrics-bind-address or --http-endpoint"))
	}
	if c.ProbeTimeout <= 0 {
		errs = append(errs, fmt.Errorf("--probe-timeout: must be positive, got %v", c.ProbeTimeout))
	}
	if math.IsNaN(c.KubeAPIQPS) {
		errs = append(errs, errors.New("--kube-api-qps: must be a number, got NaN"))
	}
	if c.KubeAPIQPS > 0 && c.KubeAPIBurst < 0 {
		errs = append(errs, fmt.Errorf("--kube-api-burst: must not be negative, got %d", c.KubeAPIBurst))
	}
	for _, namespace := range c.SecretNamespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--secret-namespaces: %q is not a namespace name: %s", namespace, strings.Join(problems, ", ")))
		}
	}
	return errors.Join(append(errs, c.FeatureGates.validate(), c.validateAddresses(), c.validateLeases())...)
}

// validateAddresses returns an error for each address on which no process can listen.
func (c Common) validateAddresses() error {
	addresses := c.Endpoints()
	addresses["--health-probe-bind-address"] = Address(c.HealthBindAddress)
	addresses["--profiling-bind-address"] = Address(c.ProfilingBindAddress)
	addresses["--driver-health-endpoint"] = c.DriverHealthEndpoint
	var errs []error
	for _, flag := range slices.Sorted(maps.Keys(addresses)) {
		_, port, err := net.SplitHostPort(addresses[flag])
		if err == nil {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil && addresses[flag] != "" {
			errs = append(errs, fmt.Errorf("%s: must be host:port, such as :8080, got %q", flag, addresses[flag]))
		}
	}
	return errors.Join(errs...)
}

// validateLeases returns an error for each setting that would be invalid in a Lease.
func (c Common) validateLeases() error {
	var errs []error
	fail := func(flag, value string, problems []string) {
		if len(problems) > 0 {
			errs = append(errs, fmt.Errorf("%s: %s, got %q", flag, strings.Join(problems, "; "), value))
		}
	}
	if c.LeaseNamespace != "" {
		fail("--leader-election-namespace", c.LeaseNamespace, validation.IsDNS1123Label(c.LeaseNamespace))
	}
	for _, key := range slices.Sorted(maps.Keys(c.LeaseLabels)) {
		fail("--leader-election-labels", key, validation.IsQualifiedName(key))
		fail("--leader-election-labels", c.LeaseLabels[key], validation.IsValidLabelValue(c.LeaseLabels[key]))
	}
	return errors.Join(errs...)
}

// Endpoints returns the addresses of the HTTP endpoint by the names of their flags; valid settings have
// at most one.
func (c Common) Endpoints() map[string]string {
	set := map[string]string{}
	for name, a := range map[string]string{
		"--http-endpoint": c.HTTPEndpoint, "--metrics-address": c.MetricsAddress, "--metrics-bind-address": Address(c.MetricsBindAddress),
	} {
		if a != "" {
			set[name] = a
		}
	}
	return set
}

// Address returns text, or "" for "0", which means no address.
func Address(text string) string {
	if text == "0" {
		return ""
	}
	return text
}
