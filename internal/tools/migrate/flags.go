package migrate

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// given is a flag of a source.
type given struct {
	name  string // in its own spelling
	value string // as in the manifest, with references to variables
	known string // value with those of them that the manifest tells
	bare  bool   // it stands without a value
	node  *yaml.Node
}

// String is the flag as an argument, with the known value.
func (g given) String() string {
	if g.bare {
		return "--" + g.name
	}
	return "--" + g.name + "=" + g.known
}

// argument is the flag in the manifest, in the style that it had.
func (g given) argument() *yaml.Node {
	arg := scalar("--" + g.name + "=" + g.value)
	if g.bare {
		arg.Value = "--" + g.name
	}
	arg.Style = g.node.Style & (yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle)
	arg.HeadComment, arg.LineComment, arg.FootComment = g.node.HeadComment, g.node.LineComment, g.node.FootComment
	return arg
}

func (t Tables) flag(command, name string) (Flag, bool) {
	i := slices.IndexFunc(t.Commands[command], func(f Flag) bool { return f.Name == name })
	if i < 0 {
		return Flag{}, false
	}
	return t.Commands[command][i], true
}

// rolesWith are the roles of "all" that have an option.
func (t Tables) rolesWith(option string) []string {
	var names []string
	for _, r := range t.Roles {
		if slices.Contains(r.Options, option) {
			names = append(names, r.Name)
		}
	}
	return names
}

// shortV is -v with its number right behind it.
var shortV = regexp.MustCompile(`^-v=?([0-9]+)$`)

// read takes the flags of s from its arguments. What is no flag is in rest. The flags are
// spelled as ours are: two dashes, and no underscores. The last of several equal ones wins,
// unless they add up.
func (s *source) read(t Tables) (rest []string) {
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
		g := given{name: name, value: value, node: argv[i]}
		if !hasValue {
			f, known := t.flag(commands[s.kind], s.renamed(name))
			next := i + 1
			switch {
			case known && !f.Bare && next < len(argv), !known && next < len(argv) && !strings.HasPrefix(text(argv[next]), "-"):
				g.value, i = text(argv[next]), next
			default:
				g.value, g.bare = "true", known && f.Bare
			}
		}
		g.known = expand(g.value, s.env)
		s.add(g)
	}
	return rest
}

// addUp are flags that may be given several times.
var addUp = []string{"feature-gates", "leader-election-labels"}

func (s *source) add(g given) {
	i := slices.IndexFunc(s.flags, func(have given) bool { return have.name == g.name })
	switch {
	case i < 0:
		s.flags = append(s.flags, g)
	case slices.Contains(addUp, g.name):
		s.flags[i].value += "," + g.value
		s.flags[i].known += "," + g.known
	default:
		s.flags[i] = g
	}
}

// get is a flag that was given, or its default.
func (s *source) get(t Tables, name string) string {
	if g, ok := s.lookup(name); ok {
		return g.known
	}
	if s.kind == topolvm && name == "leader-election" {
		return "true"
	}
	f, _ := t.flag(commands[s.kind], name)
	return f.Default
}

func (s *source) lookup(name string) (given, bool) {
	for _, g := range s.flags {
		if g.name == name {
			return g, true
		}
	}
	return given{}, false
}

func (s *source) on(t Tables, name string) bool { return isTrue(s.get(t, name)) }

func isTrue(value string) bool {
	return slices.Contains([]string{"1", "t", "T", "true", "TRUE", "True"}, value)
}

// renamed is the name that a flag of an older release has now.
func (s *source) renamed(name string) string {
	if s.kind == topolvm {
		return name
	}
	if name == "enable-leader-election" {
		return "leader-election"
	}
	return name
}

// gone are flags of older releases without a successor, and why nothing is lost.
var gone = map[string]string{
	"provisioner":              "the name of the driver is asked for over its socket",
	"leader-election-type":     "leader election always uses Leases; make sure that no older replica, which may lock something else, runs at the same time",
	"leader-election-identity": "the holder of a Lease is named after POD_NAME, else after the host",
	"connection-timeout":       "the connection to the driver is waited for as long as it takes; --timeout bounds each call",
	"provisioning-retry-count": "failures are retried without end, with delays from --retry-interval-start to --retry-interval-max",
	"deletion-retry-count":     "failures are retried without end, with delays from --retry-interval-start to --retry-interval-max",
	"dummy":                    "drivers without attach need no flag: they do not report PUBLISH_UNPUBLISH_VOLUME",
}

// carry drops and renames the flags of s that are not ours, with a note for each.
func (s *source) carry(t Tables, note func(format string, args ...any)) {
	var kept []given
	for _, g := range s.flags {
		if name := s.renamed(g.name); name != g.name {
			note("--%s of %s is now --%s", g.name, s.name, name)
			g.name = name
		}
		if _, known := t.flag(commands[s.kind], g.name); !known {
			why := gone[g.name]
			if why == "" {
				why = "storage-controller has no such flag"
			}
			note("--%s=%s of %s was dropped: %s", g.name, g.value, s.name, why)
			continue
		}
		if g.name == "feature-gates" {
			g = s.knownGates(t, g, note)
		}
		if g.name != "feature-gates" || g.value != "" {
			kept = append(kept, g)
		}
	}
	s.flags = kept
}

// knownGates is g without the gates that we do not have.
func (s *source) knownGates(t Tables, g given, note func(format string, args ...any)) given {
	var kept []string
	for item := range strings.SplitSeq(g.value, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(item), "=")
		if name == "" {
			continue
		}
		if !slices.Contains(t.Gates, name) && !strings.Contains(name, "$") {
			note("the feature gate %s of %s was dropped: storage-controller has no such gate", strings.TrimSpace(item), s.name)
			continue
		}
		kept = append(kept, strings.TrimSpace(item))
	}
	g.value = strings.Join(kept, ",")
	g.known = expand(g.value, s.env)
	return g
}
