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
	name     string     // as storage-controller spells it
	value    string     // as in the manifest, with references to variables
	expanded string     // value with the variables that have a value in the manifest
	bare     bool       // the flag has no value
	node     *yaml.Node // the argument in the manifest, for its style and comments
}

// newSetting returns a flag that no source has.
func newSetting(name, value string) setting {
	return setting{name: name, value: value, expanded: value, node: &yaml.Node{}}
}

// String returns f as a command line argument, with the expanded value.
func (f setting) String() string {
	if f.bare {
		return "--" + f.name
	}
	return "--" + f.name + "=" + f.expanded
}

// argument returns f as an argument in the manifest, in the style of the source.
func (f setting) argument() *yaml.Node {
	arg := scalar("--" + f.name + "=" + f.value)
	if f.bare {
		arg.Value = "--" + f.name
	}
	arg.Style = f.node.Style & (yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle)
	arg.HeadComment, arg.LineComment, arg.FootComment = f.node.HeadComment, f.node.LineComment, f.node.FootComment
	return arg
}

func (t Tables) flag(command, name string) (Flag, bool) {
	i := slices.IndexFunc(t.Commands[command], func(f Flag) bool { return f.Name == name })
	if i < 0 {
		return Flag{}, false
	}
	return t.Commands[command][i], true
}

// rolesWith returns the names of the roles of "all" that have an option.
func (t Tables) rolesWith(option string) []string {
	var names []string
	for _, r := range t.Roles {
		if slices.Contains(r.Options, option) {
			names = append(names, r.Name)
		}
	}
	return names
}

// shortV matches -v with a number and no space.
var shortV = regexp.MustCompile(`^-v=?([0-9]+)$`)

// readFlags sets s.flags from the arguments of the container and returns the arguments that are
// no flags. It spells flags with two dashes and without underscores. The last of several equal
// flags wins, except for lists.
func (s *source) readFlags(t Tables) (rest []string) {
	argv := argumentsOf(s.node)
	for i := 0; i < len(argv); i++ {
		arg := text(argv[i])
		if m := shortV.FindStringSubmatch(arg); m != nil {
			arg = "--v=" + m[1]
		}
		body := strings.TrimLeft(arg, "-")
		if body == arg || body == "" {
			rest = append(rest, arg)
			continue
		}
		name, value, hasValue := strings.Cut(body, "=")
		name = strings.ReplaceAll(name, "_", "-")
		f := setting{name: name, value: value, node: argv[i]}
		if !hasValue {
			flag, known := t.flag(commands[s.kind], s.renamed(name))
			next := i + 1
			switch {
			case known && !flag.Bare && next < len(argv), !known && next < len(argv) && !strings.HasPrefix(text(argv[next]), "-"):
				f.value, i = text(argv[next]), next
			default:
				f.value, f.bare = "true", known && flag.Bare
			}
		}
		f.expanded = Expand(f.value, s.env)
		s.add(f)
	}
	return rest
}

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

// get returns the expanded value of a flag, or its default.
func (s *source) get(t Tables, name string) string {
	if f, ok := s.lookup(name); ok {
		return f.expanded
	}
	flag, _ := t.flag(commands[s.kind], name)
	return flag.Default
}

func (s *source) lookup(name string) (setting, bool) {
	for _, f := range s.flags {
		if f.name == name {
			return f, true
		}
	}
	return setting{}, false
}

// on reports whether a boolean flag is true.
func (s *source) on(t Tables, name string) bool { return isTrue(s.get(t, name)) }

func isTrue(value string) bool {
	on, err := strconv.ParseBool(value)
	return err == nil && on
}

// renamed returns the current name of a flag of an older release.
func (s *source) renamed(name string) string {
	switch {
	case s.kind != topolvm && name == "enable-leader-election":
		return "leader-election"
	case s.kind == csiResizer && name == "csiTimeout":
		return "timeout"
	case s.kind == csiResizer && name == "worker-threads":
		return "workers"
	case s.kind == csiResizer && name == "resync":
		return "resync-period"
	}
	return name
}

// removedFlags explains the flags of older releases that have no successor.
var removedFlags = map[string]struct {
	level Level
	why   string
}{
	"provisioner": {Information, nameOfDriver},
	"snapshotter": {Information, nameOfDriver},
	"leader-election-type": {Required, "leader election always uses Leases. " +
		"Make sure that no older replica runs at the same time, because it may use another lock"},
	"leader-election-identity":          {Information, "the holder identity of a Lease is POD_NAME, or the host name"},
	"connection-timeout":                {Information, "the connection to the driver has no timeout; --timeout bounds each call"},
	"provisioning-retry-count":          {Changed, unlimitedRetries},
	"deletion-retry-count":              {Changed, unlimitedRetries},
	"create-snapshotcontent-retrycount": {Changed, unlimitedRetries},
	"create-snapshotcontent-interval":   {Changed, unlimitedRetries},
	"dummy":                             {Information, "a driver without PUBLISH_UNPUBLISH_VOLUME needs no flag"},
}

const nameOfDriver = "the driver name is read from the driver (GetPluginInfo)"

const unlimitedRetries = "the number of retries is not limited; the back-off is --retry-interval-start to --retry-interval-max"

// carryOver drops and renames the flags of s that storage-controller does not have, with a note for each.
func (s *source) carryOver(g *group) {
	t := g.m.Tables
	var kept []setting
	for _, f := range s.flags {
		if name := s.renamed(f.name); name != f.name {
			g.info("--%s of %s is now --%s", f.name, s.name, name)
			f.name = name
		}
		if _, known := t.flag(commands[s.kind], f.name); !known {
			removed := removedFlags[f.name]
			g.note(removed.level, "--%s=%s of %s was dropped: %s", f.name, f.value, s.name, removed.why)
			continue
		}
		if f.name == "feature-gates" {
			f = s.knownGates(g, f)
		}
		if f.name != "feature-gates" || f.value != "" {
			kept = append(kept, f)
		}
	}
	s.flags = kept
}

// knownGates returns f without the unknown feature gates, with a note for each of them.
func (s *source) knownGates(g *group, f setting) setting {
	var kept []string
	for item := range strings.SplitSeq(f.value, ",") {
		item = strings.TrimSpace(item)
		name, _, _ := strings.Cut(item, "=")
		switch {
		case name == "":
		case slices.Contains(g.m.Tables.Gates, name), strings.Contains(name, "$"):
			kept = append(kept, item)
		default:
			g.changed("the feature gate %s of %s was dropped: storage-controller has no such gate", item, s.name)
		}
	}
	f.value = strings.Join(kept, ",")
	f.expanded = Expand(f.value, s.env)
	return f
}
