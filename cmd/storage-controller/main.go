// Command storage-controller stands beside the controller of a CSI driver and
// does what takes a sidecar container each today. See docs/architecture.md.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// version is set when a release is built: -ldflags "-X main.version=v1.2.3".
var version = "dev"

// Exit codes: a usage error is told apart from everything else that can go wrong.
const (
	exitFailure = 1
	exitUsage   = 2
	exitRefused = 3 // of a command that may not do what it was asked for
	exitMend    = 3 // of migrate, when its result does not start as it is
)

func main() {
	os.Exit(run(os.Args))
}

// run is main without the end of the process, and returns its exit code.
func run(argv []string) int {
	name := filepath.Base(argv[0])
	root := newRoot(name)
	root.SetArgs(arguments(root, name, argv[1:]))
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	var usage *usageError
	if errors.As(err, &usage) {
		hint := ""
		if usage.text != "" {
			hint = "; " + seeHelp(cmd, name) // the usage itself, a hundred flags, would hide what is wrong
		}
		fmt.Fprintf(os.Stderr, "%s: %v%s\n", name, err, hint)
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	return exitFailure
}

// exitError is an error with an exit code of its own.
type exitError struct {
	err  error
	code int
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }
