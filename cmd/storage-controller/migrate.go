// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// migrateFlags are the flags of "migrate" beside those of [migrate.Options].
type migrateFlags struct {
	files                     []string
	allInOne, diff, printRBAC bool
}

// writer returns the function that writes the result.
func (f migrateFlags) writer() func(file string, manifest []byte, r migrate.Result) string {
	switch {
	case f.diff:
		return writeDiff
	case f.printRBAC:
		return writePermissions
	}
	return writeManifest
}

func newMigrateCommand(name string) *cobra.Command {
	var f migrateFlags
	var o migrate.Options
	cmd := &cobra.Command{
		Use:   "migrate -f FILE",
		Short: "Rewrite the manifest of a driver to run storage-controller instead of the sidecars",
		Long: `Rewrite the manifest of a CSI driver to run storage-controller instead of csi-provisioner,
csi-attacher, csi-resizer and csi-snapshotter, of livenessprobe beside them, and of
topolvm-controller.

It reads Deployments, StatefulSets and DaemonSets in YAML, and prints the same manifest
with one container in place of these sidecars. It has a section for each of them with
its arguments, and their environment, mounts, ports, probes and resources. Other
containers and documents, with their comments, are printed unchanged. Nothing is sent to
a cluster.

A report on stderr has the arguments that differ, and notes: what you must do before the
rollout, what has changed its meaning, and information. The first two are also comments
at the new container. Permissions in the input are compared with what the new containers
need.

Exit code: 1 nothing to replace, or the manifest cannot be read; it is printed only if
something was replaced. 3 the report says what you must do before the rollout, such as
setting --image, adding permissions, or migrating a sidecar that was kept.`,
		Example: `  storage-controller migrate -f deployment.yaml > new.yaml
  storage-controller migrate -f deployment.yaml --diff
  storage-controller migrate -f rbac.yaml -f deployment.yaml --print-rbac | kubectl apply -f -
  kubectl get -n kube-system deployment/my-csi-controller -o yaml | storage-controller migrate -f - --per-role
  helm template my-driver my-repo/my-driver | storage-controller migrate -f - --image=storage-controller:v1`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(&o, cmd.Flags().Changed); err != nil {
				return &usageError{err}
			}
			manifest, err := readManifests(f.files, cmd.InOrStdin())
			if err != nil {
				return err
			}
			o.Tables = flagTables(newRoot(programName))
			return migrateManifest(cmd, f, manifest, o)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringArrayVarP(&f.files, "filename", "f", nil, "manifest to rewrite; - means the standard input. Several are read as one")
	fs.StringVar(&o.Image, "image", "storage-controller:"+buildVersion(), "image of the new containers")
	fs.BoolVar(&f.allInOne, "all-in-one", true, "one container that runs \"all\", or \"topolvm\", in each pod")
	fs.BoolVar(&o.PerRole, "per-role", false, "one container for each sidecar, under its name")
	fs.BoolVar(&o.Patched, "replace-patched", false, "also replace sidecars whose image tag has a suffix, such as v6.3.0_vmware.2: "+
		"a patched sidecar may do what storage-controller does not")
	fs.BoolVar(&f.diff, "diff", false, "print a unified diff instead of the new manifest")
	fs.BoolVar(&f.printRBAC, "print-rbac", false, "print roles and bindings with the permissions that the ServiceAccount lacks, "+
		"instead of the new manifest")
	return cmd
}

// check returns an error for flags that exclude each other, and completes o.
func (f migrateFlags) check(o *migrate.Options, changed func(name string) bool) error {
	switch {
	case len(f.files) == 0 || slices.Contains(f.files, ""):
		return errors.New("-f is required: the manifest to rewrite, or - for the standard input")
	case o.Image == "" || strings.ContainsAny(o.Image, " \t\r\n"):
		return fmt.Errorf("--image: must be the name of an image, got %q", o.Image)
	case o.PerRole && f.allInOne && changed("all-in-one"):
		return errors.New("--all-in-one and --per-role: only one of them may be set")
	case f.diff && f.printRBAC:
		return errors.New("--diff and --print-rbac: only one of them may be set")
	}
	o.PerRole = o.PerRole || !f.allInOne
	o.Placeholder = !changed("image")
	return nil
}

// readManifests returns the contents of files as one manifest. The file "-" is stdin.
func readManifests(files []string, stdin io.Reader) ([]byte, error) {
	var all []byte
	for _, file := range files {
		var manifest []byte
		var err error
		if file == "-" {
			manifest, err = io.ReadAll(stdin)
		} else {
			manifest, err = os.ReadFile(file)
		}
		if err != nil {
			return nil, fmt.Errorf("reading the manifest: %w", err)
		}
		if len(all) > 0 && !bytes.HasSuffix(all, []byte("\n")) {
			all = append(all, '\n')
		}
		if len(all) > 0 && !bytes.HasPrefix(manifest, []byte("---")) {
			all = append(all, "---\n"...)
		}
		all = append(all, manifest...)
	}
	return all, nil
}

// migrateManifest writes the result of the migration, and its report.
func migrateManifest(cmd *cobra.Command, f migrateFlags, manifest []byte, o migrate.Options) error {
	name := strings.Join(f.files, ", ")
	result, err := migrate.Run(manifest, o)
	if _, failed := io.WriteString(cmd.ErrOrStderr(), result.Report()); failed != nil {
		return failed
	}
	if err != nil {
		err = fmt.Errorf("migrating %s: %w", name, err)
		if result.Incomplete() {
			return &exitError{err, exitFindings}
		}
		return err
	}
	_, err = io.WriteString(cmd.OutOrStdout(), f.writer()(name, manifest, result))
	if err == nil && result.Incomplete() {
		err = &exitError{
			fmt.Errorf("migrating %s: the result is not complete. Do what the report says that you must do before the rollout", name),
			exitFindings,
		}
	}
	return err
}

func writeManifest(_ string, _ []byte, r migrate.Result) string    { return string(r.Manifest) }
func writePermissions(_ string, _ []byte, r migrate.Result) string { return string(r.Permissions) }

func writeDiff(file string, manifest []byte, r migrate.Result) string {
	return migrate.Diff(file, file+" (migrated)", string(manifest), string(r.Manifest))
}

// flagTables returns the flags that this program accepts.
func flagTables(root *cobra.Command) migrate.Tables {
	t := migrate.Tables{Flags: map[string]map[string]migrate.Flag{}, Gates: settings.KnownGates(), Accept: acceptable, Grants: grantsOf}
	sections := map[string]string{"topolvm": "topolvm"} // by their commands
	for section, command := range aliases {
		if section != topolvmController {
			sections[command] = section
		}
	}
	for _, cmd := range root.Commands() {
		flags := map[string]migrate.Flag{}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			today, _ := app.Retired(f.Name)
			flags[f.Name] = migrate.Flag{Bare: f.NoOptDefVal != "", Today: today}
		})
		t.Flags[sections[cmd.Name()]] = flags
	}
	return t
}

