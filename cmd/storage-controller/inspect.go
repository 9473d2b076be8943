// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// roleCommands returns the roles of each command that a container may run with the program under a name. Those of topolvm also
// depend on the environment.
func roleCommands(name string) map[string]app.Selection {
	return map[string]app.Selection{
		"all": app.All, "provision": app.Provision, "attach": app.Attach, "resize": app.Resize, "snapshot": app.Snapshot,
		"capacity": app.Capacity, "nodecontroller": app.Nodecontroller, "topolvm": app.Topolvm(name == topolvmController),
	}
}

// commandLine is the command line of a process that doctor inspects.
type commandLine struct {
	source string // where it was found
	roles  app.Selection
	use    string // the name of the command
	flags  *pflag.FlagSet
	driver string // --driver-name of doctor; "": unknown
}

// check returns a check of the source of l.
func (l *commandLine) check() finding.Finding {
	return finding.New(finding.OK, processCheck, "the flags are those of "+l.source+", which runs "+l.use, "")
}

// findCommand returns the command of argv that runs roles and its arguments, or nil if argv runs none.
func findCommand(argv []string) (cmd *cobra.Command, name string, rest []string) {
	if len(argv) == 0 {
		return nil, "", nil
	}
	name = filepath.Base(argv[0])
	if _, sidecar := aliases[name]; name != programName && !sidecar {
		return nil, "", nil
	}
	root := newRoot(name)
	cmd, rest, err := root.Find(arguments(root, name, argv[1:]))
	if err != nil || cmd.Parent() != root {
		return nil, "", nil
	}
	if _, runsRoles := roleCommands(name)[cmd.Name()]; !runsRoles {
		return nil, "", nil
	}
	return cmd, name, rest
}

// parseCommandLine parses argv as the program does. It returns nil if argv is not a command that runs roles.
func parseCommandLine(source string, argv []string) (*commandLine, error) {
	cmd, name, rest := findCommand(argv)
	if cmd == nil {
		return nil, nil
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return nil, &usageError{fmt.Errorf("flags of %s: %w", source, err)}
	}
	return &commandLine{source: source, roles: roleCommands(name)[cmd.Name()], use: cmd.Name(), flags: cmd.Flags()}, nil
}

// override sets the flags of l that were given to cmd, and those of logging, which doctor does not take from the process.
func (l *commandLine) override(cmd *cobra.Command, own []string) error {
	var errs []error
	settings.NewFlags(new(settings.Logging).AddFlags).VisitAll(func(f *pflag.Flag) {
		errs = append(errs, l.flags.Set(f.Name, cmd.Flags().Lookup(f.Name).Value.String()))
	})
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if slices.Contains(own, f.Name) {
			return
		}
		if f.Name == "driver-name" { // it is that of doctor, which does not reach the driver
			l.driver = f.Value.String()
			return
		}
		target := l.flags.Lookup(f.Name)
		if target == nil {
			errs = append(errs, &usageError{fmt.Errorf("--%s: %s runs %q, which has no such flag", f.Name, l.source, l.use)})
			return
		}
		value := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = strings.Join(list.GetSlice(), ",")
		}
		errs = append(errs, l.flags.Set(f.Name, value))
	})
	return errors.Join(errs...)
}

// containerProcess returns the command line of the first process of the container, nil if it does not run roles.
// proc is the directory of the proc file system.
func containerProcess(proc string) (*commandLine, error) {
	data, err := os.ReadFile(filepath.Join(proc, "1", "cmdline"))
	if err != nil {
		return nil, nil // another operating system, or no permission
	}
	return parseCommandLine("process 1", strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00"))
}
