// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

const migrateTestdata = "../../internal/tools/migrate/testdata/"

// manifests are the inputs in testdata, without their ending.
func manifests(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(migrateTestdata + "*.yaml")
	published, errPublished := filepath.Glob(migrateTestdata + "published/*.yaml")
	if err != nil || errPublished != nil || len(files) < 7 || len(published) < 7 {
		t.Fatalf("%d manifests, %v, and %d published ones, %v", len(files), err, len(published), errPublished)
	}
	for i := range files {
		files[i] = strings.TrimSuffix(filepath.Base(files[i]), ".yaml")
	}
	for _, file := range published {
		files = append(files, "published/"+strings.TrimSuffix(filepath.Base(file), ".yaml"))
	}
	return files
}

// runWithInput is output with something on the standard input.
func runWithInput(t *testing.T, input []byte, argv ...string) (code int, stdout, stderr string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "stdin")
	if err := os.WriteFile(file, input, 0o600); err != nil {
		t.Fatal(err)
	}
	stdin, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	before := os.Stdin
	os.Stdin = stdin
	defer func() { os.Stdin = before }()
	return output(t, argv...)
}

// TestMigrateCommand: with the flags that the program has, the results are those that
// package migrate is tested with.
func TestMigrateCommand(t *testing.T) {
	for _, name := range manifests(t) {
		input, err := os.ReadFile(migrateTestdata + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		for mode, flag := range map[string]string{"all": "--all-in-one", "per-role": "--per-role"} {
			t.Run(name+"/"+mode, func(t *testing.T) {
				argv := []string{"storage-controller", "migrate", "-f", "-", "--image=storage-controller:dev", flag}
				golden := strings.ReplaceAll(name, "/", "-")
				if name == golden {
					argv = append(argv, "--replace-patched", "--with-nodecontroller")
				}
				expected := 0
				if name == "published/vsphere-super" { // its sidecars are patched
					expected = exitFindings
				}
				code, stdout, stderr := runWithInput(t, input, argv...)
				if code != expected {
					t.Fatalf("exit code %d: %s", code, stderr)
				}
				stderr, _, _ = strings.Cut(stderr, "storage-controller: migrating -: ")
				want, err := os.ReadFile(filepath.Join(migrateTestdata, mode, golden+".yaml"))
				if expected != 0 {
					want = nil // nothing was replaced
				}
				if err != nil || string(want) != stdout {
					t.Errorf("not as in testdata (%v):\n%s", err, migrate.Diff("testdata", "here", string(want), stdout))
				}
				notes, err := os.ReadFile(filepath.Join(migrateTestdata, mode, golden+".notes"))
				if have := strings.ReplaceAll("\n"+stderr, "\nstorage-controller: ", "\n")[1:]; err != nil || have != string(notes) {
					t.Errorf("notes are not as in testdata (%v):\n%s", err, migrate.Diff("testdata", "here", string(notes), have))
				}
			})
		}
	}
}

// TestMigratedArguments: the program starts with what it has written into manifests, as
// far as that is possible without a cluster.
func TestMigratedArguments(t *testing.T) {
	const nowhere = "/does/not/exist"
	t.Setenv("KUBECONFIG", nowhere)
	t.Setenv("NODE_NAME", "node")
	t.Setenv("NAMESPACE", "namespace")
	t.Setenv("POD_NAME", "pod")
	for _, name := range manifests(t) {
		for _, perRole := range []bool{false, true} {
			input, err := os.ReadFile(migrateTestdata + name + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			r, err := migrate.Run(input, migrate.Options{Image: "x", PerRole: perRole, Patched: !strings.Contains(name, "/"),
				Nodecontroller: true, Tables: flagTables(newRoot("storage-controller"))})
			if err != nil && !r.Rejected {
				t.Fatal(err)
			}
			for _, args := range r.Commands {
				startsWith(t, name, args, nowhere)
			}
		}
	}
}

func startsWith(t *testing.T, name string, args []string, nowhere string) {
	t.Helper()
	for i := range args {
		args[i] = strings.NewReplacer("$(metadata.namespace)", "namespace", "${LOG_LEVEL}", "2").Replace(args[i])
	}
	if args[0] == "all" { // which has a way to look at the settings alone
		code, stdout, stderr := output(t, slices.Concat([]string{"storage-controller", "config", "validate"}, args[1:])...)
		if code != 0 || !strings.Contains(stdout, "valid") {
			t.Errorf("%s: %q: exit code %d: %s", name, args, code, stderr)
		}
	}
	// The address is left out, since it may be in use here.
	args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return strings.HasPrefix(arg, "--http-endpoint") || strings.HasPrefix(arg, "--metrics-address") ||
			strings.HasPrefix(arg, "--driver-health-endpoint")
	})
	if code, _, stderr := output(t, append([]string{"storage-controller"}, args...)...); code != exitFailure || !strings.Contains(stderr,
		nowhere) {
		t.Errorf("%s: %q: exit code %d: %s", name, args, code, stderr)
	}
}

