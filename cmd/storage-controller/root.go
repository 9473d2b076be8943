package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// usageError is a mistake in the command line itself.
type usageError struct {
	err  error
	text string // the usage of the command; empty where a look at its help would not help
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// aliases are the names of programs that this one replaces: under such a name
// it behaves as the subcommand, so that a manifest needs only another image.
var aliases = map[string]string{
	"csi-provisioner": "provision",
	"csi-attacher":    "attach",
}

func newRoot(name string) *cobra.Command {
	root := &cobra.Command{
		Use:   "storage-controller",
		Short: "One controller beside a CSI driver, instead of a sidecar for each task",
		Long: `storage-controller does for a CSI driver what takes a sidecar container each
otherwise: it provisions volumes for claims, attaches them to nodes, tells the scheduler
where there is room for more, and looks after volumes that live on one node when that goes.

Run "all" for everything that the driver supports in one process, or one
subcommand per container. Called as csi-provisioner or csi-attacher (a link to
this program) it behaves as "provision" or "attach".

A flag beats the environment (STORAGE_CONTROLLER_ and the name of the flag in
capitals, with underscores), which beats the file of --config, which beats the
default.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return &usageError{fmt.Errorf("unknown command %q", args[0]), cmd.UsageString()}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return &usageError{fmt.Errorf("a subcommand is needed"), cmd.UsageString()}
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{withHint(err), cmd.UsageString()}
	})
	root.AddCommand(
		newRoleCommand("provision", name, false, provisionerRole, capacityRole),
		newRoleCommand("attach", name, false, attacherRole),
		newRoleCommand("capacity", name, false, capacityAlone),
		newNodecontrollerCommand(name),
		newRoleCommand("all", name, true, allRoles()...),
		newConfigCommand(),
		newExplainCommand(),
		newDoctorCommand(),
		newAuditCommand(),
		newMigrateCommand(name),
		newVersionCommand(name),
	)
	complete(root)
	return root
}

// withHint says of a flag of TopoLVM's controller what became of it.
func withHint(err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return err
	}
	name := unknown.GetSpecifiedName()
	if letters := unknown.GetSpecifiedShortnames(); letters != "" { // a long flag with one dash
		name, _, _ = strings.Cut(letters, "=")
	}
	switch name = string(dashes(nil, name)); {
	case strings.HasPrefix(name, "minimum-allocation-"):
		return fmt.Errorf("%w: it belongs to the driver, set it there", err)
	case strings.HasPrefix(name, "zap-"):
		return fmt.Errorf("%w: it belongs to the driver; the logs of this program are set by --v and --logging-format", err)
	}
	return err
}

func newVersionCommand(name string) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArguments,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), name, buildVersion())
		},
	}
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("unexpected argument %q", args[0]), cmd.UsageString()}
	}
	return nil
}

// arguments puts the subcommand that name stands for in front of args, and
// writes long flags with one dash, as Go programs take them, with two.
func arguments(root *cobra.Command, name string, args []string) []string {
	if sub, ok := aliases[name]; ok {
		args = append([]string{sub}, args...)
	}
	cmd, _, err := root.Find(args)
	if err != nil {
		return args
	}
	cmd.InitDefaultHelpFlag() // which is a flag like the others only when the command runs
	out := slices.Clone(args)
	for i, arg := range out {
		if arg == "--" {
			break
		}
		if !strings.HasPrefix(arg, "-") || strings.HasPrefix(arg, "--") {
			continue
		}
		long, _, _ := strings.Cut(arg[1:], "=")
		if len(long) > 1 && cmd.Flags().Lookup(long) != nil {
			out[i] = "-" + arg
		}
	}
	return out
}

// dashes lets a flag be spelled with underscores, as old manifests do.
func dashes(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}
