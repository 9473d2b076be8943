// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestMain runs the program instead of the tests under the name of a sidecar.
func TestMain(m *testing.M) {
	if _, sidecar := aliases[filepath.Base(os.Args[0])]; sidecar {
		main()
	}
	debug.SetGCPercent(100) // each command line builds all options: with the 400 of make, they would take gigabytes
	kubetest.Main(m)
}

// output runs the program in this process and returns its exit code and what it wrote.
func output(t *testing.T, argv ...string) (code int, stdout, stderr string) {
	t.Helper()
	capture := func(file **os.File) func() string {
		before := *file
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		*file = w
		done := make(chan string)
		go func() {
			var b bytes.Buffer
			_, _ = io.Copy(&b, r)
			done <- b.String()
		}()
		return func() string {
			w.Close()
			*file = before
			return <-done
		}
	}
	out, err := capture(&os.Stdout), capture(&os.Stderr)
	code = run(argv)
	return code, out(), err()
}

func TestExitCodes(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	tests := map[string]struct {
		argv   []string
		code   int
		stdout string // what must be in it
		stderr string
	}{
		"no subcommand":      {[]string{"storage-controller"}, 2, "", "a subcommand is required"},
		"unknown subcommand": {[]string{"storage-controller", "fly"}, 2, "", `unknown command "fly"`},
		"help":               {[]string{"storage-controller", "--help"}, 0, "provision", ""},
		"help of a role":     {[]string{"storage-controller", "attach", "--help"}, 0, "--worker-threads", ""},
		"version":            {[]string{"/bin/storage-controller", "version"}, 0, "storage-controller dev", ""},
		"version as a flag, before anything": {[]string{"csi-provisioner", "--version", "--csi-address=tcp://x"}, 0,
			"csi-provisioner dev", ""},
		"unknown flag": {[]string{"storage-controller", "provision", "--nope"}, 2, "", "unknown flag: --nope"},
		"bad value":    {[]string{"storage-controller", "attach", "--timeout=soon"}, 2, "", "--timeout"},
		"negative workers": {[]string{"storage-controller", "attach", "--worker-threads=-1"}, 2, "",
			"--worker-threads"},
		"no workers": {[]string{"csi-attacher", "-worker-threads", "0"}, 2, "",
			"--worker-threads: must be positive"},
		"argument": {[]string{"storage-controller", "all", "x"}, 2, "", `unexpected argument "x"`},
		"malformed label": {[]string{"storage-controller", "all", "--leader-election-labels=a"}, 2, "",
			"malformed item"},
		"malformed gate": {[]string{"storage-controller", "all", "--feature-gates=Topology=maybe"}, 2, "",
			"malformed item"},
		"unknown gate": {[]string{"storage-controller", "provision", "--feature-gates=Nope=true"}, 2, "",
			`unknown gate "Nope"`},
		"both addresses": {[]string{"storage-controller", "provision", "--http-endpoint=:1", "--metrics-address=:2"},
			2, "", "--http-endpoint and --metrics-address"},
		"address of another network": {[]string{"csi-attacher", "-csi-address=tcp://x"}, 2, "", "--csi-address"},
		"lease shorter than its renewal": {[]string{"csi-provisioner", "--leader-election", "--leader-election-renew-deadline=20s"}, 2,
			"", "--leader-election-lease-duration"},
		"names of volumes that are too long": {[]string{"storage-controller", "provision", "--volume-name-uuid-length=40"}, 2, "",
			"--volume-name-uuid-length"},
		"protection that does not exist": {[]string{"storage-controller", "all", "--provisioning-protection=some"}, 2, "",
			"--provisioning-protection"},
		"unknown role": {[]string{"storage-controller", "all", "--controllers=provisioner,flyer"}, 2, "",
			`unknown role "flyer"; the roles are provisioner, attacher, capacity, nodecontroller, resizer, snapshotter`},
		"negative timeout": {[]string{"storage-controller", "provision", "--timeout=-2s"}, 2, "",
			"storage-controller: --timeout: must be positive, got -2s"},
		"rate that is no number": {[]string{"storage-controller", "attach", "--kube-api-qps=NaN"}, 2, "", "--kube-api-qps"},
		"log format":             {[]string{"storage-controller", "all", "--logging-format=xml"}, 2, "", "--logging-format"},
		"negative time between flushes": {[]string{"storage-controller", "attach", "--log-flush-frequency=-1s",
			"--log-text-split-stream", "--log-text-info-buffer-size=64Ki"}, 2, "", "--log-flush-frequency"},
		"help with one dash": {[]string{"csi-attacher", "-help"}, 0, "--worker-threads", ""},
		"vmodule":            {[]string{"storage-controller", "all", "--vmodule=x"}, 2, "", "--vmodule"},
		"negative verbosity": {[]string{"storage-controller", "all", "-v=-3"}, 2, "", "--v: must not be negative, got -3"},
		"a role that is off": {[]string{"storage-controller", "config", "validate", "--enable-capacity=false", "--capacity-threads=0"}, 0,
			"The configuration is valid.", ""},
		"port of the endpoint": {[]string{"storage-controller", "all", "--http-endpoint=:99999999"}, 2, "",
			"--http-endpoint: must be host:port"},
		"kubeconfig that is not there": {[]string{"storage-controller", "all", "--kubeconfig=/does/not/exist"}, 1, "",
			"/does/not/exist"},
		"no cluster": {[]string{"storage-controller", "all"}, 1, "", "--kubeconfig"},
		"old klog flags and spellings are fine": {[]string{"storage-controller", "provision", "-logtostderr", "--log_dir=/x",
			"--stderrthreshold", "2", "-v5", "--worker-threads=0"}, 2, "", "--worker-threads"},
		"everything wrong at once": {[]string{"storage-controller", "all", "--provisioner-timeout=0", "--resync=-1s"}, 2, "",
			"--resync"},
		"config validate":             {[]string{"storage-controller", "config", "validate"}, 0, "valid", ""},
		"config validate of nonsense": {[]string{"storage-controller", "config", "validate", "--timeout=0s"}, 2, "", "--timeout"},
		"config print of nonsense":    {[]string{"storage-controller", "config", "print", "--timeout=0s"}, 2, "attacher:", "--timeout"},
		"config without a subcommand": {[]string{"storage-controller", "config"}, 2, "", "print or validate"},
		"credentials where they would be shown": {[]string{"storage-controller", "config", "validate",
			"--otlp-endpoint=http://me:hidden@c:4317"}, 2, "", "OTEL_EXPORTER_OTLP_HEADERS"},
		"credentials in the query": {[]string{"storage-controller", "config", "validate",
			"--otlp-endpoint=http://c:4317?token=hidden"}, 2, "", "must not contain a path, query or fragment"},
		"credentials in the path": {[]string{"storage-controller", "config", "validate",
			"--otlp-endpoint=http://c:4317/hidden"}, 2, "", "must not contain a path, query or fragment"},
		"credentials, and no URL": {[]string{"storage-controller", "config", "validate", "--otlp-endpoint=me:hidden@c"}, 2,
			"", "--otlp-endpoint: must be a URL"},
		"a collector with a slash": {[]string{"storage-controller", "config", "validate", "--otlp-endpoint=http://c:4317/"}, 0,
			"valid", ""},
		"more traces than all": {[]string{"storage-controller", "all", "--otlp-sampling-ratio=2"}, 2, "",
			"--otlp-sampling-ratio: must be between 0 and 1"},
		"a ratio that is none": {[]string{"storage-controller", "all", "--otlp-sampling-ratio=x"}, 2, "",
			"--otlp-sampling-ratio"},
		"completion": {[]string{"storage-controller", "completion", "bash"}, 0, "bash completion", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := output(t, tt.argv...)
			if code != tt.code || !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", code, tt.code, stdout, stderr)
			}
			if strings.Contains(stdout+stderr, "hidden") {
				t.Errorf("a password is shown: %s%s", stdout, stderr)
			}
			if tt.code == exitFailure && strings.Contains(stderr, "goroutine") {
				t.Errorf("a stack dump: %s", stderr)
			}
		})
	}
}

