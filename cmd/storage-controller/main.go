// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Command storage-controller runs the controller-side sidecars of a CSI driver in one process. See docs/architecture.md.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/app"
)

// version is set when a release is built: -ldflags "-X main.version=v1.2.3".
var version = "dev"

// The exit codes.
const (
	exitFailure  = 1
	exitUsage    = 2
	exitFindings = 3 // a command has findings, or refuses what was requested
)

// terminationLog is the file from which the kubelet reads the termination message of a container.
var terminationLog = "/dev/termination-log"

func main() {
	os.Exit(run(os.Args))
}

// run runs the command of argv and returns the exit code.
func run(argv []string) int {
	name := strings.TrimSuffix(filepath.Base(argv[0]), ".exe")
	root := newRoot(name)
	root.SetArgs(arguments(root, name, argv[1:]))
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	if isProcess(cmd) {
		app.WriteTerminationMessage(terminationLog, err)
	}
	var usage *usageError
	if errors.As(err, &usage) { // the usage text with its hundred flags would hide the error
		fmt.Fprintf(os.Stderr, "%s: %v; %s\n", name, err, seeHelp(cmd, name))
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	var settings *app.UsageError
	if errors.As(err, &settings) {
		return exitUsage
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	return exitFailure
}

// isProcess reports whether a container runs cmd as its process. A person may run the other commands in the same container.
func isProcess(cmd *cobra.Command) bool {
	_, runsRoles := roleCommands("")[cmd.Name()]
	return cmd.Parent() == cmd.Root() && (runsRoles || cmd.Name() == "livenessprobe")
}

// usageError is an error in the command line, for which the help of the command is useful.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// exitError is an error with an exit code of its own.
type exitError struct {
	err  error
	code int
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }
