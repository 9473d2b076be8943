// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
)

func TestSettings(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	write := func(content string) {
		t.Helper()
		content = "apiVersion: config.storage-controller.io/v1alpha1\nkind: StorageControllerConfiguration\n" + content
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(args ...string) (app.Settings, error) {
		t.Helper()
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		app.All.Register(fs)
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		c, err := app.All.Read(fs, "test")
		return c.Settings, err
	}
	type got struct{ provisioner, attacher string }
	tests := map[string]struct {
		file string
		env  map[string]string
		args []string
		want got // timeouts
	}{
		"defaults":                   {"", nil, nil, got{"15s", "15s"}},
		"file at the top sets all":   {"timeout: 1s", nil, nil, got{"1s", "1s"}},
		"file in a section sets one": {"timeout: 1s\nattacher:\n  timeout: 2s", nil, nil, got{"1s", "2s"}},
		"environment beats the file": {"timeout: 1s", map[string]string{"TIMEOUT": "3s"}, nil, got{"3s", "3s"}},
		"environment of one role":    {"timeout: 1s", map[string]string{"PROVISIONER_TIMEOUT": "4s"}, nil, got{"4s", "1s"}},
		"flag beats the environment": {"timeout: 1s", map[string]string{"TIMEOUT": "3s"}, []string{"--timeout=5s"},
			got{"5s", "5s"}},
		"flag of one role beats that of all":   {"", nil, []string{"--timeout=5s", "--attacher-timeout=6s"}, got{"5s", "6s"}},
		"flag of all beats a section":          {"attacher:\n  timeout: 2s", nil, []string{"--timeout=5s"}, got{"5s", "5s"}},
		"an empty environment is not set":      {"timeout: 1s", map[string]string{"TIMEOUT": ""}, nil, got{"1s", "1s"}},
		"a section without options is no harm": {"attacher:\n", nil, nil, got{"15s", "15s"}},
		"a key without a value is not set":     {"timeout: 1s\nattacher: {timeout: }", nil, nil, got{"1s", "1s"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			write(tt.file)
			for k, v := range tt.env {
				t.Setenv(settings.EnvPrefix+k, v)
			}
			s, err := read(append(tt.args, "--config="+file)...)
			if err != nil {
				t.Fatal(err)
			}
			if g := (got{s.Provisioner.Timeout.String(), s.Attacher.Timeout.String()}); g != tt.want {
				t.Errorf("got %v, want %v", g, tt.want)
			}
		})
	}

	t.Run("maps keep their case", func(t *testing.T) {
		write("feature-gates:\n  Topology: false\nleader-election-labels: {Team: Storage}\nworker-threads: 7\nv: 3\ncontrollers: " +
			"[provisioner]")
		s, err := read("--config=" + file)
		if err != nil {
			t.Fatal(err)
		}
		r := s.Role("attacher")
		if r.Gates.Enabled("Topology") || r.Election.Labels["Team"] != "Storage" || s.Provisioner.WorkerThreads != 7 ||
			s.Attacher.WorkerThreads != 7 || s.Common.Logging.Verbosity != 3 || len(s.Common.Controllers) != 1 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("lists of pairs", func(t *testing.T) {
		write("feature-gates: [Topology=false, AllAlpha=true]\nleader-election-labels: ['a:b']")
		s, err := read("--config=" + file)
		if r := s.Role("resizer"); err != nil || len(r.Gates) != 2 || r.Gates.Enabled("Topology") || r.Election.Labels["a"] != "b" {
			t.Errorf("%v: %+v", err, r)
		}
	})
	t.Run("numbers and texts that flags accept, too", func(t *testing.T) {
		write("resync: 0\nstrict-topology: 1\nhealth-probe-bind-address: 0\nsnapshot-name-prefix: 3\n" +
			"node-cleanup-qps: 2\nworker-threads: '7'\ncontrollers: provisioner")
		s, err := read("--config=" + file)
		if c := s.Nodecontroller; err != nil || s.Attacher.Resync != 0 ||
			c.NodeCleanupQPS != 2 || !s.Provisioner.StrictTopology ||
			s.Provisioner.WorkerThreads != 7 || s.Common.HealthBindAddress != "0" || len(s.Common.Controllers) != 1 {
			t.Errorf("%v: %+v", err, s)
		}
	})
	for name, tt := range map[string]struct{ content, want string }{
		"alias":                   {"worker-threads: 7\nresync: 5m", "7 5m0s"},
		"the name before it":      {"worker-threads: 7\nworkers: 8\nresync: 5m\nresync-period: 6m", "8 6m0s"},
		"the section before it":   {"worker-threads: 7\nresync: 5m\nresizer: {workers: 9, resync-period: 0}", "9 0s"},
		"no alias in the section": {"attacher: {worker-threads: 7, resync: 5m}", "10 10m0s"},
	} {
		t.Run("alias at the top: "+name, func(t *testing.T) {
			write(tt.content)
			s, err := read("--config=" + file)
			c := s.Resizer
			if have := fmt.Sprint(c.Workers, c.ResyncPeriod); err != nil || have != tt.want {
				t.Errorf("%v: %s, want %s", err, have, tt.want)
			}
		})
	}
	t.Run("every option of a role has a flag with the prefix of the role", func(t *testing.T) {
		s, err := read("--provisioner-volume-name-prefix=vol", "--capacity-poll-interval=2m", "--provisioner-strict-topology",
			"--snapshotter-snapshot-name-prefix=a", "--snapshot-name-prefix=b")
		if c := s.Provisioner; err != nil || c.VolumeNamePrefix != "vol" || !c.StrictTopology {
			t.Errorf("%v: %+v", err, c)
		}
		if c := s.Snapshotter; c.SnapshotNamePrefix != "a" {
			t.Errorf("the flag without the prefix took precedence: %+v", c)
		}
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		app.All.Register(fs)
		for _, g := range app.All.Options().Roles() {
			g.Flags.VisitAll(func(f *pflag.Flag) {
				name := g.Name + "-" + strings.TrimPrefix(f.Name, g.Name+"-")
				if !g.Unused && fs.Lookup(name) == nil {
					t.Errorf("there is no --%s", name)
				}
			})
		}
	})
	t.Run("roles keep their own defaults", func(t *testing.T) {
		s, err := read()
		if err != nil || s.Provisioner.WorkerThreads != 100 || s.Attacher.WorkerThreads != 100 || s.Role("attacher").Limits.QPS != 0 {
			t.Errorf("%v: %+v", err, s)
		}
	})
	t.Run("what print prints means the same", func(t *testing.T) {
		write("timeout: 7s\nprovisioner: {strict-topology: true}\nleader-election-labels: {a: b}")
		before, err := read("--config="+file, "--http-endpoint=:1")
		if err != nil {
			t.Fatal(err)
		}
		printed, err := before.File()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, printed, 0o600); err != nil {
			t.Fatal(err)
		}
		after, err := read("--config=" + file)
		if err != nil {
			t.Fatalf("%v\n%s", err, printed)
		}
		again, err := after.File()
		if err != nil || string(again) != string(printed) {
			t.Errorf("%v: got\n%s\nwant\n%s", err, again, printed)
		}
	})
	for name, tt := range map[string]struct{ content, want string }{
		"unknown key":                       {"threads: 3", `unknown key "threads"`},
		"removed key":                       {"default-volume-size: 1Gi", `key "default-volume-size" was removed: set resources.requests.storage`},
		"unknown key in a section":          {"attacher: {strict-topology: true}", `unknown key "attacher.strict-topology"`},
		"section that is none":              {"attacher: 3", `key "attacher"`},
		"key twice":                         {"timeout: 1s\ntimeout: 2s", "timeout"},
		"value of the wrong kind":           {"timeout: often", "timeout"},
		"number that is none":               {"worker-threads: many", "worker-threads"},
		"duration without a unit":           {"timeout: 30", "'timeout' must be a time with a unit, such as 30s, got 30"},
		"duration of a role without a unit": {"nodecontroller: {node-delete-grace: 300}", "'node-delete-grace' must be a time with a unit"},
		"duration that is a boolean":        {"resync: true", "'resync' must be a time with a unit, such as 30s, got true"},
		"boolean that is a number":          {"strict-topology: 15", "'strict-topology' must be true or false, got 15"},
		"number that is a boolean":          {"worker-threads: true", "'worker-threads' must be a whole number, got true"},
		"number beyond its type":            {"worker-threads: 18446744073709551617", "must be at most 10000, got 18446744073709551616"},
		"negative number of threads":        {"worker-threads: -1", "provisioner.worker-threads: must be at least 0, got -1"},
		"list that is a number":             {"workers: [1]", "'workers' must be a whole number, got [1]"},
		"map that is a duration":            {"timeout: {a: b}", "'timeout' must be a time with a unit, such as 30s, got map[a:b]"},
		"text that is no number":            {"kube-api-qps: x", "'kube-api-qps' must be a number, got \"x\""},
		"number of threads":                 {"worker-threads: 2000000000", "provisioner.worker-threads: must be at most 10000, got 2"},
		"negative number beyond its type":   {"kube-api-burst: -18446744073709551617", "must be at least -2147483647, got -18"},
		"number with a fraction":            {"node-cleanup-min-nodes: 0.5", "must be a whole number, got 0.5"},
		"number that is empty":              {"node-cleanup-max-fraction: ''", `must be a number, got ""`},
		"text that YAML reads as a boolean": {"node-cleanup: off", "must be text in quotes, got false"},
		"not YAML":                          {"{", "configuration"},
		"two documents":                     {"timeout: 30s\n---\nleader-election: true", "it has several documents"},
		"version is no option of a file":    {"version: true", `unknown key "version"`},
		"a key that only the flags may set": {"config: x", `unknown key "config"`},
	} {
		t.Run(name, func(t *testing.T) {
			write(tt.content)
			if _, err := read("--config=" + file); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
	t.Run("wrong header", func(t *testing.T) {
		if err := os.WriteFile(file, []byte("kind: Other"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := read("--config=" + file); err == nil || !strings.Contains(err.Error(), "must begin with apiVersion") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("wrong variables are one line", func(t *testing.T) {
		t.Setenv("STORAGE_CONTROLLER_ATTACHER_TIMEOUT", "soon")
		t.Setenv("STORAGE_CONTROLLER_ATTACHER_WORKER_THREADS", "many")
		if _, err := read(); err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), `"soon"; 'worker-threads'`) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("file that is not there", func(t *testing.T) {
		t.Setenv("STORAGE_CONTROLLER_CONFIG", "/does/not/exist")
		if _, err := read(); err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
			t.Errorf("got %v", err)
		}
	})
}

// TestEverySourceSetsEveryOption: flag, environment and file have the same effect.
func TestEverySourceSetsEveryOption(t *testing.T) {
	samples := map[string]string{"int": "7", "uint": "7", "float64": "0.25", "string": "x", "stringSlice": "a,b", "duration": "7m0s",
		"key:value,...": "a:b", "Name=bool,...": "Topology=false"}
	file := filepath.Join(t.TempDir(), "config.yaml")
	read := func(args ...string) app.Settings {
		t.Helper()
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		app.All.Register(fs)
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		c, err := app.All.Read(fs, "test")
		if err != nil {
			t.Fatal(err)
		}
		return c.Settings
	}
	check := func(s app.Settings, group int, option, want string, origin settings.Origin) {
		t.Helper()
		g := s.Groups[group]
		key := strings.TrimPrefix(g.Name+"."+option, ".")
		if have := strings.Trim(g.Flags.Lookup(option).Value.String(), "[]"); have != want || s.Origin(key) != origin {
			t.Errorf("%s from %s: got %q from %q, want %q", key, origin, have, s.Origin(key), want)
		}
	}
	for i, g := range app.All.Options().Groups {
		if g.Unused {
			continue
		}
		g.Flags.VisitAll(func(f *pflag.Flag) {
			want := samples[f.Value.Type()]
			if f.Value.Type() == "bool" {
				want = fmt.Sprint(f.DefValue != "true")
			}
			if f.Name == "config" || f.Name == "version" || f.Name == "print-config" {
				return
			}
			check(read("--"+f.Name+"="+want), i, f.Name, want, settings.OriginFlag)
			variable := settings.EnvPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
			os.Setenv(variable, want)
			check(read(), i, f.Name, want, settings.OriginEnvironment)
			os.Unsetenv(variable)
			const header = "apiVersion: config.storage-controller.io/v1alpha1\nkind: StorageControllerConfiguration\n"
			if err := os.WriteFile(file, []byte(header+f.Name+": "+want+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			check(read("--config="+file), i, f.Name, want, settings.OriginFile)
		})
	}
}