// TestFlagsOfTheSidecar: an old manifest of csi-attacher means the same here, but for the limits: without flags,
// nothing limits the requests, and a hundred workers attach.
func TestFlagsOfTheSidecar(t *testing.T) {
	flags := newRoleCommand("attach", "csi-attacher", "", app.Attach).Flags()
	_, help, _ := output(t, "csi-attacher", "--help")
	for name, def := range map[string]string{
		"worker-threads": "100", "max-entries": "0", "timeout": "15s", "retry-interval-start": "1s", "retry-interval-max": "5m0s",
		"reconcile-sync": "1m0s", "resync": "10m0s", "default-fstype": "", "max-grpc-log-length": "-1", "feature-gates": "",
		"csi-address": "/run/csi/socket", "kubeconfig": "", "kube-api-qps": "0", "kube-api-burst": "10", "leader-election": "false",
		"leader-election-namespace": "", "leader-election-lease-duration": "15s", "leader-election-renew-deadline": "10s",
		"leader-election-retry-period": "5s", "leader-election-labels": "", "http-endpoint": "", "metrics-address": "",
		"metrics-path": "/metrics", "automaxprocs": "false", "version": "false",
		"v": "0", "vmodule": "", "logging-format": "text", "log-flush-frequency": "5s", "log-text-split-stream": "false",
		"log-text-info-buffer-size": "0", "log-json-split-stream": "false", "log-json-info-buffer-size": "0",
	} {
		switch f := flags.Lookup(name); {
		case f == nil || !regexp.MustCompile(" --"+name+`(\[=true\|false\])? `).MatchString(help):
			t.Errorf("--%s is not there, or not in the help", name)
		case f.DefValue != def:
			t.Errorf("--%s is %q by default, want %q", name, f.DefValue, def)
		}
	}
	// The documentation of csi-attacher promises those of klog, too.
	promised := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(promised)
	promised.VisitAll(func(f *flag.Flag) {
		code, _, stderr := output(t, "csi-attacher", "-"+f.Name+"="+f.Value.String(), "-worker-threads=0")
		if code != exitUsage || !strings.Contains(stderr, "--worker-threads") {
			t.Errorf("-%s: exit code %d, %s", f.Name, code, stderr)
		}
	})
}

