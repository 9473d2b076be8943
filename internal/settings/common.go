// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/serving"
)

// Common holds the settings of the process as a whole.
type Common struct {
	CSIAddress           string
	CSISocket            string // alias of CSIAddress
	ExitOnConnectionLoss bool
	AdaptiveConcurrency  bool
	MaxGRPCLogLength     int           // in bytes; 0 or less: no limit
	Kubeconfig           string        // empty: the ServiceAccount of the pod
	Master               string        // URL of the API server; empty: from Kubeconfig
	SecretNamespaces     []string      // of the Secrets that roles may read; empty: all
	SecureMetrics        bool          // HTTPS with authentication at each [Endpoint]
	TLS                  serving.TLS   // of every HTTPS server
	TLSCertFile          string        // of the HTTPS server of each [Endpoint], in PEM; empty: self-signed
	TLSPrivateKeyFile    string        // of TLSCertFile, in PEM
	HealthBindAddress    string        // only probes; "0": none. All addresses are host:port
	ProfilingBindAddress string        // only profiles; "0": none
	DriverHealthEndpoint string        // replaces livenessprobe; empty: none
	ProbeTimeout         time.Duration // of the driver, including the connection; positive
	AutoMaxProcs         bool          // no effect
	OTLPEndpoint         string        // URL of an OpenTelemetry collector; empty: no traces
	OTLPSamplingRatio    float64       // of the operations, 0 to 1
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
	return Common{
		CSIAddress: csiclient.DefaultConfig().Address, MaxGRPCLogLength: -1, SecretNamespaces: []string{},
		AdaptiveConcurrency: true, ProbeTimeout: 3 * time.Second, OTLPSamplingRatio: 1, Controllers: Names{},
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
	fs.BoolVar(&c.AdaptiveConcurrency, "adaptive-concurrency", c.AdaptiveConcurrency,
		"limit the calls of a CSI method that run at a time, below the worker threads, while calls are throttled, time out or slow "+
			"down, and more of them do not complete sooner")
	fs.IntVar(&c.MaxGRPCLogLength, "max-grpc-log-length", c.MaxGRPCLogLength,
		"truncate logged responses of the CSI driver to this number of bytes; 0 or less means no limit")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig, "kubeconfig file; empty means the ServiceAccount of the pod. "+
		"The environment variable KUBECONFIG, which may list several files, takes precedence")
	fs.StringVar(&c.Master, "master", c.Master, "URL of the API server")
	fs.StringSliceVar(&c.SecretNamespaces, "secret-namespaces", c.SecretNamespaces,
		"namespaces, separated by commas, of the Secrets that volumes and snapshots may reference; empty means all")
	c.addEndpointFlags(fs)
	fs.BoolVar(&c.AutoMaxProcs, "automaxprocs", c.AutoMaxProcs,
		"accepted for compatibility: the number of threads always follows the CPU limit of the container")
	fs.Bool("version", false, "print the version and exit")
	c.Logging.AddFlags(fs)
	fs.DurationVar(&c.AuditInterval, "audit-interval", c.AuditInterval,
		"time between two comparisons of ListVolumes with the PersistentVolumes, for metrics and the log; 0 means never")
	c.addTopolvmFlags(fs)
	c.addTLSFlags(fs)
	fs.Var(&c.Controllers, "controllers", "roles to run, such as provisioner,attacher, or not to run, such as -capacity. "+
		"Without roles to run, the driver decides")
}

// addEndpointFlags adds the flags of health and traces.
func (c *Common) addEndpointFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.DriverHealthEndpoint, "driver-health-endpoint", c.DriverHealthEndpoint,
		"address that serves the health of the CSI driver at /healthz, such as :9808, for the livenessProbe of the "+
			"driver's container; replaces livenessprobe; empty means none")
	fs.DurationVar(&c.ProbeTimeout, "probe-timeout", c.ProbeTimeout,
		"timeout of Probe for --driver-health-endpoint, including the connection")
	fs.StringVar(&c.OTLPEndpoint, "otlp-endpoint", c.OTLPEndpoint,
		"URL of an OpenTelemetry collector for traces (OTLP over gRPC), such as http://collector:4317, or https:// for TLS; "+
			"empty means no tracing")
	fs.Float64Var(&c.OTLPSamplingRatio, "otlp-sampling-ratio", c.OTLPSamplingRatio,
		"fraction of the operations that is traced, from 0 to 1")
}

// addTLSFlags adds the flags of HTTPS servers, which have the names of those of Kubernetes components.
func (c *Common) addTLSFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.TLSCertFile, "tls-cert-file", c.TLSCertFile,
		"certificate, with its intermediates, for --secure-metrics-server, in PEM; it is read again when it changes; "+
			"empty means self-signed. Webhooks have --cert-dir")
	fs.StringVar(&c.TLSPrivateKeyFile, "tls-private-key-file", c.TLSPrivateKeyFile, "private key of --tls-cert-file, in PEM")
	fs.StringVar(&c.TLS.MinVersion, "tls-min-version", c.TLS.MinVersion,
		"lowest TLS version of metrics and webhooks: VersionTLS10, VersionTLS11, VersionTLS12 or VersionTLS13; empty means VersionTLS12")
	fs.StringSliceVar(&c.TLS.CipherSuites, "tls-cipher-suites", c.TLS.CipherSuites,
		"cipher suites of metrics and webhooks for TLS 1.2 and lower, by their names of IANA, separated by commas; "+
			"empty means those that Go prefers")
}

// addTopolvmFlags adds flags of topolvm-controller that concern the whole process.
func (c *Common) addTopolvmFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.CSISocket, "csi-socket", c.CSISocket,
		"alias of --csi-address: the socket of the driver, which this program calls; only one of them may be set")
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
	if addressSet && c.CSISocket != "" && c.CSISocket != c.CSIAddress {
		errs = append(errs, errors.New("--csi-address and --csi-socket: only one of them may be set"))
	}
	if c.ProbeTimeout <= 0 {
		errs = append(errs, fmt.Errorf("--probe-timeout: must be positive, got %v", c.ProbeTimeout))
	}
	for _, namespace := range c.SecretNamespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--secret-namespaces: %q is not a namespace name: %s", namespace, strings.Join(problems, ", ")))
		}
	}
	return errors.Join(append(errs, c.validateAddresses(), c.validateTLS())...)
}

// validateTLS returns every error in the settings of HTTPS servers.
func (c Common) validateTLS() error {
	_, err := c.TLS.Config(nil)
	switch {
	case (c.TLSCertFile == "") != (c.TLSPrivateKeyFile == ""):
		return errors.Join(err, errors.New("--tls-cert-file and --tls-private-key-file: set both, or none"))
	case c.TLSCertFile != "" && !c.SecureMetrics:
		return errors.Join(err, errors.New("--tls-cert-file: requires --secure-metrics-server"))
	}
	return err
}

// validateAddresses returns an error for each address on which no process can listen.
func (c Common) validateAddresses() error {
	return errors.Join(
		checkAddress("--driver-health-endpoint", c.DriverHealthEndpoint),
		checkAddress("--health-probe-bind-address", Address(c.HealthBindAddress)),
		checkAddress("--profiling-bind-address", Address(c.ProfilingBindAddress)),
	)
}

// checkAddress returns an error if no process can listen on address; "" is none.
func checkAddress(flag, address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%s: must be host:port, such as :8080, got %q", flag, address)
	}
	return nil
}

// Address returns text, or "" for "0", which means no address.
func Address(text string) string {
	if text == "0" {
		return ""
	}
	return text
}
