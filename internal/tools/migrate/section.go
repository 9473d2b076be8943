// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// setting is a flag of a source with its value.
type setting struct {
	name     string     // of today
	value    string     // as in the manifest, with references to variables
	expanded string     // value with the variables that have a value in the manifest
	bare     bool       // the flag has no value
	written  string     // its name in the manifest; "" if the manifest does not have it
	node     *yaml.Node // the argument that has the value
}

// newSetting returns a flag that no source has.
func newSetting(name, value string) setting {
	return setting{name: name, value: value, expanded: value}
}

// String returns f as a command line argument, with the expanded value.
func (f setting) String() string {
	if f.bare {
		return "--" + f.name
	}
	return "--" + f.name + "=" + f.expanded
}

// argument returns f as an argument in a manifest.
func (f setting) argument() string {
	if f.bare {
		return "--" + f.name
	}
	return "--" + f.name + "=" + f.value
}

// command returns the name of the section, or of the command, that replaces a program.
func (k kind) command() string {
	if k == topolvm {
		return "topolvm"
	}
	return string(k)
}

// shortV matches -v with a number and no space.
var shortV = regexp.MustCompile(`^-v=?([0-9]+)$`)

// The flag of csi-snapshotter before v8.2 for groups of snapshots, and its successor, which is on by default since v8.7.
const (
	groupSnapshots = "enable-volume-group-snapshots"
	groupGate      = "CSIVolumeGroupSnapshot"
)

// readFlags sets s.flags from the arguments of the container and returns the flags that its section does not have. The last of
// several equal flags wins, except for lists.
func (s *source) readFlags(t Tables) (unknown []string) {
	known := t.Flags[s.kind.command()]
	argv := argumentsOf(s.node)
	if end := slices.IndexFunc(argv, isTerminator); end >= 0 {
		argv = argv[:end]
	}
	for i := 0; i < len(argv); i++ {
		arg := text(argv[i])
		if m := shortV.FindStringSubmatch(arg); m != nil {
			arg = "--v=" + m[1]
		}
		body := strings.TrimLeft(arg, "-")
		if body == arg || body == "" {
			continue // a word that the section ignores, too
		}
		name, value, hasValue := strings.Cut(body, "=")
		name = strings.ReplaceAll(name, "_", "-")
		flag, isKnown := known[name]
		if !isKnown {
			unknown = append(unknown, "--"+name)
		}
		f := setting{name: name, value: value, written: name, node: argv[i]}
		if flag.Today != "" {
			f.name = flag.Today
		}
		switch {
		case hasValue:
		case flag.Bare || !isKnown || i+1 == len(argv):
			f.value, f.bare = "true", true
		default:
			i++
			f.value, f.node = text(argv[i]), argv[i]
		}
		if name == groupSnapshots {
			f.value, f.bare = groupGate+"="+f.value, false
		}
		f.expanded = Expand(f.value, s.env)
		s.add(f)
	}
	return unknown
}

// isTerminator reports whether arg ends the flags of a sidecar. In the new container it would begin a section.
func isTerminator(arg *yaml.Node) bool { return text(arg) == "--" }

// lists are the flags whose values are joined if they are given several times.
var lists = []string{"feature-gates", "leader-election-labels"}

func (s *source) add(f setting) {
	i := slices.IndexFunc(s.flags, func(have setting) bool { return have.name == f.name })
	switch {
	case i < 0:
		s.flags = append(s.flags, f)
	case slices.Contains(lists, f.name):
		s.flags[i].value += "," + f.value
		s.flags[i].expanded += "," + f.expanded
	default:
		s.flags[i] = f
	}
}

// write adds a flag to the end of the section of s.
func (s *source) write(f setting) {
	s.appended = append(s.appended, f)
	s.add(f)
}

// get returns the expanded value of a flag, "" if it is not set.
func (s *source) get(name string) string {
	f, _ := s.lookup(name)
	return f.expanded
}

func (s *source) lookup(name string) (setting, bool) {
	for _, f := range s.flags {
		if f.name == name {
			return f, true
		}
	}
	return setting{}, false
}

// has reports whether a flag is set.
func (s *source) has(name string) bool {
	_, set := s.lookup(name)
	return set
}

