// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// printed is what --print-config says: of each setting its value and its origin.
func printed(t *testing.T, command string, args ...string) map[string][2]string {
	t.Helper()
	code, stdout, stderr := output(t, append([]string{"storage-controller", command, "--print-config"}, args...)...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	settings := map[string][2]string{}
	for line := range strings.Lines(stdout) {
		words := strings.Fields(line)
		settings[words[0]] = [2]string{strings.Join(words[1:len(words)-1], " "), words[len(words)-1]}
	}
	return settings
}

func compare(t *testing.T, have, want map[string][2]string) {
	t.Helper()
	for name, w := range want {
		if have[name] != w {
			t.Errorf("%s: got %q, want %q", name, have[name], w)
		}
	}
}

func TestNodecontrollerScenarioStart(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	t.Run("001_names_follow_from_the_driver", func(t *testing.T) {
		compare(t, printed(t, "nodecontroller", "--driver-name=Local.Example.COM"), map[string][2]string{
			"driver-name":                {"Local.Example.COM", "flag"},
			"node-finalizer":             {"local.example.com/node", "derived"},
			"capacity-annotation-prefix": {"capacity.local.example.com/", "derived"},
			"leader-election-id":         {"nodecontroller-leader-local-example-com", "derived"},
			"node-cleanup":               {"report", "default"},
		})
	})
	t.Run("002_TopoLVM", func(t *testing.T) {
		compare(t, printed(t, "topolvm"), namesOf("topolvm.io"))
	})
	t.Run("003_TopoLVM_under_its_first_name", func(t *testing.T) {
		want := namesOf("topolvm.cybozu.com")
		compare(t, printed(t, "topolvm", "--use-legacy"), want)
		t.Setenv("USE_LEGACY", "false")
		compare(t, printed(t, "topolvm"), want)
	})
	t.Run("004_a_flag_wins_over_the_name_of_the_driver", func(t *testing.T) {
		want := printed(t, "topolvm")
		want["node-finalizer"] = [2]string{"x.y/z", "flag"}
		compare(t, printed(t, "topolvm", "--node-finalizer=x.y/z"), want)
	})
	t.Run("005_all_that_is_wrong_at_once", func(t *testing.T) {
		for _, more := range [][]string{{"--driver-name=a.example.com"}, {"--driver-name=a.example.com", "--print-config"},
			nil} {
			code, _, stderr := output(t,
				append([]string{"storage-controller", "nodecontroller", "--capacity-resource=cpu", "--default-device-class=a/b"},
					more...)...)
			if code != exitUsage || !strings.Contains(stderr, "--capacity-resource") || !strings.Contains(stderr,
				"--default-device-class") {
				t.Errorf("with %v: exit code %d: %s", more, code, stderr)
			}
		}
	})
	t.Run("006_the_driver_has_another_name", func(t *testing.T) {
		plugin := csitest.Run(t, csitest.Config{Name: "a.example.com"})
		nobody := kubetest.WriteKubeconfig(t, &rest.Config{Host: "http://127.0.0.1:1"})
		for _, socket := range []string{"--csi-address", "--csi-socket"} {
			code, _, stderr := output(t, "storage-controller", "nodecontroller", socket+"="+plugin.Address(), "--driver-name=b.example.com",
				"--kubeconfig="+nobody)
			if code != exitFailure || !strings.Contains(stderr, `"a.example.com"`) || !strings.Contains(stderr, `"b.example.com"`) {
				t.Errorf("%s: exit code %d: %s", socket, code, stderr)
			}
		}
	})
}

// namesOf is what follows from a name of TopoLVM.
func namesOf(driver string) map[string][2]string {
	names := map[string][2]string{}
	for name, value := range map[string]string{
		"driver-name": "D", "node-finalizer": "D/node", "pvc-finalizer": "topolvm.io/pvc", "capacity-resource": "D/capacity",
		"capacity-annotation-prefix": "capacity.D/", "device-class-parameter": "D/device-class",
		"resize-annotation": "topolvm.io/last-resizefs-requested-at", "topology-node-key": "topology.D/node",
		"leader-election-id": "topolvm",
	} {
		names[name] = [2]string{strings.ReplaceAll(value, "D", driver), "derived"}
	}
	return names
}
