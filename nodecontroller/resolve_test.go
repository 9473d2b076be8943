// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// resolved is the configuration that change makes of the defaults, for driver.
func resolved(t *testing.T, driver string, change func(*Config)) (Config, map[string]Setting) {
	t.Helper()
	c := DefaultConfig()
	if change != nil {
		change(&c)
	}
	c, settings, err := c.Resolve(driver)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	byName := map[string]Setting{}
	for _, s := range settings {
		byName[s.Name] = s
	}
	return c, byName
}

func TestNamesFollowFromTheDriver(t *testing.T) {
	_, have := resolved(t, "Local.Example.COM", nil)
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
		if got := have[name]; got.Value != want || got.Origin != OriginDerived {
			t.Errorf("%s: got %q (%s), want %q", name, got.Value, got.Origin, want)
		}
	}
	for name, want := range map[string]string{
		"node-cleanup": "report", "node-cleanup-scope": "opt-in", "node-cleanup-retain": "skip",
		"node-delete-grace": "5m0s", "node-finalizer-wait-for-others": "true", "node-finalizer-mode": "off", "pvc-finalizer-mode": "off",
		"pvc-obsolete-finalizers": "", "pvc-pod-deletion": "orphaned", "default-device-class": "00default",
		"topology-node-key": "", "enable-webhooks": "false",
		"node-missing-grace": "15m0s", "node-finalizer-timeout": "15m0s", "resize-nudge": "true",
	} {
		if got := have[name]; got.Value != want || got.Origin != OriginDefault {
			t.Errorf("%s: got %q (%s), want %q", name, got.Value, got.Origin, want)
		}
	}
	if got := have["cert-dir"].Value; !filepath.IsAbs(got) || !strings.HasSuffix(got, "k8s-webhook-server/serving-certs") {
		t.Errorf("cert-dir: %q", got)
	}
}

// TestProfiles holds the table of the profiles.
func TestProfiles(t *testing.T) {
	const current, classic, legacy = ProfileTopoLVM, ProfileTopoLVMClassic, ProfileTopoLVMLegacy
	drivers := map[string]string{current: "topolvm.io", classic: "topolvm.io", legacy: "topolvm.cybozu.com"}
	for name, want := range map[string]map[string]string{ // one value for all stands under ""; D is the driver
		"driver-name":                    {"": "D"},
		"node-finalizer":                 {"": "D/node"},
		"node-finalizer-mode":            {"": "remove"},
		"pvc-finalizer":                  {"": "topolvm.io/pvc"},
		"pvc-finalizer-mode":             {"": "strip", classic: "enforce"},
		"pvc-obsolete-finalizers":        {"": "topolvm.io/pvc, topolvm.cybozu.com/pvc", classic: "topolvm.cybozu.com/pvc"},
		"pvc-pod-deletion":               {"": "none", classic: "all"},
		"capacity-resource":              {"": "D/capacity"},
		"capacity-annotation-prefix":     {"": "capacity.D/"},
		"device-class-parameter":         {"": "D/device-class"},
		"default-device-class":           {"": "00default"},
		"resize-annotation":              {"": "topolvm.io/last-resizefs-requested-at"},
		"topology-node-key":              {"": "topology.D/node"},
		"node-cleanup":                   {"": "claims"},
		"node-cleanup-scope":             {"": "all"},
		"node-cleanup-retain":            {"": "claim"},
		"node-delete-grace":              {"": "0s"},
		"node-finalizer-wait-for-others": {"": "false"},
		"leader-election-id":             {"": "topolvm"},
	} {
		for profile, driver := range drivers {
			_, have := resolved(t, driver, func(c *Config) { c.Profile = profile })
			value, own := want[profile]
			if !own {
				value = want[""]
			}
			value = strings.ReplaceAll(value, "D", driver)
			if got := have[name]; got.Value != value || got.Origin != OriginProfile {
				t.Errorf("%s of %s: got %q (%s), want %q", name, profile, got.Value, got.Origin, value)
			}
		}
	}
	c, _ := resolved(t, "topolvm.io", func(c *Config) { c.Profile = classic })
	if c.PVCPodDeletionGrace != time.Second {
		t.Errorf("pods of the classic profile get %v", c.PVCPodDeletionGrace)
	}
}

func TestPresetsFitTheirSettings(t *testing.T) {
	check := func(source string, presets map[string]any) {
		for name, value := range presets {
			c := DefaultConfig().with(map[string]any{name: value}) // panics if the setting does not exist
			if got := c.values()[name]; !reflect.DeepEqual(got, value) {
				t.Errorf("%s presets %s with %T %v, it becomes %T %v", source, name, value, value, got, got)
			}
			if !MayBePreset(name) {
				t.Errorf("%s may not be preset", name)
			}
		}
	}
	for name, p := range profiles {
		check(name, p.presets)
	}
	check("the driver", derived("d"))
	if MayBePreset("node-missing-grace") {
		t.Error("a setting that nothing presets")
	}
}

