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
func printed(t *testing.T, args ...string) map[string][2]string {
	t.Helper()
	code, stdout, stderr := output(t, append([]string{"storage-controller", "nodecontroller", "--print-config"}, args...)...)
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
		compare(t, printed(t, "--driver-name=Local.Example.COM"), map[string][2]string{
			"driver-name":                {"Local.Example.COM", "flag"},
			"node-finalizer":             {"local.example.com/node", "derived"},
			"capacity-annotation-prefix": {"capacity.local.example.com/", "derived"},
			"leader-election-id":         {"nodecontroller-leader-local-example-com", "derived"},
			"node-cleanup":               {"report", "default"},
		})
	})
	t.Run("002_profile_of_TopoLVM", func(t *testing.T) {
		compare(t, printed(t, "--profile=topolvm"), namesOf("topolvm.io"))
	})
	t.Run("003_profile_of_the_first_name", func(t *testing.T) {
		want := namesOf("topolvm.cybozu.com")
		want["pvc-finalizer"], want["resize-annotation"] = [2]string{"topolvm.io/pvc",
			"profile"}, [2]string{"topolvm.io/last-resizefs-requested-at", "profile"}
		compare(t, printed(t, "--profile=topolvm-legacy"), want)
	})
	t.Run("004_a_flag_wins_over_the_profile", func(t *testing.T) {
		want := printed(t, "--profile=topolvm")
		want["node-finalizer"] = [2]string{"x.y/z", "flag"}
		compare(t, printed(t, "--profile=topolvm", "--node-finalizer=x.y/z"), want)
	})
	t.Run("005_all_that_is_wrong_at_once", func(t *testing.T) {
		for _, more := range [][]string{{"--driver-name=a.example.com"}, {"--driver-name=a.example.com", "--print-config"},
			{"--profile=topolvm"}, nil} {
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

// namesOf is what the profiles of TopoLVM make of its two names.
func namesOf(driver string) map[string][2]string {
	names := map[string][2]string{}
	for name, value := range map[string]string{
		"driver-name": "D", "node-finalizer": "D/node", "pvc-finalizer": "D/pvc", "capacity-resource": "D/capacity",
		"capacity-annotation-prefix": "capacity.D/", "default-device-class": "00default", "device-class-parameter": "D/device-class",
		"resize-annotation": "D/last-resizefs-requested-at", "topology-node-key": "topology.D/node",
		"leader-election-id": "topolvm",
	} {
		names[name] = [2]string{strings.ReplaceAll(value, "D", driver), "profile"}
	}
	return names
}
