// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package settings reads the settings of a command from flags, the environment and the configuration
// file. It knows the options of the process, and those that every role has; the configuration of a role declares the others.
package settings

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// EnvPrefix starts the name of the environment variable of each option.
const EnvPrefix = "STORAGE_CONTROLLER_"

// Origin is the source of a setting.
type Origin string

// The sources of settings, by precedence.
const (
	OriginFlag        Origin = "flag"
	OriginEnvironment Origin = "environment"
	OriginFile        Origin = "file"
	OriginDerived     Origin = "derived" // from the name of the driver
	OriginDefault     Origin = "default"
)

// Value is a setting as it is shown to users, without passwords.
type Value struct{ Name, Value, Origin string }

// Group is the options of the process or of a role, which are flags that set the fields of its configuration. Their
// annotations, which have no values unless said, are:
//
//   - alias: its only value is another name of the option.
//   - omitted: a printed configuration contains the option only if it was set, because its presence has an effect.
type Group struct {
	// Name is that of the role: the key in the configuration file and the prefix of the flags that several roles of a command
	// share. It is "" for the process.
	Name  string
	Flags *pflag.FlagSet
	// Unused marks options that are no flags of the command, because it does not run the role. The configuration file may
	// contain them.
	Unused bool
	// Separate marks options that are set only in a section of the command line, and under the key of the group: those that have
	// the same name for the process and its roles do not set them.
	Separate bool
}

// NewFlags returns the flags that add adds.
func NewFlags(add func(*pflag.FlagSet)) *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.SortFlags = false
	add(fs)
	return fs
}

// Split returns the flags of fs for which own returns true, and the others.
func Split(fs *pflag.FlagSet, own func(name string) bool) (mine, others *pflag.FlagSet) {
	only := func(want bool) *pflag.FlagSet {
		return NewFlags(func(some *pflag.FlagSet) {
			fs.VisitAll(func(f *pflag.Flag) {
				if own(f.Name) == want {
					some.AddFlag(f)
				}
			})
		})
	}
	return only(true), only(false)
}

// key returns the key of an option, which is ROLE.OPTION for that of a role.
func (g Group) key(option string) string {
	if g.Name == "" {
		return option
	}
	return g.Name + "." + option
}

// alias returns the other name of an option, "" for none.
func alias(f *pflag.Flag) string {
	return strings.Join(f.Annotations["alias"], "")
}

// has reports whether g has an option of that name or alias.
func (g Group) has(option string) bool {
	found := false
	g.Flags.VisitAll(func(f *pflag.Flag) { found = found || f.Name == option || alias(f) == option })
	return found
}

// Set is the options of a command. After [Set.Load] it also has what was set.
type Set struct {
	Groups []Group // of the process first
	// Prefixed gives each option of a role another flag, with the name of the role as prefix. It sets the
	// option of that role only. Without it one flag sets the option of all roles.
	Prefixed bool

	// Values lists every setting of the command in the order of its flags.
	Values []Value
	// NoOps lists the flags without effect that were set.
	NoOps []string
	// Notes are for the log: what an operator may not expect of the command line.
	Notes []string

	origins map[string]Origin
}

// Origin returns the source of an option that was set, and "" for a default. The key of an option of
// a role is ROLE.OPTION.
func (s Set) Origin(key string) Origin { return s.origins[key] }

// AnyOf reports whether an option of the role called name was set for it alone.
func (s Set) AnyOf(name string) bool {
	for key := range s.origins {
		if role, _, ok := strings.Cut(key, "."); ok && role == name {
			return true
		}
	}
	return false
}

// Derive sets an option of the process that follows from the command line.
func (s *Set) Derive(option, value string) error {
	for _, g := range s.Groups {
		f := g.Flags.Lookup(option)
		if g.Name != "" || f == nil {
			continue
		}
		s.origins[option] = OriginFlag
		for i, v := range s.Values {
			if v.Name == option {
				s.Values[i] = Value{option, value, string(OriginFlag)}
			}
		}
		return f.Value.Set(value)
	}
	return nil
}

// OfOthers returns the options of roles that were set, by their keys, for roles other than chosen. Options
// that a chosen role has under the same name, or the name of their alias, are left out.
func (s Set) OfOthers(chosen []string) map[string]Origin {
	others := map[string]Origin{}
	for _, g := range s.Roles() {
		if slices.Contains(chosen, g.Name) || g.Separate {
			continue
		}
		g.Flags.VisitAll(func(f *pflag.Flag) {
			origin, set := s.origins[g.key(f.Name)]
			if set && !slices.ContainsFunc(s.Roles(), func(other Group) bool {
				return slices.Contains(chosen, other.Name) && (other.has(f.Name) || alias(f) != "" && other.has(alias(f)))
			}) {
				others[g.key(f.Name)] = origin
			}
		})
	}
	return others
}

// Roles returns the groups of roles.
func (s Set) Roles() []Group {
	return slices.DeleteFunc(slices.Clone(s.Groups), func(g Group) bool { return g.Name == "" })
}

// flagOnly names the options that neither the configuration file nor, except for config, the
// environment can set.
var flagOnly = []string{"config", "version", "print-config"}

// Keys returns the keys that a configuration file may contain, sorted. A key of a role may be used in
// its section, or at the top for all roles that have it.
func (s Set) Keys() []string {
	keys := []string{"apiVersion", "kind"}
	for _, g := range s.Groups {
		if g.Name != "" {
			keys = append(keys, g.Name)
		}
		g.Flags.VisitAll(func(f *pflag.Flag) {
			if !slices.Contains(flagOnly, f.Name) {
				keys = append(keys, f.Name, g.key(f.Name))
			}
		})
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// envName returns the environment variable of an option.
func envName(option string) string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(option))
}