// TestValuesOfTheSidecars: values that csi-provisioner v6.3 and csi-attacher v4.12 start with are accepted under their
// names. The process ends when it cannot read its kubeconfig, which is after the validation.
func TestValuesOfTheSidecars(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	const nowhere = "/does/not/exist"
	for _, args := range [][]string{
		{""}, {"--leader-election", "true"}, {"word"}, {"--", "x"}, {"--kube-api-qps=-1"}, {"--kube-api-qps=0"}, {"--kube-api-burst=0"},
		{"--feature-gates=WatchList=true,ComponentStatusz=false,NativeHistograms=true"}, {"--feature-gates=CBORServingAndStorage=true"},
		{"--leader-election-lease-duration=1s"}, {"--leader-election-retry-period=1h"},
	} {
		for _, name := range []string{"csi-provisioner", "csi-attacher"} {
			code, _, stderr := output(t, append([]string{name, "--kubeconfig=" + nowhere}, args...)...)
			if code != exitFailure || !strings.Contains(stderr, nowhere) {
				t.Errorf("%s %q: exit code %d: %s", name, args, code, stderr)
			}
		}
	}
	code, _, stderr := output(t, "storage-controller", "provision", "")
	if code != exitUsage || !strings.Contains(stderr, "unexpected argument") {
		t.Errorf("an argument under our own name: exit code %d: %s", code, stderr)
	}
}

// TestTerminationMessage: the kubelet shows why a process has ended. A command that a person runs in its container writes nothing.
func TestTerminationMessage(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	before := terminationLog
	t.Cleanup(func() { terminationLog = before })
	terminationLog = filepath.Join(t.TempDir(), "log")
	for line, want := range map[string]string{
		"csi-attacher --nope":                             "unknown flag: --nope\n",
		"storage-controller all -- csi-attacher --nope":   "section csi-attacher: unknown flag: --nope",
		"storage-controller attach --timeout=-1s":         "--timeout: must be positive",
		"storage-controller attach --kubeconfig=/nowhere": "reading kubeconfig",
		"livenessprobe --health-port=x":                   "--health-port: must be a port",
		"storage-controller doctor --nope":                "",
		"storage-controller attach --version":             "",
	} {
		if err := os.WriteFile(terminationLog, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		output(t, strings.Fields(line)...)
		if text, err := os.ReadFile(terminationLog); err != nil || !strings.Contains(string(text), want) || want == "" && len(text) > 0 {
			t.Errorf("%s: %q, %v; want %q", line, text, err, want)
		}
	}
}
