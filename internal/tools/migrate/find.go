package migrate

import (
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// kind is what a container runs.
type kind string

// The kinds that can be replaced, and what becomes of each.
const (
	csiProvisioner kind = "csi-provisioner"
	csiAttacher    kind = "csi-attacher"
	topolvm        kind = "topolvm-controller"
)

var kinds = []kind{csiProvisioner, csiAttacher, topolvm}

// commands are the subcommands that have the flags of each kind.
var commands = map[kind]string{csiProvisioner: "provision", csiAttacher: "attach", topolvm: "nodecontroller"}

// source is a container that is to be replaced.
type source struct {
	kind  kind
	index int        // in its list
	name  string     // of the container
	node  *yaml.Node // without anchors
	flags []given
	roles []string
	env   map[string]string // values that the manifest tells
}

// kindOf is what a container runs, "" for anything that stays as it is.
func kindOf(c *yaml.Node) kind {
	argv := argumentsOf(c)
	if isOurs(c, argv) {
		return ""
	}
	if command := items(get(c, "command")); len(command) > 0 {
		return kindOfProgram(path.Base(text(command[0])))
	}
	var args []string
	for _, arg := range argv {
		args = append(args, text(arg))
	}
	return kind(Sidecar(text(get(c, "name")), text(get(c, "image")), args))
}

// Sidecar is the program that a container without a command of its own runs, by its name, image and
// arguments: csi-provisioner, csi-attacher or topolvm-controller; "" for anything else.
func Sidecar(name, image string, args []string) string {
	return string(sidecarOf(name, imageName(image), args))
}

func sidecarOf(name, image string, args []string) kind {
	if k := kindOfProgram(image); k != "" {
		return k
	}
	// A mirror may have put something in front of the name, or hidden it: then the
	// socket has to be there too, lest a driver with such a name be taken for a sidecar.
	if !slices.ContainsFunc(args, isCSIAddress) {
		return ""
	}
	for _, hint := range []string{image, name} {
		switch {
		case strings.HasSuffix(hint, "-csi-provisioner"), strings.HasSuffix(hint, "csi-external-provisioner"), hint == string(csiProvisioner):
			return csiProvisioner
		case strings.HasSuffix(hint, "-csi-attacher"), strings.HasSuffix(hint, "csi-external-attacher"), hint == string(csiAttacher):
			return csiAttacher
		}
	}
	return ""
}

func kindOfProgram(name string) kind {
	switch name {
	case "csi-provisioner", "external-provisioner":
		return csiProvisioner
	case "csi-attacher", "external-attacher":
		return csiAttacher
	case "topolvm-controller":
		return topolvm
	}
	return ""
}

// imageName is the last part of an image without tag and digest.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	image, _, _ = strings.Cut(path.Base(image), ":")
	return image
}

func isCSIAddress(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return name == "csi-address" || name == "csi_address"
}

// argumentsOf are the arguments of the program of a container.
func argumentsOf(c *yaml.Node) []*yaml.Node {
	var argv []*yaml.Node
	if command := items(get(c, "command")); len(command) > 0 {
		argv = append(argv, command[1:]...)
	}
	return append(argv, items(get(c, "args"))...)
}

// subcommands of this program.
var subcommands = []string{"all", "provision", "attach", "capacity", "nodecontroller"}

// isOurs tells whether a container runs this program already.
func isOurs(c *yaml.Node, argv []*yaml.Node) bool {
	if imageName(text(get(c, "image"))) == "storage-controller" {
		return true
	}
	command := items(get(c, "command"))
	if len(command) > 0 && path.Base(text(command[0])) != "storage-controller" {
		return false
	}
	return len(argv) > 0 && slices.Contains(subcommands, text(argv[0]))
}

// runsNodecontroller tells whether one of containers does already what topolvm-controller did.
func runsNodecontroller(containers []*yaml.Node) bool {
	return slices.ContainsFunc(containers, func(c *yaml.Node) bool {
		argv := argumentsOf(c)
		if !isOurs(c, argv) || len(argv) == 0 {
			return false
		}
		return text(argv[0]) == "nodecontroller" || slices.ContainsFunc(argv, func(arg *yaml.Node) bool {
			roles, found := strings.CutPrefix(text(arg), "--controllers=")
			return found && slices.Contains(strings.Split(roles, ","), "nodecontroller")
		})
	})
}

// wrapper is the name of a sidecar that a shell starts, "" for none. Nobody can tell
// what else the script does, so that it stays.
func wrapper(c *yaml.Node) string {
	command := items(get(c, "command"))
	if len(command) == 0 || !slices.Contains([]string{"sh", "bash", "ash"}, path.Base(text(command[0]))) {
		return ""
	}
	if k := kindOfProgram(imageName(text(get(c, "image")))); k != "" {
		return string(k)
	}
	for _, arg := range argumentsOf(c) {
		for _, k := range kinds {
			if strings.Contains(text(arg), string(k)) {
				return string(k)
			}
		}
	}
	return ""
}

// environment is what of the variables of a container has its value in the manifest;
// of the others, what they stand for.
func environment(c *yaml.Node) map[string]string {
	env := map[string]string{}
	for _, e := range items(get(c, "env")) {
		name := text(get(e, "name"))
		switch field := text(get(e, "valueFrom", "fieldRef", "fieldPath")); {
		case get(e, "value") != nil:
			env[name] = expand(text(get(e, "value")), env)
		case field != "":
			env[name] = "$(" + field + ")"
		}
	}
	return env
}

// expand puts in values for $(NAME), as the kubelet does; what it does not know stays.
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(s, "$")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		s = rest
		switch {
		case strings.HasPrefix(rest, "$"):
			b.WriteString("$")
			s = rest[1:]
		case strings.HasPrefix(rest, "("):
			name, after, closed := strings.Cut(rest[1:], ")")
			value, known := env[name]
			if !closed || !known {
				b.WriteString("$")
				continue
			}
			b.WriteString(value)
			s = after
		default:
			b.WriteString("$")
		}
	}
}
