// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// wrongValues has a wrong value of each flag, and further flags with which the value is read. A value that the type of
// the flag refuses is in TestWrongInput.
var wrongValues = map[string][]string{
	"config": {"/does/not/exist"}, "csi-address": {"tcp://x"}, "csi-socket": {"tcp://x"}, "kube-api-burst": {"-1", "--kube-api-qps=1"},
	"leader-election-namespace": {"A b"}, "leader-election-lease-duration": {"-1s", "--leader-election"},
	"leader-election-renew-deadline": {"-1s", "--leader-election"}, "leader-election-retry-period": {"0s", "--leader-election"},
	"leader-election-labels": {"a:b c"}, "leader-election-id": {"A b"},
	"http-endpoint": {"8080"}, "metrics-address": {":x"}, "metrics-bind-address": {"x"}, "health-probe-bind-address": {":-1"},
	"profiling-bind-address": {":99999"}, "driver-health-endpoint": {"9808"}, "health-port": {"x"},
	"webhook-addr":         {"x", "--enable-webhooks"},
	"tls-cert-file":        {"x", "--secure-metrics-server"},
	"tls-private-key-file": {"x", "--secure-metrics-server"},
	"tls-min-version":      {"1.2"}, "tls-cipher-suites": {"x"},
	"secure-metrics-server": {"true"}, "metrics-path": {"x"}, "probe-timeout": {"0s"}, "otlp-endpoint": {"collector"},
	"otlp-sampling-ratio": {"NaN"}, "feature-gates": {"Nope=true"}, "vmodule": {"x"}, "logging-format": {"xml"},
	"log-flush-frequency": {"-1s"}, "log-text-info-buffer-size": {"x"}, "log-json-info-buffer-size": {"x", "--logging-format=json"},
	"controllers": {"flyer"}, "audit-interval": {"-1s"},
	"resize-timeout": {"-1s"}, "modify-timeout": {"-1s"},
	"timeout": {"0s"}, "retry-interval-start": {"0s"}, "retry-interval-max": {"-1s"}, "worker-threads": {"0"}, "workers": {"-1"},
	"nodecontroller-workers": {"0"}, "cloning-protection-threads": {"0"}, "capacity-threads": {"0", "--enable-capacity"}, "resync": {"-1s"},
	"resync-period": {"-1s"}, "reconcile-sync": {"-1s"}, "max-entries": {"-1"}, "volume-name-prefix": {"A b"},
	"volume-name-uuid-length": {"0"}, "provisioning-protection": {"some"}, "secret-namespaces": {"A b"},
	"node-deployment-base-delay": {"0s", "--node-deployment"}, "node-deployment-max-delay": {"0s", "--node-deployment"},
	"capacity-poll-interval":  {"0s", "--enable-capacity"},
	"capacity-removal-grace":  {"-1s", "--enable-capacity"},
	"kube-api-capacity-burst": {"-1", "--kube-api-capacity-qps=1", "--enable-capacity"},
	"kube-api-capacity-qps":   {"NaN", "--enable-capacity"}, "kube-api-qps": {"NaN"},
	"snapshot-name-prefix": {""}, "groupsnapshot-name-prefix": {""}, "snapshot-name-uuid-length": {"0"},
	"groupsnapshot-name-uuid-length": {"99"},
	"minimum-allocation-block":       {"x"}, "minimum-allocation-ext4": {"x"}, "minimum-allocation-xfs": {"x"},
	"minimum-allocation-btrfs": {"x"},
	"zap-encoder":              {"xml"}, "zap-log-level": {"loud"},
	"topology-node-key": {"a b"}, "node-finalizer": {"x"}, "node-finalizer-mode": {"some"},
	"node-finalizer-timeout": {"-1s"}, "node-delete-grace": {"-1s"}, "node-cleanup": {"some"},
	"node-cleanup-scope": {"some"}, "node-cleanup-retain": {"some"}, "node-missing-grace": {"1s"},
	"node-cleanup-window": {"-1s"}, "node-cleanup-max-fraction": {"NaN"}, "node-cleanup-min-nodes": {"-1"}, "node-cleanup-qps": {"0"},
	"node-cleanup-burst": {"0"}, "pv-release-grace": {"-1s"},
	"pvc-finalizer": {"x"}, "pvc-finalizer-mode": {"some"}, "pvc-obsolete-finalizers": {"x"}, "resize-annotation": {"x"},
	"capacity-resource": {"x"}, "capacity-annotation-prefix": {"x"},
	"default-device-class": {"a/b"}, "shutdown-delay": {"-1s"},
	"node": {""}, "wait": {"-1s"}, "output": {"xml"}, "stuck-after": {"0s"}, "settle": {"0s"},
}

// anyValue are flags of which every value of their type has a meaning.
var anyValue = strings.Fields(`exit-on-connection-loss adaptive-concurrency max-grpc-log-length kubeconfig master leader-election
	enable-pprof automaxprocs version v log-text-split-stream log-json-split-stream default-fstype strict-topology immediate-topology
	extra-create-metadata controller-publish-readonly prevent-volume-mode-conversion snapshot-orphan-sweep-interval node-deployment
	node-deployment-immediate-binding enable-capacity capacity-ownerref-level capacity-for-immediate-binding
	handle-volume-inuse-error extra-modify-metadata print-config driver-name node-finalizer-wait-for-others skip-node-finalize
	use-legacy zap-devel zap-stacktrace-level zap-time-encoding
	resize-nudge enable-webhooks cert-dir webhook-client-ca device-class-parameter namespace yes held all help`)

// TestWrongValues: a wrong value of any flag ends each command that has the flag with the exit code of a usage error.
func TestWrongValues(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	for _, name := range podVariables {
		t.Setenv(name, "set")
	}
	needed := map[string][]string{ // so that the command does not wait for a driver
		"topolvm":                {"--metrics-bind-address="},
		"nodecontroller approve": {"--driver-name=a.b"}, "nodecontroller remove-finalizers": {"--driver-name=a.b"},
	}
	for words, cmd := range commandTree(t) {
		first, _, _ := strings.Cut(words, " ")
		_, role := roleCommands(programName)[first]
		if !role && !slices.Contains([]string{"config validate", "livenessprobe", "audit"}, words) {
			continue
		}
		t.Run(words, func(t *testing.T) {
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				wrong, known := wrongValues[f.Name]
				switch {
				case slices.Contains(anyValue, f.Name) || f.Hidden:
					return
				case strings.HasSuffix(f.Usage, " only") && strings.HasPrefix(f.Usage, "--"): // the flag of one role
					return
				case !known:
					t.Errorf("--%s is neither in wrongValues nor in anyValue", f.Name)
					return
				}
				argv := slices.Concat([]string{"storage-controller"}, strings.Fields(words), needed[words])
				if cmd.Flags().Lookup("kubeconfig") != nil {
					argv = append(argv, "--kubeconfig=/does/not/exist") // ends the command that accepts the value
				}
				argv = append(append(argv, wrong[1:]...), "--"+f.Name+"="+wrong[0])
				code, _, stderr := output(t, argv...)
				if code != exitUsage {
					t.Errorf("%q: exit code %d: %s", argv, code, stderr)
				}
			})
		})
	}
}
