// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// kind is the program that a container runs.
type kind string

// The programs that can be replaced.
const (
	csiProvisioner kind = "csi-provisioner"
	csiAttacher    kind = "csi-attacher"
	csiResizer     kind = "csi-resizer"
	csiSnapshotter kind = "csi-snapshotter"
	topolvm        kind = "topolvm-controller"
	livenessprobe  kind = "livenessprobe"
)

var kinds = []kind{csiProvisioner, csiAttacher, csiResizer, csiSnapshotter, topolvm}

// source is a container to be replaced.
type source struct {
	kind  kind
	index int        // in its list
	name  string     // of the container
	node  *yaml.Node // without anchors
	flags []setting
	env   map[string]string // the variables with a value in the manifest

	differing map[string]string // the values, as in the manifest, of variables that have another value in the new container
	mount     *yaml.Node        // that contains the socket, nil for none
	moved     string            // path of the socket in the new container, "" if it is the same
	appended  []setting         // flags that the manifest does not have
	literals  []FlagChange
}

// kindOf returns the program of a container, "" for a container to keep.
func kindOf(c *yaml.Node) kind {
	argv := argumentsOf(c)
	if runsStorageController(c, argv) {
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

// Sidecar returns the program of a container without a command, from its name, image and
// arguments: the program of a sidecar, topolvm-controller, livenessprobe, or "" for any other.
func Sidecar(name, image string, args []string) string {
	image = ImageName(image)
	if k := kindOfProgram(image); k != "" {
		return string(k)
	}
	// A mirror may have prefixed or replaced the image name. Then --csi-address is required, so
	// that a driver with a similar name is not mistaken for a sidecar.
	if !slices.ContainsFunc(args, isCSIAddress) {
		return ""
	}
	for _, hint := range []string{image, name} {
		for _, k := range []kind{csiProvisioner, csiAttacher, csiResizer, csiSnapshotter} {
			external := strings.Replace(string(k), "csi-", "csi-external-", 1)
			if hint == string(k) || strings.HasSuffix(hint, "-"+string(k)) || strings.HasSuffix(hint, external) {
				return string(k)
			}
		}
	}
	return ""
}

// looksLikeSidecar reports whether a container of unknown kind has an argument and a name like those of a sidecar.
func looksLikeSidecar(c *yaml.Node) bool {
	argv := argumentsOf(c)
	if runsStorageController(c, argv) || !slices.ContainsFunc(argv, func(arg *yaml.Node) bool { return isCSIAddress(text(arg)) }) {
		return false
	}
	names := text(get(c, "name")) + " " + ImageName(text(get(c, "image")))
	return slices.ContainsFunc([]string{"provisioner", "attacher", "resizer", "snapshotter"},
		func(word string) bool { return strings.Contains(names, word) })
}

// vendorSuffix matches what vendors add to the name of a sidecar's image.
var vendorSuffix = regexp.MustCompile(`(-rhel[0-9]+|-fips)$`)

func kindOfProgram(name string) kind {
	name = vendorSuffix.ReplaceAllString(strings.TrimPrefix(strings.TrimPrefix(name, "ose-"), "kubernetes-"), "")
	switch name {
	case "csi-provisioner", "external-provisioner", "csi-external-provisioner":
		return csiProvisioner
	case "csi-attacher", "external-attacher", "csi-external-attacher":
		return csiAttacher
	case "csi-resizer", "external-resizer", "csi-external-resizer":
		return csiResizer
	case "csi-snapshotter", "external-snapshotter", "csi-external-snapshotter":
		return csiSnapshotter
	case "topolvm-controller":
		return topolvm
	case "livenessprobe", "csi-livenessprobe":
		return livenessprobe
	}
	return ""
}

// ImageName returns the last path element of an image reference, without tag and digest.
func ImageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	image, _, _ = strings.Cut(path.Base(image), ":")
	return image
}

func isCSIAddress(arg string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return name == "csi-address" || name == "csi_address"
}

// argumentsOf returns the arguments of the program of a container, from command and args.
func argumentsOf(c *yaml.Node) []*yaml.Node {
	argv := items(get(c, "command"))
	if len(argv) > 0 {
		argv = argv[1:]
	}
	return slices.Concat(argv, items(get(c, "args")))
}

var subcommands = []string{"all", "provision", "attach", "capacity", "resize", "snapshot", "nodecontroller", "topolvm",
	string(livenessprobe)}

// runsStorageController reports whether a container runs this program already.
func runsStorageController(c *yaml.Node, argv []*yaml.Node) bool {
	if ImageName(text(get(c, "image"))) == "storage-controller" {
		return true
	}
	command := items(get(c, "command"))
	if len(command) > 0 && path.Base(text(command[0])) != "storage-controller" {
		return false
	}
	return len(argv) > 0 && slices.Contains(subcommands, text(argv[0]))
}

// wrapped returns the sidecar that another program in command starts, such as a shell or tini, or "". Such a container is
// kept, because that program may do more.
func wrapped(c *yaml.Node) (sidecar kind, wrapper string) {
	command := items(get(c, "command"))
	if len(command) == 0 || kindOf(c) != "" || runsStorageController(c, argumentsOf(c)) {
		return "", ""
	}
	wrapper = path.Base(text(command[0]))
	for _, arg := range argumentsOf(c) {
		if k := kindOfProgram(path.Base(text(arg))); k != "" && !strings.HasPrefix(text(arg), "-") {
			return k, wrapper
		}
	}
	if !slices.Contains([]string{"sh", "bash", "ash"}, wrapper) {
		return "", ""
	}
	if k := kindOfProgram(ImageName(text(get(c, "image")))); k != "" {
		return k, wrapper
	}
	for _, arg := range argumentsOf(c) {
		for _, k := range kinds {
			if strings.Contains(text(arg), string(k)) {
				return k, wrapper
			}
		}
	}
	return "", ""
}

// environment returns the values of the variables of a container. A variable that is set from a
// field of the pod has a reference to that field as its value.
func environment(c *yaml.Node) map[string]string {
	env := map[string]string{}
	for _, e := range items(get(c, "env")) {
		name := text(get(e, "name"))
		switch field := text(get(e, "valueFrom", "fieldRef", "fieldPath")); {
		case get(e, "value") != nil:
			env[name] = Expand(text(get(e, "value")), env)
		case field != "":
			env[name] = "$(" + field + ")"
		}
	}
	return env
}

// reference matches a reference to a variable, and an escaped dollar sign.
var reference = regexp.MustCompile(`\$\$|\$\([^)$]*\)`)

// Expand replaces $(NAME) with the value of the variable, as the kubelet does. References to
// unknown variables are kept.
func Expand(s string, env map[string]string) string {
	return reference.ReplaceAllStringFunc(s, func(ref string) string {
		if ref == "$$" {
			return "$"
		}
		if value, known := env[ref[len("$("):len(ref)-len(")")]]; known {
			return value
		}
		return ref
	})
}
