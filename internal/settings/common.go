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

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
)

// Common holds the settings of the process as a whole.
type Common struct {
	CSIAddress           string   `mapstructure:"csi-address"`
	CSISocket            string   `mapstructure:"csi-socket"` // alias of CSIAddress
	ExitOnConnectionLoss bool     `mapstructure:"exit-on-connection-loss"`
	MaxGRPCLogLength     int      `mapstructure:"max-grpc-log-length"` // in bytes; 0 or less: no limit
	Kubeconfig           string   `mapstructure:"kubeconfig"`          // empty: the ServiceAccount of the pod
	Master               string   `mapstructure:"master"`              // URL of the API server; empty: from Kubeconfig
	KubeAPIQPS           float64  `mapstructure:"kube-api-qps"`        // requests per second of each role; 0 or less: no limit
	KubeAPIBurst         int      `mapstructure:"kube-api-burst"`      // requests that may exceed KubeAPIQPS at once; 0: 10
	SecretNamespaces     []string `mapstructure:"secret-namespaces"`   // of the Secrets that roles may read; empty: all
	LeaderElection       bool     `mapstructure:"leader-election"`
	LeaseNamespace       string   `mapstructure:"leader-election-namespace"` // empty: see [election.Namespace]
	// LeaseDuration is the time after which a standby acquires a Lease that is not renewed.
	LeaseDuration time.Duration `mapstructure:"leader-election-lease-duration"`
	// RenewDeadline is the time for which a leader works while it cannot renew its Lease.
	RenewDeadline        time.Duration `mapstructure:"leader-election-renew-deadline"`
	RetryPeriod          time.Duration `mapstructure:"leader-election-retry-period"` // between two attempts to acquire or renew a Lease
	LeaseLabels          Pairs         `mapstructure:"leader-election-labels"`       // while this replica is the leader
	HTTPEndpoint         string        `mapstructure:"http-endpoint"`                // host:port, as all addresses; empty: none
	MetricsAddress       string        `mapstructure:"metrics-address"`              // deprecated name of HTTPEndpoint
	MetricsBindAddress   string        `mapstructure:"metrics-bind-address"`         // alias of HTTPEndpoint; "0": none
	MetricsPath          string        `mapstructure:"metrics-path"`
	SecureMetrics        bool          `mapstructure:"secure-metrics-server"`     // HTTPS with authentication at HTTPEndpoint
	HealthBindAddress    string        `mapstructure:"health-probe-bind-address"` // only probes; "0": none
	ProfilingBindAddress string        `mapstructure:"profiling-bind-address"`    // only profiles; "0": none
	DriverHealthEndpoint string        `mapstructure:"driver-health-endpoint"`    // replaces livenessprobe
	ProbeTimeout         time.Duration `mapstructure:"probe-timeout"`             // of the driver, including the connection; positive
	EnablePprof          bool          `mapstructure:"enable-pprof"`              // at HTTPEndpoint
	AutoMaxProcs         bool          `mapstructure:"automaxprocs"`              // no effect
	OTLPEndpoint         string        `mapstructure:"otlp-endpoint"`             // URL of an OpenTelemetry collector; empty: no traces
	OTLPSamplingRatio    float64       `mapstructure:"otlp-sampling-ratio"`       // of the operations, 0 to 1
	FeatureGates         Gates         `mapstructure:"feature-gates"`
	Controllers          []string      `mapstructure:"controllers"`    // names of roles, after a "-" of those that do not run; without others, the driver decides
	AuditInterval        time.Duration `mapstructure:"audit-interval"` // between two audits; 0: none
	Logging              Logging       `mapstructure:",squash"`
}

// Logging holds the settings of the logs.
type Logging struct {
	Verbosity       int           `mapstructure:"v"`
	VModule         string        `mapstructure:"vmodule"`                   // verbosity per source file, pattern=N,...
	Format          string        `mapstructure:"logging-format"`            // text or json
	FlushFrequency  time.Duration `mapstructure:"log-flush-frequency"`       // between two flushes of buffered logs; 0: 30 seconds
	TextSplitStream bool          `mapstructure:"log-text-split-stream"`     // errors to stderr, everything else to stdout
	JSONSplitStream bool          `mapstructure:"log-json-split-stream"`     // the same with the format json
	TextBufferSize  string        `mapstructure:"log-text-info-buffer-size"` // a quantity, with TextSplitStream; "0": no buffer
	JSONBufferSize  string        `mapstructure:"log-json-info-buffer-size"` // a quantity, with JSONSplitStream; "0": no buffer
}

// flagOnly names the options that neither the configuration file nor, except for config, the
// environment can set.
var flagOnly = []string{"config", "version", "print-config"}

// UserKubeconfigUsage describes --kubeconfig for commands that a person runs.
const UserKubeconfigUsage = "kubeconfig file; empty means the ServiceAccount of the pod, or outside of a pod ~/.kube/config. " +
	"The environment variable KUBECONFIG, which may list several files, takes precedence"