func TestExplicitSettingsWin(t *testing.T) {
	plain, _ := resolved(t, "topolvm.io", func(c *Config) { c.Profile = ProfileTopoLVM })
	c, have := resolved(t, "topolvm.io", func(c *Config) { c.Profile, c.NodeFinalizer = ProfileTopoLVM, "x.y/z" })
	if plain.NodeFinalizer = "x.y/z"; !reflect.DeepEqual(c, plain) || have["node-finalizer"].Origin != OriginFlag {
		t.Errorf("got %+v, want %+v", c, plain)
	}
	c, have = resolved(t, "topolvm.io", func(c *Config) {
		c.Profile, c.PVCFinalizer = ProfileTopoLVM, ""
		c.Explicit = map[string]Origin{"node-cleanup": OriginFile, "pvc-obsolete-finalizers": OriginEnvironment,
			"pvc-finalizer": OriginFlag}
	})
	if c.NodeCleanup != nodecleanup.ModeReport || have["node-cleanup"].Origin != OriginFile {
		t.Errorf("the default, set explicitly, has become %s (%s)", c.NodeCleanup, have["node-cleanup"].Origin)
	}
	if len(c.PVCObsoleteFinalizers) != 0 {
		t.Errorf("the empty list has become %v", c.PVCObsoleteFinalizers)
	}
	if c.PVCFinalizer != "topolvm.io/pvc" {
		t.Errorf("a name that was set to nothing is %q", c.PVCFinalizer)
	}
	if again, _, err := c.Resolve("topolvm.io"); err != nil || !reflect.DeepEqual(again, c) {
		t.Errorf("resolving again: %v, %+v, want %+v", err, again, c)
	}
}

func TestSkippingTheFinalizerTurnsTheCleanupOff(t *testing.T) {
	for _, profile := range []string{ProfileNone, ProfileTopoLVM} {
		c, have := resolved(t, "topolvm.io", func(c *Config) { c.Profile, c.SkipNodeFinalize = profile, true })
		if c.NodeCleanup != nodecleanup.ModeOff || have["node-cleanup"].Origin != OriginDerived || len(c.DeletingFlags()) > 0 {
			t.Errorf("%s: %s (%s), deletes by %v", profile, c.NodeCleanup, have["node-cleanup"].Origin, c.DeletingFlags())
		}
	}
}

func TestWhatResolveRefuses(t *testing.T) {
	tests := map[string]struct {
		profile, name, driver string
		want                  []string
	}{
		"unknown profile":            {"zfs", "", "d", append([]string{"--profile", `"zfs"`}, ProfileNames()...)},
		"driver of another profile":  {ProfileTopoLVMLegacy, "", "topolvm.io", []string{`"topolvm.cybozu.com"`, `"topolvm.io"`}},
		"driver of another spelling": {ProfileTopoLVM, "", "TopoLVM.io", []string{`"topolvm.io"`, `"TopoLVM.io"`}},
		"another driver than was set": {"", "b.example.com", "a.example.com",
			[]string{"--driver-name", `"b.example.com"`, `"a.example.com"`}},
		"unknown driver": {"", "", "", []string{"--driver-name"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := DefaultConfig()
			c.Profile, c.DriverName = tt.profile, tt.name
			_, _, err := c.Resolve(tt.driver)
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want an error with %s", err, want)
				}
			}
		})
	}
}

func TestDriverWithoutAskingIt(t *testing.T) {
	for want, c := range map[string]Config{
		"":                   {},
		"a.example.com":      {Profile: ProfileTopoLVM, DriverName: "a.example.com"},
		"topolvm.cybozu.com": {Profile: ProfileTopoLVMLegacy},
	} {
		if got := c.Driver(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if !slices.Equal(ProfileNames(), []string{"none", "topolvm", "topolvm-classic", "topolvm-legacy"}) {
		t.Errorf("profiles %v", ProfileNames())
	}
}

// TestEmpty: flags do not set all fields. The others have their defaults.
func TestEmpty(t *testing.T) {
	for _, values := range [][2]reflect.Value{
		{reflect.ValueOf(*Empty()), reflect.ValueOf(DefaultConfig())},
		{reflect.ValueOf(Empty().Settings), reflect.ValueOf(DefaultConfig().Settings)},
	} {
		for i := range values[0].NumField() {
			field := values[0].Type().Field(i)
			got, want := values[0].Field(i).Interface(), values[1].Field(i).Interface()
			if field.Tag.Get("mapstructure") == "-" && !reflect.DeepEqual(got, want) {
				t.Errorf("%s is %v, want %v", field.Name, got, want)
			}
		}
	}
}
