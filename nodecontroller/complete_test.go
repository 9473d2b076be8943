// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/topolvm"
)

// setting is the value of a flag, and how it came about: default, set or derived.
type setting struct{ value, origin string }

// values returns the values of the flags of c.
func values(c Config) map[string]string {
	all := map[string]string{}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) { all[f.Name] = strings.Trim(f.Value.String(), "[]") })
	return all
}

// completed is the configuration that change makes of the defaults, for driver. The named flags, and those whose values
// differ from the default, count as set.
func completed(t *testing.T, driver string, change func(*Config), named ...string) (Config, map[string]setting) {
	t.Helper()
	c := DefaultConfig()
	if change != nil {
		change(&c)
	}
	defaults, changed := values(DefaultConfig()), values(c)
	set := func(flag string) bool { return changed[flag] != defaults[flag] || slices.Contains(named, flag) }
	c, derived, err := c.Complete(driver, set)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	all := map[string]setting{}
	for name, value := range values(c) {
		origin := "default"
		switch {
		case slices.Contains(derived, name):
			origin = "derived"
		case set(name):
			origin = "set"
		}
		all[name] = setting{value, origin}
	}
	return c, all
}

func TestNamesFollowFromTheDriver(t *testing.T) {
	_, have := completed(t, "Local.Example.COM", nil)
	for name, want := range map[string]string{
		"node-finalizer":             "local.example.com/node",
		"pvc-finalizer":              "local.example.com/pvc",
		"capacity-resource":          "local.example.com/capacity",
		"capacity-annotation-prefix": "capacity.local.example.com/",
		"device-class-parameter":     "local.example.com/device-class",
		"resize-annotation":          "local.example.com/last-resizefs-requested-at",
		"leader-election-id":         "nodecontroller-leader-local-example-com",
		"driver-name":                "Local.Example.COM",
	} {
		if got := have[name]; got.value != want || got.origin != "derived" {
			t.Errorf("%s: got %q (%s), want %q", name, got.value, got.origin, want)
		}
	}
	for name, want := range map[string]string{
		"node-cleanup": "report", "node-cleanup-scope": "opt-in", "node-cleanup-retain": "skip",
		"node-delete-grace": "5m0s", "node-finalizer-wait-for-others": "true", "node-finalizer-mode": "off", "pvc-finalizer-mode": "off",
		"pvc-obsolete-finalizers": "", "default-device-class": "00default",
		"topology-node-key": "", "enable-webhooks": "false",
		"node-missing-grace": "15m0s", "node-finalizer-timeout": "15m0s", "resize-nudge": "true",
	} {
		if got := have[name]; got.value != want || got.origin != "default" {
			t.Errorf("%s: got %q (%s), want %q", name, got.value, got.origin, want)
		}
	}
	if got := have["cert-dir"].value; !filepath.IsAbs(got) || !strings.HasSuffix(got, "k8s-webhook-server/serving-certs") {
		t.Errorf("cert-dir: %q", got)
	}
}

// TestTopolvmFollowsFromTheDriver: the names and the behavior of topolvm-controller, for both names of the driver.
func TestTopolvmFollowsFromTheDriver(t *testing.T) {
	enforce := func(c *Config) { c.PVCFinalizerMode = pvcfinalizer.ModeEnforce }
	for name, want := range map[string]string{ // D is the driver
		"driver-name":                    "D",
		"node-finalizer":                 "D/node",
		"node-finalizer-mode":            "remove",
		"pvc-finalizer":                  "topolvm.io/pvc",
		"pvc-finalizer-mode":             "strip",
		"pvc-obsolete-finalizers":        "topolvm.io/pvc,topolvm.cybozu.com/pvc",
		"capacity-resource":              "D/capacity",
		"capacity-annotation-prefix":     "capacity.D/",
		"device-class-parameter":         "D/device-class",
		"resize-annotation":              "topolvm.io/last-resizefs-requested-at",
		"topology-node-key":              "topology.D/node",
		"node-cleanup":                   "claims",
		"node-cleanup-scope":             "all",
		"node-cleanup-retain":            "claim",
		"node-delete-grace":              "0s",
		"node-finalizer-wait-for-others": "false",
		"leader-election-id":             "topolvm",
	} {
		for _, driver := range []string{topolvm.Driver, topolvm.LegacyDriver} {
			value := strings.ReplaceAll(want, "D", driver)
			_, have := completed(t, driver, nil)
			if got := have[name]; got.value != value || got.origin != "derived" {
				t.Errorf("%s of %s: got %q (%s), want %q", name, driver, got.value, got.origin, value)
			}
			switch name {
			case "pvc-finalizer-mode":
				continue
			case "pvc-obsolete-finalizers":
				value = "topolvm.cybozu.com/pvc"
			}
			_, have = completed(t, driver, enforce)
			if got := have[name]; got.value != value || got.origin != "derived" {
				t.Errorf("%s of %s with enforce: got %q (%s), want %q", name, driver, got.value, got.origin, value)
			}
		}
	}
	if _, have := completed(t, "TopoLVM.io", nil); have["leader-election-id"].value != "topolvm" {
		t.Errorf("another spelling: %+v", have["leader-election-id"])
	}
	if _, have := completed(t, "topolvm.example.com", nil); have["node-cleanup"].value != "report" {
		t.Errorf("a driver with a similar name: %+v", have["node-cleanup"])
	}
}

