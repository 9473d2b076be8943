// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package settings reads the settings of a command from flags, the environment and the configuration
// file. It knows options of the process as a whole; a role declares its own as a [Section].
package settings

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Option is one flag, and the key of the same name in the configuration file.
type Option struct {
	Name string
	// Default also determines the type of the flag: bool, int, uint, float64, string, []string,
	// time.Duration, Pairs or Gates.
	Default any
	Usage   string
	// Alias is another name of the flag and its environment variable, or "".
	Alias string
}

// maxThreads is the number of threads and workers that an option can set. Each takes memory, and is a call of the driver at a time.
const maxThreads = 10_000

// checkNumber returns an error if value is a number that o must not have. Values that are no numbers are errors of the decoder.
func (o Option) checkNumber(value any) error {
	switch o.Default.(type) {
	case int, uint:
	default:
		return nil
	}
	limit := float64(math.MaxInt32)
	if strings.HasSuffix(o.Name, "threads") || strings.HasSuffix(o.Name, "workers") {
		limit = maxThreads
	}
	number, err := strconv.ParseFloat(fmt.Sprint(value), 64)
	if errors.Is(err, strconv.ErrSyntax) || math.Abs(number) <= limit {
		return nil
	}
	bound := "most"
	if number < 0 {
		bound, limit = "least", -limit
	}
	return fmt.Errorf("must be at %s %.0f, got %.0f", bound, limit, number)
}

// Section declares the options of one role. Its name is the key in the configuration file and the
// prefix of the flags that several roles of a command share.
type Section struct {
	Name    string
	Options []Option
	// Config returns a pointer to the struct that the values are decoded into.
	Config func() any
	// Preset reports whether an option that is not set may get its value elsewhere, so that a printed
	// configuration must not contain the default. It may be nil.
	Preset func(option string) bool
	// Unused marks a section without flags: the command does not run the role, but the configuration
	// file may contain the section.
	Unused bool
}

// Schema declares the options of a command.
type Schema struct {
	Common   []Option
	Sections []Section // of all roles
	// Shared are further options that the configuration file may contain, because other commands have them.
	Shared []Option
	// Prefixed gives each option of a role another flag, with the name of the role as prefix. It sets the
	// option of that role only. Without it one flag sets the option of all roles.
	Prefixed bool
}

// used returns the sections with flags.
func (s Schema) used() []Section {
	return slices.DeleteFunc(slices.Clone(s.Sections), func(section Section) bool { return section.Unused })
}

// Register adds the flags of s to fs: the common options, those of the roles, and flags without effect
// that old manifests contain.
func (s Schema) Register(fs *pflag.FlagSet) {
	fs.SetNormalizeFunc(NormalizeFlag)
	fs.SortFlags = false
	for _, o := range s.Common {
		o.register(fs, o.Name, o.Usage)
	}
	sections := s.used()
	for _, section := range sections {
		for _, o := range section.Options {
			s.registerRoleOption(fs, sections, section.Name, o)
		}
	}
	for _, name := range klogNoOps {
		addNoOp(fs, name)
	}
}

// registerRoleOption adds the flag of an option of the role called role, and its prefixed flag.
func (s Schema) registerRoleOption(fs *pflag.FlagSet, sections []Section, role string, o Option) {
	sharing := SectionsWith(sections, o.Name)
	known := fs.Lookup(o.Name) != nil
	switch {
	case len(sharing) == 1 || !s.Prefixed && !known:
		o.register(fs, o.Name, o.Usage)
	case !known:
		o.register(fs, o.Name, fmt.Sprintf("%s (sets all of %s)", o.Usage, strings.Join(sharing, ", ")))
		if f := fs.Lookup(o.Name); defaultsDiffer(sections, o.Name) {
			f.DefValue = "0" // hidden in the help: the prefixed flags show the default of each role
		}
	}
	if prefixed := role + "-" + o.Name; s.Prefixed && !strings.HasPrefix(o.Name, role+"-") {
		o.register(fs, prefixed, fmt.Sprintf("--%s for the %s only", o.Name, role))
		fs.Lookup(prefixed).Hidden = len(sharing) == 1 && o.Alias == "" // an alias, which would double the length of the help
	}
	if o.Alias != "" && len(SectionsWith(sections, o.Alias)) == 1 { // else the option of another role has that name
		o.register(fs, o.Alias, "another name of --"+o.Name)
	}
}

// register adds o to fs under name.
func (o Option) register(fs *pflag.FlagSet, name, usage string) {
	switch def := o.Default.(type) {
	case bool:
		fs.Bool(name, def, usage)
	case int:
		short := ""
		if name == "v" {
			short = "v"
		}
		fs.IntP(name, short, def, usage)
	case uint:
		fs.Uint(name, def, usage)
	case float64:
		fs.Float64(name, def, usage)
	case string:
		fs.String(name, def, usage)
	case []string:
		fs.StringSlice(name, def, usage)
	case time.Duration:
		fs.Duration(name, def, usage)
	case Pairs:
		fs.Var(&Pairs{}, name, usage)
	case Gates:
		fs.Var(&Gates{}, name, usage)
	default:
		panic(fmt.Sprintf("flag --%s has a default of type %T", name, o.Default)) // a mistake in the tables
	}
	if name == "automaxprocs" {
		fs.Lookup(name).NoOptDefVal = "true"
	}
}

// initial returns the default of o as viper takes it.
func (o Option) initial() any {
	switch def := o.Default.(type) {
	case Pairs, Gates:
		return ""
	default:
		return def
	}
}

// SectionsWith returns the names of the sections that have an option of that name or alias.
func SectionsWith(sections []Section, option string) []string {
	var names []string
	for _, s := range sections {
		if slices.ContainsFunc(s.Options, func(o Option) bool { return o.Name == option || o.Alias == option }) {
			names = append(names, s.Name)
		}
	}
	return names
}

// defaultsDiffer reports whether sections have different defaults for an option.
func defaultsDiffer(sections []Section, name string) bool {
	defaults := map[string]bool{}
	for _, s := range sections {
		for _, o := range s.Options {
			if o.Name == name {
				defaults[fmt.Sprint(o.Default)] = true
			}
		}
	}
	return len(defaults) > 1
}

// NormalizeFlag accepts underscores in the name of a flag, as old manifests have them.
func NormalizeFlag(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// klogNoOps are former flags of klog. They have no effect, so that old manifests still start.
var klogNoOps = []string{
	"logtostderr", "alsologtostderr", "alsologtostderrthreshold", "log-dir", "log-file", "log-file-max-size", "stderrthreshold",
	"legacy-stderr-threshold-behavior", "one-output", "skip-headers", "skip-log-headers", "add-dir-header", "log-backtrace-at",
}

// noOp accepts any value, or none, and ignores it.
type noOp struct{}

func (noOp) String() string   { return "" }
func (noOp) Set(string) error { return nil }
func (noOp) Type() string     { return "string" }

// addNoOp adds a hidden flag without effect.
func addNoOp(fs *pflag.FlagSet, name string) {
	f := fs.VarPF(noOp{}, name, "", "has no effect; accepted for old manifests")
	f.Hidden = true
	switch name {
	// always had a value
	case "alsologtostderrthreshold", "log-dir", "log-file", "log-file-max-size", "stderrthreshold", "log-backtrace-at":
	default:
		f.NoOptDefVal = "true"
	}
}
