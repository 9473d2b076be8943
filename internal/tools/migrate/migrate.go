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
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/rbac"
)

// ErrNothing means that no container of the manifest can be replaced.
var ErrNothing = errors.New("nothing to replace: no Deployment, StatefulSet or DaemonSet has a container " +
	"that runs csi-provisioner, csi-attacher, csi-resizer, csi-snapshotter or topolvm-controller")

// errKept is [ErrNothing] with the reason that the sidecars were kept.
var errKept = keptError{}

type keptError struct{}

func (keptError) Error() string {
	return "nothing was replaced: see the notes about the containers that were kept"
}
func (keptError) Is(target error) bool { return target == ErrNothing }

// Options are the settings of a migration.
type Options struct {
	// Image is the image of the new containers.
	Image string
	// PerRole creates one container for each sidecar, instead of one for all.
	PerRole bool
	// Patched replaces also sidecars whose image tag has the suffix of a vendor.
	Patched bool
	// Placeholder reports that Image cannot be pulled from a registry.
	Placeholder bool
	Tables      Tables
}

// Tables describe the command line of the program.
type Tables struct {
	// Flags holds the flags of each section of "all", by its name, and those of "topolvm".
	Flags map[string]map[string]Flag
	// Gates are the known feature gates.
	Gates []string
	// Accept validates a command line that begins with a subcommand, as the program does. variables are the names
	// of the environment variables of its container.
	Accept func(args, variables []string) error
	// Grants returns the permissions that a command line needs for a driver, in a pod of namespace.
	Grants func(args []string, driver Driver, namespace string) []rbac.Grant
}

// Flag describes a flag.
type Flag struct {
	// Bare reports whether the flag may have no value.
	Bare bool
	// Today is the flag that replaces one of an older release, "" if the flag is not replaced.
	Today string
}

// Result is a rewritten manifest.
type Result struct {
	Manifest []byte
	Notes    []Note
	// Replacements are the new containers, in order.
	Replacements []Replacement
	// Permissions are the missing permissions of the ServiceAccounts, as manifests.
	Permissions []byte
	// Commands are the command lines of the new containers, in order. References to
	// environment variables are expanded if the manifest has their values.
	Commands [][]string
}

// Incomplete reports whether you must do what a note says before the rollout.
func (r Result) Incomplete() bool {
	return slices.ContainsFunc(r.Notes, func(n Note) bool { return n.Level == Required })
}

// Run rewrites manifest. If nothing can be replaced it returns [ErrNothing] and the notes.
func Run(manifest []byte, o Options) (Result, error) {
	m := &migration{Options: o, named: map[*yaml.Node][]string{}, workloads: map[kind][]string{},
		lacks: map[types.NamespacedName][]rbac.Access{}}
	if err := m.readObjects(string(manifest)); err != nil {
		return Result{Manifest: manifest}, err
	}
	text, err := m.documents(string(manifest))
	m.noteSeparateWorkloads()
	if o.Placeholder && len(m.commands) > 0 {
		m.note(Required, "", "", "%s is an image without a registry. Set --image to the image that your nodes pull", o.Image)
	}
	result := Result{
		Manifest: []byte(text), Notes: m.notes, Replacements: m.replacements, Permissions: []byte(m.missingPermissions()),
		Commands: m.commands,
	}
	if err == nil && len(m.commands) == 0 {
		err = ErrNothing
		if result.Incomplete() {
			err = errKept
		}
		if strings.Contains(string(manifest), "{{") {
			err = fmt.Errorf("%w. The input looks like a template: render it, for example with helm template, and migrate the "+
				"output", err)
		}
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
	notes        []Note
	replacements []Replacement
	commands     [][]string
	// lacks has the permissions that ServiceAccounts lack.
	lacks map[types.NamespacedName][]rbac.Access
	// objects are those of the input, by kind.
	objects map[string][]*yaml.Node
	// named holds the names of the new containers of a pod, init containers included.
	named map[*yaml.Node][]string
	// workloads names the objects with a replaced sidecar, by kind of sidecar.
	workloads map[kind][]string
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
		m.note(Information, "", "", "%s still run separate processes. If they serve the same driver, one of them can have the sections "+
			"of all", enumerate(objects))
	}
}