func TestDerivedValuesFitTheirSettings(t *testing.T) {
	for _, driver := range []string{"d", topolvm.Driver} {
		for name, value := range derived(driver, "") {
			c := DefaultConfig()
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			c.AddFlags(fs)
			if err := fs.Set(name, value); err != nil {
				t.Fatal(err)
			}
			if got := strings.Trim(fs.Lookup(name).Value.String(), "[]"); got != value {
				t.Errorf("%s: %s is derived as %q, it becomes %q", driver, name, value, got)
			}
			if _, omitted := fs.Lookup(name).Annotations["omitted"]; !omitted {
				t.Errorf("a printed configuration contains the default of %s, which may be derived", name)
			}
			if _, omitted := fs.Lookup("node-missing-grace").Annotations["omitted"]; omitted {
				t.Error("a setting that nothing derives")
			}
		}
	}
}

func TestExplicitSettingsWin(t *testing.T) {
	plain, _ := completed(t, topolvm.Driver, nil)
	c, have := completed(t, topolvm.Driver, func(c *Config) { c.NodeFinalizer = "x.y/z" })
	if plain.NodeFinalizer = "x.y/z"; !reflect.DeepEqual(c, plain) || have["node-finalizer"].origin != "set" {
		t.Errorf("got %+v, want %+v", c, plain)
	}
	c, have = completed(t, topolvm.Driver, nil, "node-cleanup", "pvc-obsolete-finalizers", "pvc-finalizer")
	if c.NodeCleanup != nodecleanup.ModeReport || have["node-cleanup"].origin != "set" {
		t.Errorf("the default, set explicitly, has become %s (%s)", c.NodeCleanup, have["node-cleanup"].origin)
	}
	if len(c.PVCObsoleteFinalizers) != 0 {
		t.Errorf("the empty list has become %v", c.PVCObsoleteFinalizers)
	}
	if c.PVCFinalizer != "topolvm.io/pvc" {
		t.Errorf("a name that was set to nothing is %q", c.PVCFinalizer)
	}
	set := func(string) bool { return true }
	if again, _, err := c.Complete("topolvm.io", set); err != nil || !reflect.DeepEqual(again, c) {
		t.Errorf("completing again: %v, %+v, want %+v", err, again, c)
	}
}

func TestSkippingTheFinalizerTurnsTheCleanupOff(t *testing.T) {
	for _, driver := range []string{"local.example.com", topolvm.Driver} {
		c, have := completed(t, driver, func(c *Config) { c.SkipNodeFinalize = true })
		if c.NodeCleanup != nodecleanup.ModeOff || have["node-cleanup"].origin != "derived" || len(c.DeletingFlags()) > 0 {
			t.Errorf("%s: %s (%s), deletes by %v", driver, c.NodeCleanup, have["node-cleanup"].origin, c.DeletingFlags())
		}
	}
}

func TestWhatCompleteRefuses(t *testing.T) {
	for driver, want := range map[string]string{
		"a.example.com": `--driver-name: is "b.example.com", but the driver reports "a.example.com"`,
		"":              "--driver-name: must be set",
	} {
		_, _, err := Config{DriverName: "b.example.com"}.Complete(driver, func(string) bool { return false })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %s", driver, err, want)
		}
	}
}