// CommonOptions returns the options that every command with a role has. all reports whether the command
// is "all".
func CommonOptions(all bool) []Option {
	driver := csiclient.DefaultConfig()
	return slices.Concat([]Option{
		{Name: "config", Default: "", Usage: "configuration file in YAML; its keys are the names of the flags"},
		{Name: "csi-address", Default: driver.Address, Usage: "socket of the CSI driver: an absolute path or unix://PATH"},
		{Name: "exit-on-connection-loss", Default: false,
			Usage: "exit when the connection to the CSI driver is lost, instead of waiting until the driver is back"},
		{Name: "max-grpc-log-length", Default: -1,
			Usage: "truncate logged responses of the CSI driver to this number of bytes; 0 or less means no limit"},
		{Name: "kubeconfig", Default: "", Usage: "kubeconfig file; empty means the ServiceAccount of the pod. " +
			"The environment variable KUBECONFIG, which may list several files, takes precedence"},
		{Name: "master", Default: "", Usage: "URL of the API server"},
		{Name: "kube-api-qps", Default: 0.0,
			Usage: "maximum requests per second of each role to the API server; 0 and negative values mean no limit"},
		{Name: "kube-api-burst", Default: 10,
			Usage: "number of requests to the API server that may exceed --kube-api-qps at once; 0 means 10"},
		{Name: "secret-namespaces", Default: []string{},
			Usage: "namespaces, separated by commas, of the Secrets that volumes and snapshots may reference; empty means all"},
	}, leaseOptions(all), endpointOptions(), []Option{
		{Name: "automaxprocs", Default: false,
			Usage: "accepted for compatibility: the number of threads always follows the CPU limit of the container"},
		{Name: "feature-gates", Default: Gates{}, Usage: gatesUsage()},
		{Name: "version", Default: false, Usage: "print the version and exit"},
	}, loggingOptions())
}

// leaseOptions returns the options of leader election.
func leaseOptions(all bool) []Option {
	lease := election.DefaultConfig()
	usage := "work only while holding the Lease of a role, so that several replicas can run"
	if all {
		usage += "; required by --node-cleanup=claims and =volumes"
	}
	return []Option{
		{Name: "leader-election", Default: false, Usage: usage},
		{Name: "leader-election-namespace", Default: "",
			Usage: "namespace of the Leases; empty means POD_NAMESPACE, else the namespace of the ServiceAccount, else default"},
		{Name: "leader-election-lease-duration", Default: lease.LeaseDuration,
			Usage: "how long a standby waits before it acquires a Lease that is not renewed"},
		{Name: "leader-election-renew-deadline", Default: lease.RenewDeadline,
			Usage: "how long the leader keeps working while it cannot renew its Lease"},
		{Name: "leader-election-retry-period", Default: lease.RetryPeriod, Usage: "time between two attempts to acquire or renew a Lease"},
		{Name: "leader-election-labels", Default: Pairs{}, Usage: "labels of the Lease while this replica is the leader"},
	}
}

// endpointOptions returns the options of metrics, health and traces.
func endpointOptions() []Option {
	return []Option{
		{Name: "http-endpoint", Default: "",
			Usage: "address of the server for metrics, health and debug endpoints, such as :8080; empty means none"},
		{Name: "metrics-address", Default: "", Usage: "deprecated name of --http-endpoint; only one of them may be set"},
		{Name: "metrics-path", Default: "/metrics", Usage: "path of the metrics"},
		{Name: "driver-health-endpoint", Default: "",
			Usage: "address that serves the health of the CSI driver at /healthz, such as :9808, for the livenessProbe of the " +
				"driver's container; replaces livenessprobe; empty means none"},
		{Name: "probe-timeout", Default: 3 * time.Second, Usage: "timeout of Probe for --driver-health-endpoint, including the connection"},
		{Name: "enable-pprof", Default: false, Usage: "serve profiles under /debug/pprof/ at the HTTP endpoint"},
		{Name: "otlp-endpoint", Default: "", Usage: "URL of an OpenTelemetry collector for traces (OTLP over gRPC), " +
			"such as http://collector:4317, or https:// for TLS; empty means no tracing"},
		{Name: "otlp-sampling-ratio", Default: 1.0, Usage: "fraction of the operations that is traced, from 0 to 1"},
	}
}

// loggingOptions returns the options of the logs.
func loggingOptions() []Option {
	return []Option{
		{Name: "v", Default: 0,
			Usage: "verbosity of the logs: 1 one line per reconcile, 2 reasons, 5 CSI calls, 6 and 7 requests to the API server. " +
				"Higher values mean 7, because request bodies contain secrets"},
		{Name: "vmodule", Default: "", Usage: "verbosity per source file, as pattern=N,..."},
		{Name: "logging-format", Default: "text", Usage: "text or json"},
		{Name: "log-flush-frequency", Default: 5 * time.Second, Usage: "time between two flushes of buffered logs"},
		{Name: "log-text-split-stream", Default: false, Usage: "with text: write errors to stderr and everything else to stdout"},
		{Name: "log-json-split-stream", Default: false, Usage: "with json: write errors to stderr and everything else to stdout"},
		{Name: "log-text-info-buffer-size", Default: "0", Usage: "with --log-text-split-stream: buffer stdout up to this size"},
		{Name: "log-json-info-buffer-size", Default: "0", Usage: "with --log-json-split-stream: buffer stdout up to this size"},
	}
}

// Validate returns every error in the common settings.
func (s Settings) Validate() error {
	c := s.Common
	var errs []error
	if set := slices.Sorted(maps.Keys(c.Endpoints())); len(set) > 1 {
		errs = append(errs, fmt.Errorf("%s: only one of them may be set", strings.Join(set, " and ")))
	}
	if s.Origin("csi-address") != "" && c.CSISocket != "" && c.CSISocket != c.CSIAddress {
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