// TestMigrateHints: every file of permissions that a note names is there.
func TestMigrateHints(t *testing.T) {
	files, err := filepath.Glob(migrateTestdata + "*/*.notes")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	seen := 0
	for _, file := range files {
		notes, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range strings.Split(string(notes), "deploy/rbac/")[1:] {
			name := part[:strings.IndexFunc(part, func(r rune) bool { return r != '-' && (r < 'a' || r > 'z') })]
			seen++
			if _, err := os.Stat(filepath.Join("../../deploy/rbac", name, "rbac.yaml")); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
	if seen == 0 {
		t.Error("no note names a directory")
	}
}

func TestMigrateUsage(t *testing.T) {
	deployment := migrateTestdata + "nfs.yaml"
	other := filepath.Join(t.TempDir(), "other.yaml")
	if err := os.WriteFile(other, []byte("kind: Service\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"no file":               {nil, 2, "", "-f is required"},
		"an empty image":        {[]string{"-f", deployment, "--image="}, 2, "", "--image: must not be empty"},
		"two modes":             {[]string{"-f", deployment, "--all-in-one", "--per-role"}, 2, "", "only one of them"},
		"argument":              {[]string{"-f", deployment, "x"}, 2, "", "unexpected argument"},
		"unknown flag":          {[]string{"--nope"}, 2, "", "unknown flag"},
		"no such file":          {[]string{"-f", "/does/not/exist"}, 1, "", "reading the manifest: open /does/not/exist"},
		"nothing to replace":    {[]string{"-f", other}, 1, "", "migrating " + other + ": nothing to replace"},
		"help":                  {[]string{"--help"}, 0, "Examples:", ""},
		"diff":                  {[]string{"-f", deployment, "--diff"}, 0, "+++ " + deployment, "permissions"},
		"image":                 {[]string{"-f", deployment, "--image=a/b:c"}, 0, "image: a/b:c\n", ""},
		"image of this version": {[]string{"-f", deployment}, 0, "image: storage-controller:" + buildVersion() + "\n", ""},
		"one dash":              {[]string{"-filename", deployment, "-per-role"}, 0, "- provision\n", ""},
		"not all in one":        {[]string{"-f", deployment, "--all-in-one=false"}, 0, "- provision\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := output(t, append([]string{"storage-controller", "migrate"}, tt.args...)...)
			if code != tt.code || !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", code, tt.code, stdout, stderr)
			}
			if code != 0 && stdout != "" {
				t.Errorf("a result in spite of the error: %s", stdout)
			}
		})
	}
}

// TestMigrateToSomethingThatDoesNotStart: the manifest is printed, and the exit code keeps a
// script from rolling it out.
func TestMigrateToSomethingThatDoesNotStart(t *testing.T) {
	manifest := "kind: Deployment\nmetadata: {name: d}\nspec:\n  template:\n    spec:\n      containers:\n      - name: " +
		"csi-attacher\n        image: csi-attacher:v4\n        args: [--csi-address=/csi/csi.sock, --timeout=soon]\n"
	for name, flags := range map[string][]string{"manifest": nil, "diff": {"--diff"}} {
		code, stdout, stderr := runWithInput(t, []byte(manifest), append([]string{"storage-controller", "migrate", "-f", "-"}, flags...)...)
		if code != exitFindings || !strings.Contains(stdout, "--timeout=soon") || !strings.Contains(stderr,
			"does not accept these arguments") || !strings.Contains(stderr, "will not start") {
			t.Errorf("%s: exit code %d\n%s\n%s", name, code, stdout, stderr)
		}
	}
	if code, _, stderr := runWithInput(t, []byte(strings.Replace(manifest, "soon", "1m", 1)), "storage-controller", "migrate", "-f",
		"-"); code != 0 {
		t.Errorf("a duration: exit code %d: %s", code, stderr)
	}
}

func TestMigrateTakesOneManifest(t *testing.T) {
	code, stdout, stderr := output(t, "storage-controller", "migrate", "-f", migrateTestdata+"a.yaml", "-f", migrateTestdata+"b.yaml")
	if code != exitUsage || stdout != "" || !strings.Contains(stderr, "one manifest at a time") {
		t.Errorf("exit code %d: %q %q", code, stdout, stderr)
	}
}
