// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
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

// TestMigrateCommand compares the results of the command with testdata, or writes them when UPDATE is set (make
// generate): the manifest, the report, and the missing permissions.
func TestMigrateCommand(t *testing.T) {
	for _, name := range manifests(t) {
		input, err := os.ReadFile(migrateTestdata + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			argv := []string{"storage-controller", "migrate", "-f", "-", "--image=storage-controller:dev"}
			golden := filepath.Join(migrateTestdata, "all", strings.ReplaceAll(name, "/", "-"))
			if !strings.Contains(name, "/") {
				argv = append(argv, "--replace-patched")
			}
			code, stdout, stderr := runWithInput(t, input, argv...)
			_, permissions, _ := runWithInput(t, input, append(argv, "--print-rbac")...)
			expected := 0
			if strings.Contains(stderr, "You must do, before the rollout") {
				expected = exitFindings
			}
			if code != expected {
				t.Fatalf("exit code %d: %s", code, stderr)
			}
			compareGolden(t, golden+".yaml", stdout)
			compareGolden(t, golden+".notes", stderr)
			compareGolden(t, golden+".rbac", permissions)
		})
	}
}

// doctorWarnsOfNothing fails the test if doctor has a warning or a failure about the settings of a migrated container.
func doctorWarnsOfNothing(t *testing.T, name string, args []string) {
	t.Helper()
	line, err := parseCommandLine(name, slices.Concat([]string{"storage-controller"}, args))
	if err != nil || line == nil { // livenessprobe runs no roles
		if err != nil || args[0] != "livenessprobe" {
			t.Errorf("%s: %q: %v", name, args, err)
		}
		return
	}
	if err := withFlags(line.flags, line.roles, func(_ context.Context, c app.Config) error {
		for _, check := range c.Plan(csiclient.Driver{}, false).Findings {
			if check.Severity != finding.OK && check.Severity != finding.Unknown {
				t.Errorf("%s: %q: %+v", name, args, check)
			}
		}
		return nil
	}); err != nil {
		t.Errorf("%s: %q: %v", name, args, err)
	}
}

