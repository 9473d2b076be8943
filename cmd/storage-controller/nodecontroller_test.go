// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/topolvm"
)

func TestOriginsOfSettings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := `apiVersion: config.storage-controller.io/v1alpha1
kind: StorageControllerConfiguration
timeout: 7s
nodecontroller:
  node-cleanup: report
  pvc-obsolete-finalizers: [a.b/c, d.e/f]
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(settings.EnvPrefix+"NODE_CLEANUP_SCOPE", "opt-in")
	compare(t, printed(t, "topolvm", "--config="+file, "--node-cleanup-retain=skip", "--node-missing-grace", "20m", "--pvc-finalizer="),
		map[string][2]string{
			"timeout":                 {"7s", "file"},
			"node-cleanup":            {"report", "file"},
			"pvc-obsolete-finalizers": {"a.b/c, d.e/f", "file"},
			"node-cleanup-scope":      {"opt-in", "environment"},
			"node-cleanup-retain":     {"skip", "flag"},
			"node-missing-grace":      {"20m0s", "flag"},
			"pvc-finalizer":           {"topolvm.io/pvc", "derived"}, // a name that was set to nothing was not set
			"webhook-addr":            {":9443", "default"},
			"driver-name":             {"topolvm.io", "derived"},
		})
}

func TestRefusals(t *testing.T) {
	tests := map[string]struct {
		argv []string
		code int
		want []string
	}{
		"a removed profile": {[]string{"nodecontroller", "--profile=topolvm"}, 2,
			[]string{"flag --profile was removed: run the command topolvm in place of topolvm-controller"}},
		"a removed source of certificates": {[]string{"nodecontroller", "--webhook-cert-mode=self-signed"}, 2,
			[]string{"flag --webhook-cert-mode was removed: mount the certificate at --cert-dir"}},
		"a removed policy": {[]string{"topolvm", "--pvc-pod-deletion=none"}, 2, []string{"flag --pvc-pod-deletion was removed"}},
		"a driver of another process": {[]string{"topolvm", "--driver-name=a.example.com"}, 2,
			[]string{`--driver-name: is "a.example.com", but this command serves the driver "topolvm.io"`}},
		"a connection to the driver": {[]string{"topolvm", "--exit-on-connection-loss"}, 2,
			[]string{"unknown flag: --exit-on-connection-loss: this command serves the driver itself, at --csi-socket"}},
		"a socket that is called": {[]string{"topolvm", "--csi-address=/run/csi.sock"}, 2, []string{"unknown flag: --csi-address: this"}},
		"a mode of TopoLVM": {[]string{"nodecontroller", "--driver-name=a.example.com", "--pvc-finalizer-mode=enforce"}, 2,
			[]string{`--pvc-finalizer-mode=enforce: is for TopoLVM only, but the driver is "a.example.com"`}},
		"deleting without leader election": {[]string{"nodecontroller", "--driver-name=a.b", "--leader-election=false",
			"--node-cleanup=claims"}, 2, []string{"--leader-election: must be set with --node-cleanup=claims"}},
		"a driver whose name deletes": {[]string{"topolvm", "--leader-election=false", "--pvc-finalizer-mode=enforce"}, 2,
			[]string{"--leader-election: must be set with --node-cleanup=claims and --pvc-finalizer-mode=enforce"}},
		"a flag of the driver": {[]string{"nodecontroller", "--minimum-allocation-ext4=1Mi"}, 2,
			[]string{"unknown flag", "a flag of the driver"}},
		"a flag of the driver with one dash": {[]string{"nodecontroller", "-zap-log-level=5"}, 2,
			[]string{"a flag of the driver", "--logging-format"}},
		"a removed flag": {[]string{"nodecontroller", "--node-cleanup-out-of-service"}, 2,
			[]string{"--node-cleanup-out-of-service was removed", "delete the Node"}},
		"a removed mode": {[]string{"all", "--node-cleanup=dry-run"}, 2,
			[]string{"--node-cleanup=dry-run was removed: use report, and doctor for permissions"}},
		"an unknown flag": {[]string{"nodecontroller", "--minimum"}, 2, []string{"unknown flag: --minimum"}},
		"two sockets": {[]string{"nodecontroller", "--csi-socket=/a", "--csi-address=/b"}, 2,
			[]string{"--csi-address and --csi-socket"}},
		"three addresses": {[]string{"all", "--http-endpoint=:1", "--metrics-bind-address=:2", "--metrics-address=:3"},
			2, []string{"--http-endpoint and --metrics-address and --metrics-bind-address: only one"}},
		"metrics that are secure and off": {[]string{"nodecontroller", "--secure-metrics-server", "--metrics-bind-address=0"}, 2,
			[]string{"--secure-metrics-server: requires an address"}},
		"socket of another network": {[]string{"nodecontroller", "--csi-socket=tcp://x"}, 2, []string{"--csi-address", "tcp://x"}},
		"the name of the driver is unknown": {[]string{"nodecontroller", "--print-config", "--csi-socket=/does/not/exist",
			"--timeout=10ms"}, 1, []string{"--driver-name"}},
		"secure metrics without a cluster": {[]string{"nodecontroller", "--driver-name=a.b", "--secure-metrics-server",
			"--metrics-bind-address=127.0.0.1:0"}, 1, []string{"--secure-metrics-server", "--kubeconfig"}},
	}
	t.Setenv("KUBECONFIG", "")
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := output(t, append([]string{"storage-controller"}, tt.argv...)...)
			for _, want := range tt.want {
				if code != tt.code || !strings.Contains(stderr, want) {
					t.Errorf("exit code %d, want %d; %q is missing in %s", code, tt.code, want, stderr)
				}
			}
		})
	}
}

func TestNameFromTheDriver(t *testing.T) {
	plugin := csitest.Run(t, csitest.Config{Name: "c.example.com"})
	compare(t, printed(t, "nodecontroller", "--csi-socket="+plugin.Address()),
		map[string][2]string{"node-finalizer": {"c.example.com/node", "derived"}})
}

// TestNodecontrollerOfTopolvm: the role runs for TopoLVM only in the process that serves the driver, however its name is known.
func TestNodecontrollerOfTopolvm(t *testing.T) {
	nobody := "--kubeconfig=" + kubetest.WriteKubeconfig(t, &rest.Config{Host: "http://127.0.0.1:1"})
	t.Setenv("POD_NAMESPACE", "default")
	for _, driver := range []string{topolvm.Driver, topolvm.LegacyDriver} {
		plugin := csitest.Run(t, csitest.Config{Name: driver})
		for name, argv := range map[string][]string{
			"by a flag":           {"nodecontroller", "--driver-name=" + driver},
			"by the driver":       {"nodecontroller", "--csi-socket=" + plugin.Address()},
			"named in all":        {"all", "--driver-name=" + driver, "--controllers=nodecontroller", "--leader-election"},
			"by all's driver":     {"all", "--csi-address=" + plugin.Address(), "--controllers=nodecontroller"},
			"that deletes none":   {"nodecontroller", "--driver-name=" + driver, "--node-cleanup=off"},
			"without a finalizer": {"nodecontroller", "--driver-name=" + driver, "--skip-node-finalize"},
		} {
			code, _, stderr := output(t, append([]string{"storage-controller"}, append(argv, nobody)...)...)
			for _, want := range []string{"nodecontroller: ", strconv.Quote(driver), "one Lease", "LogicalVolumes",
				"Run the command topolvm in place of topolvm-controller"} {
				if code != exitUsage || !strings.Contains(stderr, want) {
					t.Errorf("%s %s: exit code %d; %q is missing in %s", driver, name, code, want, stderr)
				}
			}
		}
	}
}
