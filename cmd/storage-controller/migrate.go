package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

func newMigrateCommand(name string) *cobra.Command {
	var file, image string
	var allInOne, perRole, diff bool
	cmd := &cobra.Command{
		Use:   "migrate -f FILE",
		Short: "Rewrite the manifest of a driver to run storage-controller instead of the sidecars",
		Long: `Rewrite the manifest of a driver to run storage-controller instead of
csi-provisioner and csi-attacher, and beside topolvm-controller.

It reads Deployments, StatefulSets and DaemonSets, in YAML, and prints the same
manifest in which one container takes the place of those sidecars, with their
flags, environment, mounts, ports, probes and resources. Everything else, other
containers and documents with their comments, is printed as it is. Nothing is
sent to a cluster.

What could not be carried over, and what to check before a rollout, stands as a
comment at the new container and on stderr. Exit code 1: there was nothing to
replace, or the manifest cannot be read; the manifest is printed only where
something was replaced. Exit code 3: it is printed, and does not start before what
the notes say is mended, such as a flag with a value that is not accepted.`,
		Example: `  storage-controller migrate -f deployment.yaml > new.yaml
  storage-controller migrate -f deployment.yaml --diff
  kubectl get -n kube-system deployment/my-csi-controller -o yaml | storage-controller migrate -f - --per-role
  helm template my-driver my-repo/my-driver | storage-controller migrate -f - --image=storage-controller:v1`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case file == "":
				return &usageError{errors.New("-f is needed: the manifest to rewrite, or - for the standard input"), cmd.UsageString()}
			case image == "":
				return &usageError{errors.New("--image: must not be empty"), cmd.UsageString()}
			case perRole && allInOne && cmd.Flags().Changed("all-in-one"):
				return &usageError{errors.New("--all-in-one and --per-role: only one of them may be set"), cmd.UsageString()}
			case !perRole && !allInOne:
				perRole = true
			}
			manifest, err := readManifest(file, cmd.InOrStdin())
			if err != nil {
				return err
			}
			return migrateManifest(cmd, name, file, manifest, diff, migrate.Options{
				Image: image, PerRole: perRole, Tables: flagTables(newRoot("storage-controller")),
			})
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.VarP(oneFile{&file}, "filename", "f", "manifest to rewrite; - means the standard input")
	fs.StringVar(&image, "image", "storage-controller:"+buildVersion(), "image of the new containers")
	fs.BoolVar(&allInOne, "all-in-one", true, "one container, which runs \"all\", in each pod")
	fs.BoolVar(&perRole, "per-role", false, "one container for each sidecar, under its name")
	fs.BoolVar(&diff, "diff", false, "print the change, as a unified diff, instead of the new manifest")
	return cmd
}

func readManifest(file string, stdin io.Reader) ([]byte, error) {
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
	return manifest, nil
}

func migrateManifest(cmd *cobra.Command, name, file string, manifest []byte, diff bool, o migrate.Options) error {
	result, err := migrate.Run(manifest, o)
	for _, n := range result.Notes {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", name, n)
	}
	if err != nil {
		return fmt.Errorf("migrating %s: %w", file, err)
	}
	out := string(result.Manifest)
	if diff {
		out = migrate.Diff(file, file+" (migrated)", string(manifest), out)
	}
	if _, err = io.WriteString(cmd.OutOrStdout(), out); err == nil && result.Rejected {
		err = &exitError{fmt.Errorf("migrating %s: the result does not start as it is; mend what the notes above say", file), exitMend}
	}
	return err
}

// oneFile is a flag that may be given once: of several manifests all but the last would be
// left out.
type oneFile struct{ name *string }

func (f oneFile) String() string { return *f.name }
func (f oneFile) Type() string   { return "string" }

func (f oneFile) Set(name string) error {
	if *f.name != "" {
		return fmt.Errorf("one manifest at a time, and %s is there already: run the command for each", *f.name)
	}
	*f.name = name
	return nil
}

// flagTables tells the migration what this program understands.
func flagTables(root *cobra.Command) migrate.Tables {
	t := migrate.Tables{
		Commands: map[string][]migrate.Flag{},
		Gates:    slices.Sorted(maps.Keys(knownGates)),
		Accept:   func(args []string) error { return acceptable(args) },
	}
	for _, cmd := range root.Commands() {
		if !slices.Contains([]string{"all", "provision", "attach", "nodecontroller"}, cmd.Name()) {
			continue
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			t.Commands[cmd.Name()] = append(t.Commands[cmd.Name()], migrate.Flag{Name: f.Name, Default: f.DefValue, Bare: f.NoOptDefVal != ""})
		})
	}
	for _, options := range allRoleOptions(true) {
		r := migrate.Role{Name: options.section}
		for _, o := range options.options {
			r.Options = append(r.Options, o.name)
		}
		t.Roles = append(t.Roles, r)
	}
	return t
}

// acceptable parses args, which begin with a subcommand, as the program does.
func acceptable(args []string) error {
	root := newRoot("storage-controller")
	cmd, rest, err := root.Find(arguments(root, "storage-controller", args))
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	return cmd.ValidateArgs(cmd.Flags().Args())
}