// compareGolden compares have with a file, which is absent if have is empty.
func compareGolden(t *testing.T, file, have string) {
	t.Helper()
	if os.Getenv("UPDATE") != "" {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if have != "" {
			if err := os.WriteFile(file, []byte(have), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	want, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if string(want) != have {
		t.Errorf("not as in %s (make generate writes it):\n%s", file, migrate.Diff("testdata", "here", string(want), have))
	}
}

// eachMigrated runs test on the result for each manifest, with a container for all sidecars and with one for each.
func eachMigrated(t *testing.T, test func(t *testing.T, input []byte, r migrate.Result)) {
	for _, name := range manifests(t) {
		for mode, perRole := range map[string]bool{"all": false, "per-role": true} {
			t.Run(name+"/"+mode, func(t *testing.T) {
				input, err := os.ReadFile(migrateTestdata + name + ".yaml")
				if err != nil {
					t.Fatal(err)
				}
				r, err := migrate.Run(input, migrate.Options{Image: "x", PerRole: perRole, Patched: !strings.Contains(name, "/"),
					Tables: flagTables(newRoot("storage-controller"))})
				if kept := name == "published/vsphere-super"; err != nil && !kept {
					t.Fatal(err)
				}
				for _, n := range r.Notes {
					if strings.Contains(n.Text, "does not accept") {
						t.Error(n)
					}
				}
				test(t, input, r)
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
	eachMigrated(t, func(t *testing.T, _ []byte, r migrate.Result) {
		for _, args := range r.Commands {
			if args[0] != "livenessprobe" { // which needs no API server
				startsWith(t, t.Name(), args, nowhere)
			}
		}
	})
}

// TestSectionsMeanWhatTheImagesMeant compares the settings of each section of a migrated container with those of the image that it
// replaces, which has the arguments and the environment of the sidecar and the flags that the report says were appended.
func TestSectionsMeanWhatTheImagesMeant(t *testing.T) {
	compared := 0
	eachMigrated(t, func(t *testing.T, input []byte, r migrate.Result) {
		before, after := containersOf(t, input), containersOf(t, r.Manifest)
		for _, replacement := range r.Replacements {
			now := argumentsIn(after[replacement.Object+"/"+replacement.Container])
			if now[0] != "all" {
				continue
			}
			all, err := configOf(now)
			if err != nil {
				t.Fatalf("%q: %v", now, err)
			}
			for _, s := range replacement.Sidecars {
				c := before[replacement.Object+"/"+s.Name]
				program := migrate.Sidecar(c.Name, c.Image, c.Args)
				if len(c.Command) > 0 {
					program = filepath.Base(c.Command[0])
				}
				old, err := optionsOf(program, slices.Concat(argumentsIn(c), s.Appended))
				if err != nil {
					t.Fatalf("%s: %v", s.Name, err)
				}
				moved := strings.Contains(fmt.Sprint(s.Changed, s.Appended), "csi-address")
				for _, g := range old {
					if g.Unused {
						continue
					}
					compared += sameOptions(t, s.Name, program, g, all.Groups, moved)
				}
			}
		}
	})
	if compared < 1000 {
		t.Errorf("only %d options were compared", compared)
	}
}

// sameOptions expects that the options in g of the image of a program are also those in groups. It returns their number.
func sameOptions(t *testing.T, sidecar, program string, g settings.Group, groups []settings.Group, moved bool) int {
	name := g.Name
	if program == "livenessprobe" {
		name = program
	}
	i := slices.IndexFunc(groups, func(other settings.Group) bool { return other.Name == name })
	number := 0
	g.Flags.VisitAll(func(f *pflag.Flag) {
		other := groups[i].Flags.Lookup(f.Name)
		process := name == "" || other == nil // for all sections: of the logs, and the last four below
		have, want := "", f.Value.String()
		if other != nil {
			have = other.Value.String()
		}
		if f.Name == "csi-address" {
			have, want = strings.TrimPrefix(have, "unix://"), strings.TrimPrefix(want, "unix://")
			process = moved
		}
		if !process && have != want {
			t.Errorf("--%s of the section of %s is %q, that of the image %q", f.Name, sidecar, have, want)
		}
		number++
	})
	return number
}

// optionsOf returns the options of the image of a program with args.
func optionsOf(program string, args []string) ([]settings.Group, error) {
	root := newRoot(program)
	cmd, rest, err := root.Find(arguments(root, program, args))
	if err != nil {
		return nil, err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return nil, err
	}
	if program == "livenessprobe" {
		l, err := app.ReadLivenessprobe(cmd.Flags())
		if err != nil {
			return nil, err
		}
		return l.Groups, nil
	}
	c, err := roleCommands(program)[cmd.Name()].Read(cmd.Flags(), "")
	return c.Groups, err
}

// argumentsIn returns the arguments of c with the variables that have a value.
func argumentsIn(c corev1.Container) []string {
	env := map[string]string{}
	for _, v := range c.Env {
		if v.ValueFrom == nil {
			env[v.Name] = migrate.Expand(v.Value, env)
		}
	}
	args := slices.Clone(c.Args)
	if len(c.Command) > 0 {
		args = slices.Concat(c.Command[1:], c.Args)
	}
	for i, arg := range args {
		args[i] = strings.ReplaceAll(migrate.Expand(arg, env), "${LOG_LEVEL}", "2")
	}
	return args
}

// containersOf returns the containers of a stream by kind, name of the object, and name.
func containersOf(t *testing.T, stream []byte) map[string]corev1.Container {
	t.Helper()
	type object struct {
		Kind     string            `json:"kind"`
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	all := map[string]corev1.Container{}
	for doc := range strings.SplitSeq("\n"+string(stream), "\n---") {
		var list struct {
			object
			Items []object `json:"items"`
		}
		if err := k8syaml.Unmarshal([]byte(doc), &list); err != nil {
			continue // of another kind
		}
		for _, o := range append(list.Items, list.object) {
			for _, c := range slices.Concat(o.Spec.Template.Spec.InitContainers, o.Spec.Template.Spec.Containers) {
				all[o.Kind+" "+o.Metadata.Name+"/"+c.Name] = c
			}
		}
	}
	return all
}

func startsWith(t *testing.T, name string, args []string, nowhere string) {
	t.Helper()
	for i := range args {
		args[i] = strings.NewReplacer("$(metadata.namespace)", "namespace", "${LOG_LEVEL}", "2").Replace(args[i])
	}
	doctorWarnsOfNothing(t, name, args)
	if args[0] == "all" { // which has a way to look at the settings alone
		code, stdout, stderr := output(t, slices.Concat([]string{"storage-controller", "config", "validate"}, args[1:])...)
		if code != 0 || !strings.Contains(stdout, "valid") {
			t.Errorf("%s: %q: exit code %d: %s", name, args, code, stderr)
		}
	}
	// The address is left out, since it may be in use here.
	args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return strings.Contains(arg, "http-endpoint=") || strings.HasPrefix(arg, "--metrics-address") ||
			strings.HasPrefix(arg, "--driver-health-endpoint")
	})
	if code, _, stderr := output(t, append([]string{"storage-controller"}, args...)...); code != exitFailure || !strings.Contains(stderr,
		nowhere) {
		t.Errorf("%s: %q: exit code %d: %s", name, args, code, stderr)
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
		"an empty image":        {[]string{"-f", deployment, "--image="}, 2, "", "--image: must be the name of an image, got"},
		"two modes":             {[]string{"-f", deployment, "--all-in-one", "--per-role"}, 2, "", "only one of them"},
		"argument":              {[]string{"-f", deployment, "x"}, 2, "", "unexpected argument"},
		"unknown flag":          {[]string{"--nope"}, 2, "", "unknown flag"},
		"no such file":          {[]string{"-f", "/does/not/exist"}, 1, "", "reading the manifest: open /does/not/exist"},
		"nothing to replace":    {[]string{"-f", other}, 1, "", "migrating " + other + ": nothing to replace"},
		"help":                  {[]string{"--help"}, 0, "Examples:", ""},
		"diff":                  {[]string{"-f", deployment, "--diff"}, 3, "+++ " + deployment, "permissions"},
		"permissions":           {[]string{"-f", deployment, "--print-rbac"}, 3, "verbs: [get, list, watch, patch]", ""},
		"two outputs":           {[]string{"-f", deployment, "--diff", "--print-rbac"}, 2, "", "only one of them"},
		"image":                 {[]string{"-f", deployment, "--image=a/b:c"}, 3, "image: a/b:c\n", ""},
		"image of this version": {[]string{"-f", deployment}, 3, "image: storage-controller:" + buildVersion() + "\n", "Set --image"},
		"one dash":              {[]string{"-filename", deployment, "-per-role"}, 3, "- name: csi-provisioner\n", ""},
		"not all in one":        {[]string{"-f", deployment, "--all-in-one=false"}, 3, "- name: csi-provisioner\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := output(t, append([]string{"storage-controller", "migrate"}, tt.args...)...)
			if code != tt.code || !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", code, tt.code, stdout, stderr)
			}
			if code != 0 && code != exitFindings && stdout != "" {
				t.Errorf("a result in spite of the error: %s", stdout)
			}
		})
	}
}

// TestMigrateToSomethingThatDoesNotStart: the manifest is printed, and the exit code keeps a
// script from rolling it out.
func TestMigrateToSomethingThatDoesNotStart(t *testing.T) {
	manifest := func(kind, args string) []byte {
		return []byte("kind: Deployment\nmetadata: {name: d}\nspec:\n  template:\n    spec:\n      containers:\n      - name: " +
			kind + "\n        image: " + kind + ":v9\n        args: [--csi-address=/csi/csi.sock, " + args + "]\n")
	}
	for _, tt := range []struct{ kind, args, want string }{
		{"csi-attacher", "--timeout=soon", "invalid argument \"soon\""},
		{"csi-attacher", "--timeout=0s", "timeout"},
		{"csi-attacher", "--worker-threads=0", "worker-threads"},
		{"csi-attacher", "--leader-election, --leader-election-lease-duration=1s", "lease"},
		{"csi-provisioner", "--enable-capacity", "NAMESPACE"},
		{"csi-provisioner", "--node-deployment", "NODE_NAME"},
		{"csi-attacher", "--timeout=1m", ""},
	} {
		for _, diff := range []bool{false, true} {
			argv := []string{"storage-controller", "migrate", "-f", "-"}
			if diff {
				argv = append(argv, "--diff")
			}
			code, stdout, stderr := runWithInput(t, manifest(tt.kind, tt.args), argv...)
			_, reason, found := strings.Cut(stderr, "does not accept these arguments")
			if code != exitFindings || found != (tt.want != "") || !strings.Contains(stdout, "storage-controller") ||
				!strings.Contains(reason, tt.want) { // at least permissions are missing
				t.Errorf("%s: exit code %d\n%s\n%s", tt.args, code, stdout, stderr)
			}
		}
	}
}

// TestMigrateWithoutPermissions expects the exit code that keeps a script from rolling out what lacks permissions.
func TestMigrateWithoutPermissions(t *testing.T) {
	manifest := func(kind, role, rules string) string {
		return "kind: Deployment\nmetadata: {name: d, namespace: n}\nspec: {strategy: {type: Recreate}, template: {spec: {containers: " +
			"[{name: c, image: " + kind + ":v9, args: [--csi-address=/csi/csi.sock]}]}}}\n" +
			"---\nkind: ClusterRoleBinding\nmetadata: {name: b}\n" +
			"subjects: [{kind: ServiceAccount, name: default, namespace: n}]\nroleRef: {kind: ClusterRole, name: r}\n" +
			"---\nkind: ClusterRole\nmetadata: {name: " + role + "}\nrules:\n" + rules
	}
	rule := func(group, resources, verbs string) string {
		return "- {apiGroups: ['" + group + "'], resources: [" + resources + "], verbs: [" + verbs + "]}\n"
	}
	attacher := rule("", "persistentvolumes", "get, list, watch, patch") +
		rule("storage.k8s.io", "volumeattachments, volumeattachments/status", "get, list, watch, patch")
	resizer := rule("", "persistentvolumes, persistentvolumeclaims, persistentvolumeclaims/status", "get, list, watch, patch")
	nodes := func(verbs string) string { return rule("storage.k8s.io", "csinodes", verbs) }
	for name, tt := range map[string]struct {
		kind, role, rules string
		code              int
		missing           string
	}{
		"everything":              {"csi-attacher", "r", attacher + nodes("list, watch"), 0, ""},
		"a list":                  {"csi-attacher", "r", attacher, exitFindings, "lacks permissions: list,watch csinodes"},
		"a watch":                 {"csi-attacher", "r", attacher + nodes("list"), exitFindings, "permissions: watch csinodes"},
		"a role is not known":     {"csi-attacher", "other", attacher, exitFindings, "roles whose rules are not all in the input"},
		"a kind that is optional": {"csi-resizer", "r", resizer, exitFindings, "list,watch pods"},
	} {
		code, _, stderr := runWithInput(t, []byte(manifest(tt.kind, tt.role, tt.rules)), "storage-controller", "migrate", "-f", "-",
			"--image=x/y:v1")
		if code != tt.code || !strings.Contains(stderr, tt.missing) || tt.missing == "" && strings.Contains(stderr, "lacks permissions:") {
			t.Errorf("%s: exit code %d, want %d: %s", name, code, tt.code, stderr)
		}
	}
}

// TestMigrateExample expects the lines of the report in docs/migrate.md in a report of today.
func TestMigrateExample(t *testing.T) {
	page, err := os.ReadFile("../../docs/migrate.md")
	report, errReport := os.ReadFile(migrateTestdata + "all/nfs.notes")
	_, section, found := strings.Cut(string(page), "\n## Read the report\n")
	blocks := strings.SplitN(section, "```\n", 3)
	if err != nil || errReport != nil || !found || len(blocks) < 3 {
		t.Fatalf("%v, %v: %q", err, errReport, section)
	}
	for line := range strings.Lines(blocks[1]) {
		if !strings.Contains(string(report), "\n"+line) && !strings.HasPrefix(string(report), line) {
			t.Errorf("the report does not have the line %q", line)
		}
	}
}

// TestMigrateReadsManifestsAsOne expects the same from two files as from one with the documents of both.
func TestMigrateReadsManifestsAsOne(t *testing.T) {
	whole := migrateTestdata + "published/hetzner.yaml"
	text, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	const comment = "\n# Source: hcloud-csi/templates/core/storageclass.yaml"
	first, second, _ := strings.Cut(string(text), "\n---"+comment+"\n")
	a, b := filepath.Join(t.TempDir(), "a.yaml"), filepath.Join(t.TempDir(), "b.yaml")
	if err := errors.Join(os.WriteFile(a, []byte(first), 0o600), os.WriteFile(b, []byte(second), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"--diff=false", "--print-rbac"} {
		code, stdout, _ := output(t, "storage-controller", "migrate", flag, "-f", whole)
		got, parts, stderr := output(t, "storage-controller", "migrate", flag, "-f", a, "-f", b)
		if (parts == "") != (flag == "--print-rbac") || got != code || parts != strings.Replace(stdout, comment, "", 1) {
			t.Errorf("%s: exit code %d, want %d: %s\n%s", flag, got, code, stderr, parts)
		}
	}
}