// variables returns the environment variables of an option, by precedence.
func (g Group) variables(f *pflag.Flag) []string {
	if g.Name == "" {
		return []string{envName(f.Name)}
	}
	names := []string{envName(g.key(f.Name))}
	if g.Separate {
		return names
	}
	names = append(names, envName(f.Name))
	if other := alias(f); other != "" {
		names = append(names, envName(other))
	}
	return names
}

// ofService matches the variables that Kubernetes sets for Services whose names begin with storage-controller.
var ofService = regexp.MustCompile(`_(SERVICE_(HOST|PORT(_[^=]+)?)|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)=|_PORT=[a-z]+://`)

// UnknownVariables returns the items of environ that have the prefix of options but set none. Variables
// of Services are not among them.
func (s Set) UnknownVariables(environ []string) []string {
	known := map[string]bool{}
	for _, g := range s.Groups {
		g.Flags.VisitAll(func(f *pflag.Flag) {
			for _, name := range g.variables(f) {
				known[name] = true
			}
		})
	}
	var unknown []string
	for _, item := range environ {
		name, _, _ := strings.Cut(item, "=")
		if strings.HasPrefix(name, EnvPrefix) && !known[name] && !ofService.MatchString(item) {
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	return unknown
}

// Register adds the flags of a command to fs: the options of the process, those of the roles, and flags without effect
// that old manifests contain. options returns new options each time: a flag keeps its value in those that it is from.
func Register(fs *pflag.FlagSet, options func() Set) {
	fs.SetNormalizeFunc(NormalizeFlag)
	fs.SortFlags = false
	set, aliases := options(), options()
	prefixed := aliases // it has no flags
	if set.Prefixed {
		prefixed = options()
	}
	for i, g := range set.Groups {
		switch {
		case g.Unused:
		case g.Name == "":
			g.Flags.VisitAll(fs.AddFlag)
		default:
			g.Flags.VisitAll(func(f *pflag.Flag) {
				set.registerOfRole(fs, g.Name, f, prefixed.Groups[i].Flags.Lookup(f.Name), aliases.Groups[i].Flags.Lookup(f.Name))
			})
		}
	}
	for name, hasValue := range klogNoOps {
		AddNoOp(fs, name, hasValue)
	}
}

// registerOfRole adds the flag f of a role, its prefixed flag, and the flag of its alias.
func (s Set) registerOfRole(fs *pflag.FlagSet, role string, f, prefixed, other *pflag.Flag) {
	name := f.Name
	sharing, differ := s.sharing(name)
	known := fs.Lookup(name) != nil
	switch {
	case len(sharing) == 1 || !s.Prefixed && !known:
		fs.AddFlag(f)
	case !known:
		of := "all of " + strings.Join(sharing, ", ")
		if everyRole(name) {
			of = "every role"
		}
		f.Usage = fmt.Sprintf("%s (sets %s)", f.Usage, of)
		if differ {
			f.DefValue = "0" // hidden in the help: the prefixed flags show the default of each role
		}
		fs.AddFlag(f)
	}
	if s.Prefixed && !strings.HasPrefix(name, role+"-") {
		prefixed.Name, prefixed.Usage = role+"-"+name, fmt.Sprintf("--%s for the %s only", name, role)
		// The help lists no second name of an option, and none of the options that every role has: it would be twice as long.
		prefixed.Hidden = len(sharing) == 1 && alias(f) == "" || everyRole(name)
		fs.AddFlag(prefixed)
	}
	a := alias(f)
	if roles, _ := s.sharing(a); a != "" && len(roles) == 1 { // else the option of another role has that name
		other.Name, other.Usage = a, "another name of --"+name
		fs.AddFlag(other)
	}
}

// sharing returns the roles of the command that have an option of that name or alias. differ reports that the options of that name
// have different defaults.
func (s Set) sharing(option string) (roles []string, differ bool) {
	defaults := map[string]bool{}
	for _, g := range s.Roles() {
		if g.Unused || !g.has(option) {
			continue
		}
		roles = append(roles, g.Name)
		if f := g.Flags.Lookup(option); f != nil {
			defaults[f.Value.String()] = true
		}
	}
	return roles, len(defaults) > 1
}

// NormalizeFlag accepts underscores in the name of a flag, as old manifests have them.
func NormalizeFlag(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// klogNoOps are former flags of klog, and whether they always had a value. They have no effect, so that old manifests still start.
var klogNoOps = map[string]bool{
	"logtostderr": false, "alsologtostderr": false, "legacy-stderr-threshold-behavior": false, "one-output": false, "skip-headers": false,
	"skip-log-headers": false, "add-dir-header": false,
	"alsologtostderrthreshold": true, "log-dir": true, "log-file": true, "log-file-max-size": true, "stderrthreshold": true,
	"log-backtrace-at": true,
}

// noOp accepts any value, or none, and ignores it.
type noOp struct{}

func (noOp) String() string   { return "" }
func (noOp) Set(string) error { return nil }
func (noOp) Type() string     { return "string" }

// AddNoOp adds a hidden flag without effect. hasValue reports that it always had a value.
func AddNoOp(fs *pflag.FlagSet, name string, hasValue bool) {
	f := fs.VarPF(noOp{}, name, "", "has no effect; accepted for old manifests")
	f.Hidden = true
	if !hasValue {
		f.NoOptDefVal = "true"
	}
}
