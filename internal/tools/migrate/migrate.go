package migrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ErrNothing means that no container of the manifest can be replaced.
var ErrNothing = errors.New("nothing to replace: no Deployment, StatefulSet or DaemonSet in it has a container that runs csi-provisioner, csi-attacher or topolvm-controller")

// Options say what the result is to look like.
type Options struct {
	// Image is that of the new containers.
	Image string
	// PerRole makes one container for each that is replaced, instead of one for all.
	PerRole bool
	Tables  Tables
}

// Tables describe the command line of the program.
type Tables struct {
	// Commands are the flags of each subcommand by its name. "all" must be there; of the
	// others, those that are missing replace nothing.
	Commands map[string][]Flag
	// Roles are those of "all", in the order in which --controllers is to name them.
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
	// Bare tells that the flag may stand without a value.
	Bare bool
}

// Role is a part of "all".
type Role struct {
	Name    string   // in --controllers, and the prefix of flags for this role alone
	Options []string // its flags, without the prefix
}

// Note explains something that the reader of the result should know.
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
	// Commands are the command lines of the new containers, in order, with references
	// to environment variables resolved as far as the manifest tells their values.
	Commands [][]string
	// Rejected tells that the program, or the API server, does not take the manifest before
	// somebody has mended what the notes say.
	Rejected bool
}

// Run rewrites manifest. It returns [ErrNothing], and the notes that it has, where
// nothing can be replaced.
func Run(manifest []byte, o Options) (Result, error) {
	m := &migration{Options: o, named: map[*yaml.Node][]string{}}
	text, err := m.documents(string(manifest))
	m.separate()
	result := Result{Manifest: []byte(text), Notes: m.notes, Commands: m.commands, Rejected: m.rejected}
	if err == nil && len(m.commands) == 0 {
		err = ErrNothing
	}
	return result, err
}

// migration is one run.
type migration struct {
	Options
	notes    []Note
	commands [][]string
	rejected bool
	// named are the new containers of a pod, in both of its lists.
	named map[*yaml.Node][]string
	// workloads names the objects in which something was replaced, by kind of sidecar.
	workloads map[kind][]string
}

func (m *migration) note(object, container, format string, args ...any) {
	n := Note{Object: object, Container: container, Text: fmt.Sprintf(format, args...)}
	if !slices.Contains(m.notes, n) {
		m.notes = append(m.notes, n)
	}
}

// separate says that sidecars of several objects could be one process.
func (m *migration) separate() {
	var objects []string
	for _, k := range kinds {
		for _, o := range m.workloads[k] {
			if !slices.Contains(objects, o) {
				objects = append(objects, o)
			}
		}
	}
	if len(objects) > 1 && len(m.workloads) > 1 {
		m.note("", "", "%s: each runs its own process, as before. Where they serve the same driver, one of them with all the roles in --controllers could do the work of all", strings.Join(objects, ", "))
	}
}
