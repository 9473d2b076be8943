package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// option is one flag, and the key of the same name in the configuration file.
type option struct {
	name string
	// def is the default; its type is the type of the flag: bool, int, uint,
	// float64, string, []string, texts, time.Duration, grace, pairs or gates.
	def    any
	usage  string
	hidden bool
}

// roleOptions are the options of one role; section is its name in the
// configuration file and the prefix of its flags in "all".
type roleOptions struct {
	section string
	options []option
}

// register adds o to fs under name.
func (o option) register(fs *pflag.FlagSet, name, usage string) {
	switch def := o.def.(type) {
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
	case texts:
		fs.StringArray(name, def, usage)
	case time.Duration:
		fs.Duration(name, def, usage)
	case grace:
		fs.Var(&def, name, usage)
	case pairs:
		fs.Var(&pairs{}, name, usage)
	case gates:
		fs.Var(&gates{}, name, usage)
	default:
		panic(fmt.Sprintf("flag --%s has a default of type %T", name, o.def)) // a mistake in the tables
	}
	f := fs.Lookup(name)
	if name == "automaxprocs" {
		f.NoOptDefVal = "true"
	}
	f.Hidden = o.hidden
}

// registerFlags adds the flags of a command: the common ones, those of its
// roles, and, where several roles have the same one, a prefixed one for each.
func registerFlags(fs *pflag.FlagSet, common []option, roles []roleOptions) {
	fs.SetNormalizeFunc(dashes)
	fs.SortFlags = false
	for _, o := range common {
		o.register(fs, o.name, o.usage)
	}
	for _, role := range roles {
		for _, o := range role.options {
			sharing := sectionsWith(roles, o.name)
			switch {
			case len(sharing) == 1:
				o.register(fs, o.name, o.usage)
				continue
			case fs.Lookup(o.name) == nil:
				o.register(fs, o.name, fmt.Sprintf("%s (sets all of %s)", o.usage, strings.Join(sharing, ", ")))
				if f := fs.Lookup(o.name); defaultsDiffer(roles, o.name) {
					f.DefValue = "0" // not shown: each role keeps its own, which its prefixed flag shows
				}
			}
			o.register(fs, role.section+"-"+o.name, fmt.Sprintf("--%s for the %s alone", o.name, role.section))
		}
	}
	for _, name := range klogNoOps {
		addNoOp(fs, name)
	}
}

// sectionsWith names the sections of the roles that have an option.
func sectionsWith(roles []roleOptions, name string) []string {
	var sections []string
	for _, r := range roles {
		if slices.ContainsFunc(r.options, func(o option) bool { return o.name == name }) {
			sections = append(sections, r.section)
		}
	}
	return sections
}

func defaultsDiffer(roles []roleOptions, name string) bool {
	var first any
	for _, r := range roles {
		for _, o := range r.options {
			if o.name != name {
				continue
			}
			if first == nil {
				first = o.def
			}
			if first != o.def {
				return true
			}
		}
	}
	return false
}

// klogNoOps are flags that klog had once. They have no effect; old manifests
// that set them still start.
var klogNoOps = []string{
	"logtostderr", "alsologtostderr", "alsologtostderrthreshold", "log-dir", "log-file", "log-file-max-size", "stderrthreshold",
	"legacy-stderr-threshold-behavior", "one-output", "skip-headers", "skip-log-headers", "add-dir-header", "log-backtrace-at",
}

// noOp takes any value, or none, and ignores it.
type noOp struct{}

func (noOp) String() string   { return "" }
func (noOp) Set(string) error { return nil }
func (noOp) Type() string     { return "string" }

func addNoOp(fs *pflag.FlagSet, name string) {
	f := fs.VarPF(noOp{}, name, "", "has no effect; accepted for old manifests")
	f.Hidden = true
	switch name {
	case "alsologtostderrthreshold", "log-dir", "log-file", "log-file-max-size", "stderrthreshold", "log-backtrace-at": // these always had a value
	default:
		f.NoOptDefVal = "true"
	}
}

// texts is a flag that may be given several times; commas in its values mean nothing.
// In the environment each line is a value.
type texts []string

// grace is a flag of how long something is given to end; -1 leaves that to the thing itself.
type grace time.Duration

func (g *grace) Type() string { return "duration" }

func (g *grace) String() string {
	if *g < 0 {
		return "-1"
	}
	return time.Duration(*g).String()
}

func (g *grace) Set(value string) error {
	d, err := parseGrace(value)
	*g = grace(d)
	return err
}

func parseGrace(value string) (time.Duration, error) {
	if value == "-1" {
		return -1, nil
	}
	return time.ParseDuration(value)
}

// pairs is a flag of the form k:v,k:v. Given more than once, it merges.
type pairs map[string]string

func (p *pairs) Type() string { return "key:value,..." }

func (p *pairs) String() string {
	if p == nil {
		return ""
	}
	var items []string
	for _, k := range slices.Sorted(maps.Keys(*p)) {
		items = append(items, k+":"+(*p)[k])
	}
	return strings.Join(items, ",")
}

func (p *pairs) Set(value string) error {
	merged := maps.Clone(*p)
	if merged == nil {
		merged = pairs{}
	}
	for item := range strings.SplitSeq(value, ",") {
		k, v, ok := strings.Cut(item, ":")
		if !ok || strings.Contains(v, ":") || strings.TrimSpace(k) == "" {
			return fmt.Errorf("malformed item %q: must be key:value", item)
		}
		merged[strings.TrimSpace(k)] = strings.TrimSpace(v)
	}
	*p = merged
	return nil
}

// UnmarshalText serves the environment and the configuration file.
func (p *pairs) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	return p.Set(string(text))
}

// gates is a flag of the form Name=bool,Name=bool. Given more than once, it merges.
type gates map[string]bool

func (g *gates) Type() string { return "Name=bool,..." }

func (g *gates) String() string {
	if g == nil {
		return ""
	}
	var items []string
	for _, k := range slices.Sorted(maps.Keys(*g)) {
		items = append(items, fmt.Sprintf("%s=%t", k, (*g)[k]))
	}
	return strings.Join(items, ",")
}

func (g *gates) Set(value string) error {
	merged := maps.Clone(*g)
	if merged == nil {
		merged = gates{}
	}
	for item := range strings.SplitSeq(value, ",") {
		if strings.TrimSpace(item) == "" {
			continue
		}
		k, v, ok := strings.Cut(item, "=")
		on, err := strconv.ParseBool(strings.TrimSpace(v))
		if !ok || err != nil {
			return fmt.Errorf("malformed item %q: must be Name=true or Name=false", item)
		}
		merged[strings.TrimSpace(k)] = on
	}
	*g = merged
	return nil
}

// UnmarshalText serves the environment and the configuration file.
func (g *gates) UnmarshalText(text []byte) error { return g.Set(string(text)) }
