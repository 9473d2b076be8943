// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"go.yaml.in/yaml/v3"
)

// ErrNothing means that no container of the manifest can be replaced.
var ErrNothing = errors.New("nothing to replace: no Deployment, StatefulSet or DaemonSet has a container " +
	"that runs csi-provisioner, csi-attacher, csi-resizer, csi-snapshotter or topolvm-controller")

// Options are the settings of a migration.
type Options struct {
	// Image is the image of the new containers.
	Image string
	// PerRole creates one container for each sidecar, instead of one for all.
	PerRole bool
	// Nodecontroller adds the role nodecontroller beside topolvm-controller.
	Nodecontroller bool
	// Patched replaces also sidecars whose image tag has the suffix of a vendor.
	Patched bool
	Tables  Tables
}

// Tables describe the command line of the program.
type Tables struct {
	// Commands holds the flags of each subcommand by its name. "all" is required. A sidecar
	// whose subcommand is missing is not replaced.
	Commands map[string][]Flag
	// Roles are the roles of "all", in the order of --controllers.
	Roles []Role
	// Gates are the known feature gates.
	Gates []string
	// Accept parses a command line that begins with a subcommand, as the program does.
	Accept func(args []string) error
}

// Flag is one flag of a subcommand.
type Flag struct {
	Name    string
	Default string
	// Bare reports whether the flag may have no value.
	Bare bool
}

// Role is a role of "all".
type Role struct {
	Name    string   // in --controllers, and the prefix of flags for this role alone
	Options []string // its flags, without the prefix
}

// Note is a remark for the reader of the result.
type Note struct {
	Object    string // kind and name; empty for the manifest as a whole
	Container string // in the result; empty for the object as a whole
	Text      string
}

func (n Note) String() string {
	switch {
	case n.Object == "":
		return n.Text
	case n.Container == "":
		return n.Object + ": " + n.Text
	}
	return fmt.Sprintf("%s, container %s: %s", n.Object, n.Container, n.Text)
}

// Result is a rewritten manifest.
type Result struct {
	Manifest []byte
	Notes    []Note
	// Commands are the command lines of the new containers, in order. References to
	// environment variables are expanded if the manifest has their values.
	Commands [][]string
	// Rejected reports whether the program or the API server rejects the manifest until the
	// problems listed in the notes are fixed, or a sidecar was kept because it is not the known program.
	Rejected bool
}

// Run rewrites manifest. If nothing can be replaced it returns [ErrNothing] and the notes.
func Run(manifest []byte, o Options) (Result, error) {
	m := &migration{Options: o, named: map[*yaml.Node][]string{}, workloads: map[kind][]string{}}
	text, err := m.documents(string(manifest))
	m.noteSeparateWorkloads()
	result := Result{Manifest: []byte(text), Notes: m.notes, Commands: m.commands, Rejected: m.rejected}
	if err == nil && len(m.commands) == 0 {
		err = ErrNothing
	}
	return result, err
}

// Diff returns the change from a to b as a unified diff, "" if they are equal.
func Diff(nameA, nameB, a, b string) string {
	_, hunks, _ := strings.Cut(string(diff.Diff(nameA, []byte(a), nameB, []byte(b))), "\n") // without the line "diff A B"
	return hunks
}

// migration is the state of one [Run].
type migration struct {
	Options
	notes    []Note
	commands [][]string
	rejected bool
	// named holds the names of the new containers of a pod, init containers included.
	named map[*yaml.Node][]string
	// workloads names the objects with a replaced sidecar, by kind of sidecar.
	workloads map[kind][]string
}

func (m *migration) note(object, container, format string, args ...any) {
	n := Note{Object: object, Container: container, Text: fmt.Sprintf(format, args...)}
	if !slices.Contains(m.notes, n) {
		m.notes = append(m.notes, n)
	}
}

// noteSeparateWorkloads notes that sidecars of several objects could run in one process.
func (m *migration) noteSeparateWorkloads() {
	var objects []string
	for _, k := range kinds {
		for _, o := range m.workloads[k] {
			if !slices.Contains(objects, o) {
				objects = append(objects, o)
			}
		}
	}
	if len(objects) > 1 && len(m.workloads) > 1 {
		m.note("", "", "%s still run separate processes. If they serve the same driver, one of them can run all roles (--controllers)",
			enumerate(objects))
	}
}