// acceptable validates args, which begin with a subcommand, as the program does in a container with variables.
func acceptable(args, variables []string) error {
	if args[0] == aliases["livenessprobe"] {
		cmd, err := parse(args)
		if err == nil {
			_, err = app.ReadLivenessprobe(cmd.Flags())
		}
		return err
	}
	c, err := configOf(args)
	if err != nil {
		return err
	}
	for _, name := range []string{"NAMESPACE", "NODE_NAME", "POD_NAME", "POD_NAMESPACE"} {
		if value, set := os.LookupEnv(name); set {
			defer os.Setenv(name, value)
		} else {
			defer os.Unsetenv(name)
		}
		os.Unsetenv(name)
		if slices.Contains(variables, name) {
			os.Setenv(name, "value") // only the pod knows it
		}
	}
	return errors.Join(c.Validate(), c.ValidateEnvironment())
}

// configOf returns the configuration of a command line that begins with a subcommand.
func configOf(args []string) (app.Config, error) {
	roles, known := roleCommands(programName)[args[0]]
	if !known {
		return app.Config{}, fmt.Errorf("%q runs no roles", args[0])
	}
	fs := pflag.NewFlagSet(args[0], pflag.ContinueOnError)
	roles.Register(fs)
	if err := fs.Parse(app.WithSections(fs, settings.LongFlags(fs, args[1:]))); err != nil {
		return app.Config{}, err
	}
	if fs.NArg() > 0 {
		return app.Config{}, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	c, err := roles.Read(fs, buildVersion())
	return c.Enabled(), err
}

// grantsOf returns the permissions that doctor would check for a command line in a pod of namespace.
func grantsOf(args []string, d migrate.Driver, namespace string) []rbac.Grant {
	c, err := configOf(args)
	if err != nil || args[0] == aliases["livenessprobe"] {
		return nil // acceptable reports an error; livenessprobe needs no API server
	}
	driver := csiclient.Driver{Name: c.DriverName(), Plugin: csiclient.PluginCapabilities{VolumeAccessibilityConstraints: d.Topology}}
	driver.Controller.PublishUnpublishVolume, driver.Controller.ExpandVolume = d.Attach, d.Expand
	driver.Controller.CreateDeleteSnapshot, driver.Controller.ModifyVolume = d.Snapshot, d.Modify
	driver.Group.CreateDeleteGetVolumeGroupSnapshot = d.Groups
	grants := c.Plan(driver, false).Grants
	for _, g := range grants {
		for i, a := range g.Accesses {
			if a.Namespace != "" && !c.HasLeasesIn(a.Namespace) {
				g.Accesses[i].Namespace = namespace
			}
		}
	}
	return grants
}

// parse returns the command of args after it has parsed its flags and checked its arguments.
func parse(args []string) (*cobra.Command, error) {
	root := newRoot(programName)
	cmd, rest, err := root.Find(arguments(root, programName, args))
	if err != nil {
		return nil, err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return nil, err
	}
	return cmd, cmd.ValidateArgs(cmd.Flags().Args())
}