// on reports whether a boolean flag is set to true.
func (s *source) on(name string) bool { return isTrue(s.get(name)) }

func isTrue(value string) bool {
	on, err := strconv.ParseBool(value)
	return err == nil && on
}

// gate returns the value of a feature gate, and whether a flag of s sets it.
func (s *source) gate(name string) (value string, named bool) {
	for item := range strings.SplitSeq(s.get("feature-gates"), ",") {
		if gate, v, _ := strings.Cut(item, "="); strings.TrimSpace(gate) == name {
			value, named = strings.TrimSpace(v), true // the last one counts
		}
	}
	return value, named
}

// namesGate reports whether a flag of s sets a feature gate.
func (s *source) namesGate(name string) bool {
	_, named := s.gate(name)
	return named
}

// unknownGates returns the feature gates of s that this program does not have.
func (s *source) unknownGates(t Tables) []string {
	var unknown []string
	for item := range strings.SplitSeq(s.get("feature-gates"), ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(item), "=")
		if name != "" && !strings.Contains(name, "$") && !slices.Contains(t.Gates, name) {
			unknown = append(unknown, name)
		}
	}
	return unknown
}

// arguments returns the arguments of the new container: a section for each source, in the order of their containers.
func (g *group) arguments() []*yaml.Node {
	inOrder := slices.SortedFunc(slices.Values(g.sources), func(a, b *source) int { return a.index - b.index })
	if len(inOrder) == 1 && inOrder[0].kind == livenessprobe {
		g.known = append([]string{string(livenessprobe)}, inOrder[0].known()...)
		return append([]*yaml.Node{scalar(string(livenessprobe))}, inOrder[0].section(g)...)
	}
	args := []*yaml.Node{scalar("all")}
	g.known = []string{"all"}
	for _, s := range inOrder {
		args = slices.Concat(args, []*yaml.Node{scalar("--"), scalar(s.kind.command())}, s.section(g))
		g.known = slices.Concat(g.known, []string{"--", s.kind.command()}, s.known())
	}
	return args
}

// known returns the flags of the section of s with their expanded values.
func (s *source) known() []string {
	var all []string
	for _, f := range s.flags {
		all = append(all, f.String())
	}
	return all
}

// section returns the arguments of s as they are in the manifest, apart from values that its container alone has, and from the
// flags that it gets in addition.
func (s *source) section(g *group) []*yaml.Node {
	var args []*yaml.Node
	argv := argumentsOf(s.node)
	if end := slices.IndexFunc(argv, isTerminator); end >= 0 {
		g.info("the arguments of %s from \"--\" on were dropped: they are no flags", s.name)
		argv = argv[:end]
	}
	for _, arg := range argv {
		own := *arg
		own.Value = s.literal(arg.Value, s.differing)
		if address, set := s.lookup("csi-address"); set && address.node == arg && s.moved != "" {
			prefix, _, joined := strings.Cut(arg.Value, "=")
			own.Value = s.moved
			if joined {
				own.Value = prefix + "=" + s.moved
			}
		}
		if own.Value != arg.Value {
			s.literals = append(s.literals, FlagChange{arg.Value, own.Value})
		}
		args = append(args, &own)
	}
	for _, f := range s.appended {
		args = append(args, scalar(f.argument()))
	}
	return args
}

// literal replaces the references to variables that have another value in the new container by their values in that of s.
func (s *source) literal(text string, differing map[string]string) string {
	return reference.ReplaceAllStringFunc(text, func(ref string) string {
		value, differs := differing[variableOf(ref)]
		if !differs {
			return ref
		}
		return s.literal(value, differing)
	})
}

// variableOf returns the name of the variable of a reference, "" for an escaped dollar sign.
func variableOf(ref string) string {
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(ref, "$$"), "$("), ")")
}

// setAddress sets the socket of s to the path that it has in the container of first.
func (s *source) setAddress(first *source) {
	if s.kind == livenessprobe || s.address() == first.address() {
		return
	}
	s.moved = first.address()
	f, set := s.lookup("csi-address")
	if !set {
		s.write(newSetting("csi-address", s.moved))
		return
	}
	f.value, f.expanded = s.moved, s.moved
	s.add(f)
}
