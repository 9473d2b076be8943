// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
)

// programName is the name under which the program runs no subcommand of its own accord.
const programName = "storage-controller"

// topolvmController is the name of the program that the command topolvm replaces.
const topolvmController = "topolvm-controller"

// aliases maps the programs that this one replaces to subcommands: under such a name it runs the subcommand.
var aliases = map[string]string{
	"csi-provisioner": "provision",
	"csi-attacher":    "attach",
	"csi-resizer":     "resize",
	"csi-snapshotter": "snapshot",
	"livenessprobe":   "livenessprobe",
	topolvmController: "topolvm",

	// kubectl finds these as plugins: "kubectl storage-explain".
	"kubectl-storage_audit":   "audit",
	"kubectl-storage_doctor":  "doctor",
	"kubectl-storage_explain": "explain",
	"kubectl-storage_migrate": "migrate",
}

func newRoot(name string) *cobra.Command {
	root := &cobra.Command{
		Use:   programName,
		Short: "Run the controller-side sidecars of a CSI driver in one process",
		Long: `Runs the controller-side sidecars of a CSI driver in one process: provisions and
deletes volumes, attaches and detaches them, expands and modifies them, creates snapshots,
publishes storage capacity, and cleans up after deleted nodes.

Run "all" for every role that the driver supports in one process, or one subcommand
per container. Under the name csi-provisioner, csi-attacher, csi-resizer, csi-snapshotter
or livenessprobe (a link to this program) it runs "provision", "attach", "resize",
"snapshot" or "livenessprobe".

A flag takes precedence over the environment (STORAGE_CONTROLLER_ and the name of the
flag in capitals, with underscores), the environment over the file of --config, and the
file over the default.`,
		Version:       buildVersion(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return &usageError{fmt.Errorf("unknown command %q", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return &usageError{errors.New("a subcommand is required")}
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{withHint(cmd.Name(), err)}
	})
	root.AddCommand(
		newRoleCommand("provision", name, "Provision and delete volumes (replaces csi-provisioner)", app.Provision),
		newRoleCommand("attach", name, "Attach and detach volumes (replaces csi-attacher)", app.Attach),
		newRoleCommand("resize", name, "Expand and modify volumes (replaces csi-resizer)", app.Resize),
		newRoleCommand("capacity", name, "Publish CSIStorageCapacity objects (replaces csi-provisioner --enable-capacity)", app.Capacity),
		newRoleCommand("snapshot", name, "Create and delete snapshots (replaces csi-snapshotter)", app.Snapshot),
		newNodecontrollerCommand(name),
		newRoleCommand("topolvm", name, "Run the controller pod of TopoLVM in one process, with its CSI service",
			app.Topolvm(name == topolvmController)),
		newLivenessprobeCommand(name),
		newRoleCommand("all", name, "Run every role that the driver supports in one process", app.All),
		newConfigCommand(),
		newExplainCommand(),
		newDoctorCommand(),
		newAuditCommand(),
		newMigrateCommand(name),
		newVersionCommand(name),
	)
	finishCommands(root)
	return root
}

// withHint adds a hint to the error about a flag that command does not have: it was removed, or is one of another program.
func withHint(command string, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return err
	}
	name := unknown.GetSpecifiedName()
	if letters := unknown.GetSpecifiedShortnames(); letters != "" { // a long flag with one dash
		name, _, _ = strings.Cut(letters, "=")
	}
	name = string(settings.NormalizeFlag(nil, name))
	if instead := settings.Replacement(name); instead != "" {
		return fmt.Errorf("flag --%s was removed: %s", name, instead)
	}
	switch {
	case command == "topolvm" && (name == "csi-address" || name == "exit-on-connection-loss"):
		return fmt.Errorf("%w: this command serves the driver itself, at --csi-socket. Remove the flag", err)
	case strings.HasPrefix(name, "minimum-allocation-"):
		return fmt.Errorf("%w: it is a flag of the driver, and of the command topolvm. Set it there", err)
	case strings.HasPrefix(name, "zap-"):
		return fmt.Errorf("%w: it is a flag of the driver. Set --v and --logging-format for the logs of this program", err)
	}
	return err
}

// noArguments refuses arguments of a command.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

// strayArguments returns a check of the arguments of a command. Under the name of a sidecar they are ignored, as the
// sidecars do: Helm charts leave empty strings and values of boolean flags behind.
func strayArguments(name string) cobra.PositionalArgs {
	if _, ok := aliases[name]; !ok {
		return noArguments
	}
	return func(cmd *cobra.Command, args []string) error {
		for _, arg := range args {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: argument %q ignored: it is not a flag\n", name, arg)
		}
		return nil
	}
}

// arguments returns args as cobra takes them: with the subcommand of an alias in front, with two dashes before long flags, and with
// sections as flags.
func arguments(root *cobra.Command, name string, args []string) []string {
	if sub, ok := aliases[name]; ok {
		args = append([]string{sub}, args...)
	}
	cmd, _, err := root.Find(args)
	if err != nil {
		return args
	}
	cmd.InitDefaultHelpFlag() // cobra adds it only when the command runs
	args = settings.LongFlags(cmd.Flags(), args)
	if cmd.Name() == "doctor" { // a command follows its --
		return args
	}
	if image := app.HelpOfSection(args); image != "" {
		return []string{cmp.Or(aliases[image], image), "--help"}
	}
	return app.WithSections(cmd.Flags(), args)
}
