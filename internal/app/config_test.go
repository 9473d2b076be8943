// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/settings"
)

// configOf returns the configuration of a command with args.
func configOf(t *testing.T, roles Selection, args ...string) Config {
	t.Helper()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	roles.Register(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	c, err := roles.Read(fs, "test")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestListsOfFlags(t *testing.T) {
	alone := Nodecontroller
	want := func(have []string, want ...string) {
		t.Helper()
		if !slices.Equal(have, want) {
			t.Errorf("got %q, want %q", have, want)
		}
	}
	s := configOf(t, alone, "--pvc-obsolete-finalizers=a/b,c/d")
	want(nodecontrollerConfig(s.Settings).PVCObsoleteFinalizers, "a/b", "c/d")
	want(nodecontrollerConfig(configOf(t, alone, "--pvc-obsolete-finalizers=").Settings).PVCObsoleteFinalizers)
	want(configOf(t, All, "--controllers=a,,b").Common.Controllers, "a", "", "b") // so that Validate refuses the empty name
	want(provisionerConfig(configOf(t, Provision, "--secret-namespaces=a,b").Settings).SecretNamespaces, "a", "b")
}

// TestNoSocketOfADriver: a command that serves the driver must not serve it at the default of --csi-address, which it does not have.
func TestNoSocketOfADriver(t *testing.T) {
	if address := configOf(t, Topolvm(false), "--csi-socket=").DriverConfig().Address; address != "" {
		t.Errorf("without --csi-socket the address is %q", address)
	}
}

func TestDefaultsOfTheCommands(t *testing.T) {
	alone, all := configOf(t, Nodecontroller), configOf(t, All)
	election := func(c Config) settings.Election { return c.Role(c.roles[len(c.roles)-1].Name).Election }
	if e := election(alone); !e.Enabled || e.Timing.RetryPeriod != 2*time.Second || !nodecontrollerConfig(alone.Settings).ResizeNudge {
		t.Errorf("alone: %+v, nudge %t", e, nodecontrollerConfig(alone.Settings).ResizeNudge)
	}
	if e := election(all); e.Enabled || e.Timing.RetryPeriod != 5*time.Second || nodecontrollerConfig(all.Settings).ResizeNudge {
		t.Errorf("all: %+v, nudge %t", e, nodecontrollerConfig(all.Settings).ResizeNudge)
	}
	if e := election(configOf(t, Attach)); e.Enabled || e.Timing.RetryPeriod != 5*time.Second {
		t.Errorf("another role: %+v", e)
	}
}

// TestWhatIsPrintedForAFile: a printed configuration presets nothing that was not set.
func TestWhatIsPrintedForAFile(t *testing.T) {
	before := configOf(t, All, "--node-cleanup-scope=opt-in")
	text, err := before.File()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	after := configOf(t, All, "--config="+file)
	have, _, err := completeNodecontroller(after.Settings, "topolvm.io")
	if err != nil {
		t.Fatal(err)
	}
	if have.NodeCleanup != "claims" || have.NodeCleanupScope != "opt-in" || have.LeaderElectionID != "topolvm" ||
		after.Origin("csi-address") != "" {
		t.Errorf("%+v\n%s", have, text)
	}
}

func TestConnectionOnlyWhereOneIsNeeded(t *testing.T) {
	for name, tt := range map[string]struct {
		roles Selection
		args  []string
		want  string
	}{
		"name by flag":                {Nodecontroller, []string{"--driver-name=a.b"}, "a.b"},
		"service in this process":     {Topolvm(false), []string{"--controllers=nodecontroller"}, ""},
		"no name":                     {Nodecontroller, nil, ""},
		"name and address":            {Nodecontroller, []string{"--driver-name=a.b", "--csi-address=/run/csi/socket"}, ""},
		"name and socket":             {Nodecontroller, []string{"--driver-name=a.b", "--csi-socket=/x"}, ""},
		"role that calls the driver":  {Attach, nil, ""},
		"all":                         {All, []string{"--driver-name=a.b"}, ""},
		"all, and only this role":     {All, []string{"--driver-name=a.b", "--controllers=nodecontroller"}, "a.b"},
		"all, and not another role":   {All, []string{"--driver-name=a.b", "--controllers=-attacher"}, ""},
		"all, and this role and more": {All, []string{"--driver-name=a.b", "--controllers=nodecontroller,attacher"}, ""},
	} {
		if got := configOf(t, tt.roles, tt.args...).nameWithoutConnection(); got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

// TestErrorsOfARoleThatDoesNotRun: the settings of a role that --controllers leaves out need not be valid together.
func TestErrorsOfARoleThatDoesNotRun(t *testing.T) {
	for _, roles := range []string{"attacher", "-nodecontroller", "nodecontroller,-nodecontroller,attacher"} {
		if err := configOf(t, All, "--controllers="+roles, "--node-cleanup=claims", "--driver-name=a.b").Validate(); err != nil {
			t.Errorf("%s: %v", roles, err)
		}
	}
}

// TestEachErrorOnce: each error is on a line of its own, with the roles unless it concerns the process.
func TestEachErrorOnce(t *testing.T) {
	for args, want := range map[string]string{
		"--timeout=-5s": "--timeout: must be positive, got -5s",
		"--worker-threads=0 --reconcile-sync=-1s --max-entries=-1": "" +
			"provisioner, attacher, snapshotter: --worker-threads: must be positive, got 0\n" +
			"attacher: --reconcile-sync: must not be negative, got -1s\n" +
			"attacher: --max-entries: must be between 0 and 2147483647, got -1\n" +
			"resizer: --workers: must be positive, got 0",
	} {
		if err := configOf(t, All, strings.Fields(args)...).Validate(); err == nil || err.Error() != want {
			t.Errorf("%s: got\n%v\nwant\n%s", args, err, want)
		}
	}
}

// TestNodecontrollerWithoutWork: "all" does not run the role if none of its features is enabled.
func TestNodecontrollerWithoutWork(t *testing.T) {
	for args, want := range map[string]bool{
		"": true, "--node-cleanup=off": false, "--node-cleanup=off --controllers=nodecontroller": true,
		"--node-cleanup=off --enable-webhooks": true, "--node-cleanup=off --resize-nudge": true,
		"--node-cleanup=off --pvc-finalizer-mode=strip": true, "--node-cleanup=off --node-finalizer-mode=remove": true,
	} {
		if has := contains(configOf(t, All, strings.Fields(args)...).Enabled().roles, nodecontrollerName); has != want {
			t.Errorf("%q: the role runs: %t, want %t", args, has, want)
		}
	}
	if !contains(configOf(t, Topolvm(false), "--node-cleanup=off").Enabled().roles, nodecontrollerName) {
		t.Error("topolvm: nothing removes the finalizers of topolvm-node")
	}
}

func TestAllChoosesTheRoleByTheDriver(t *testing.T) {
	for _, local := range []bool{false, true} {
		d := csiclient.Driver{Name: "a.b", Plugin: csiclient.PluginCapabilities{VolumeAccessibilityConstraints: local}}
		chosen, _, _ := configOf(t, All).choose(d, true)
		if has := contains(chosen, nodecontrollerName); has != local {
			t.Errorf("volumes belong to nodes: %t, the role is chosen: %t", local, has)
		}
	}
}

func TestAddressesOfTheServer(t *testing.T) {
	for args, want := range map[string][3]string{
		"":                          {"", "", ""},
		"--metrics-bind-address=:1": {":1", "", ""},
		"--metrics-bind-address=0":  {"", "", ""},
		"--http-endpoint=:1":        {":1", "", ""},
		"--http-endpoint=:1 --metrics-bind-address=0 --health-probe-bind-address=:2 --profiling-bind-address=:3": {":1", ":2", ":3"},
		"--health-probe-bind-address=0": {"", "", ""},
	} {
		c := configOf(t, Nodecontroller, strings.Fields(args)...)
		cfg, address := c.serverConfig(newRegistries("", c.endpoints())), ""
		for _, e := range cfg.Endpoints {
			address = e.Address
		}
		if got := [3]string{address, cfg.HealthAddress, cfg.ProfilingAddress}; got != want {
			t.Errorf("%s: got %q, want %q", args, got, want)
		}
	}
}
