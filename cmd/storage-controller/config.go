package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
)

// The header of a configuration file.
const (
	configAPIVersion = "storage-controller/v1alpha1"
	configKind       = "Configuration"
)

// envPrefix starts the name of the environment variable of each option.
const envPrefix = "STORAGE_CONTROLLER_"

// settings is everything that an operator may set.
type settings struct {
	Common      commonConfig       `mapstructure:",squash"`
	Provisioner provisioner.Config `mapstructure:"provisioner"`
	Attacher    attacher.Config    `mapstructure:"attacher"`
	Capacity    capacity.Config    `mapstructure:"capacity"`
	// Nodecontroller is as it was set; see [nodecontroller.Config.Resolve].
	Nodecontroller nodecontroller.Config `mapstructure:"nodecontroller"`
	// origins is where each option was set, by its key in viper; those that are not there were not.
	origins origins
	// flags is every setting of the command, in the order of its flags.
	flags []statusz.Flag
}

// origins of settings; see [settings].
type origins map[string]nodecontroller.Origin

// of the options of a section, by their names.
func (o origins) of(section string) map[string]nodecontroller.Origin {
	mine := map[string]nodecontroller.Origin{}
	for key, origin := range o {
		if name, ok := strings.CutPrefix(key, section+"."); ok {
			mine[name] = origin
		}
	}
	return mine
}

// readSettings puts together flags, environment, the file of --config and
// defaults, in this order of precedence. A role's own spelling of an option wins
// over the common one of the same source. roles are those of the command; of the
// others, defaults and their section of the file are read.
func readSettings(fs *pflag.FlagSet, all bool, roles []role) (settings, error) {
	common := commonOptions(all, roles...)
	file, err := readConfigFile(fs, common)
	if err != nil {
		return settings{}, err
	}
	v := viper.New()
	if err := v.MergeConfigMap(file); err != nil {
		return settings{}, fmt.Errorf("reading the configuration: %w", err)
	}
	found := origins{}
	var flags []statusz.Flag
	for _, o := range common {
		if !slices.Contains(flagOnly, o.name) {
			bind(v, found, o.name, o, flagOf(fs, o.name))
			flags = append(flags, setting(v, found, o.name, o.name))
		}
	}
	for _, role := range allRoleOptions(all) {
		mine := having(roles, role.section)
		for _, o := range role.options {
			var given []*pflag.Flag
			if mine {
				given = flagOf(fs, role.section+"-"+o.name, o.name)
			}
			key := role.section + "." + o.name
			bind(v, found, key, o, given)
			if mine {
				flags = append(flags, setting(v, found, key, key))
			}
		}
	}
	s := settings{origins: found, flags: flags}
	def := nodecontroller.DefaultConfig()
	s.Nodecontroller.MinMissingGrace, s.Nodecontroller.UnregisteredGrace, s.Nodecontroller.ClockGap = def.MinMissingGrace, def.UnregisteredGrace, def.ClockGap
	err = v.UnmarshalExact(&s, viper.DecodeHook(mapstructure.ComposeDecodeHookFunc(
		mapstructure.TextUnmarshallerHookFunc(),
		durations,
		mapstructure.StringToSliceHookFunc(","),
	)))
	if err != nil {
		return settings{}, fmt.Errorf("reading the configuration: %w", err)
	}
	s.Nodecontroller.Explicit = found.of(nodecontrollerSection)
	return s, nil
}

// setting is the value of key for people.
func setting(v *viper.Viper, found origins, key, name string) statusz.Flag {
	origin := nodecontroller.OriginDefault
	if o, ok := found[key]; ok {
		origin = o
	}
	return statusz.Flag{Name: name, Value: passwordOfURL.ReplaceAllString(fmt.Sprint(v.Get(key)), "${1}xxxxx@"), Origin: string(origin)}
}

// passwordOfURL is what must not be shown of a setting such as --master.
var passwordOfURL = regexp.MustCompile(`(://[^/@\s]*:)[^/@\s]*@`)

// durations turns text into a duration.
func durations(from, to reflect.Type, value any) (any, error) {
	if text, ok := value.(string); ok && from.Kind() == reflect.String && to == reflect.TypeFor[time.Duration]() {
		return parseGrace(text)
	}
	return value, nil
}

// allRoles is what "all" runs.
func allRoles() []role {
	return []role{provisionerRole, attacherRole, capacityRole, nodecontrollerRole}
}

func having(roles []role, section string) bool {
	return slices.ContainsFunc(roles, func(r role) bool { return r.section == section })
}

func allRoleOptions(all bool) []roleOptions { return optionsOf(allRoles(), all) }

// optionsOf are the options of roles; all is as for commonOptions.
func optionsOf(roles []role, all bool) []roleOptions {
	var options []roleOptions
	for _, r := range roles {
		options = append(options, r.options(all))
	}
	return options
}

// flagOf is those of the named flags that the command has.
func flagOf(fs *pflag.FlagSet, names ...string) []*pflag.Flag {
	var flags []*pflag.Flag
	for _, name := range names {
		if f := fs.Lookup(name); f != nil {
			flags = append(flags, f)
		}
	}
	return flags
}

// bind makes key the value of the first of flags that was given, else of the
// environment, else of the file, else the default, and notes which it is in found.
func bind(v *viper.Viper, found origins, key string, o option, flags []*pflag.Flag) {
	v.SetDefault(key, defaultOf(o))
	_, isTexts := o.def.(texts)
	for _, f := range flags {
		if f.Changed {
			var value any = f.Value.String()
			if list, ok := f.Value.(pflag.SliceValue); ok {
				// String writes brackets around it. A flag that is given without a value
				// means an empty list.
				value = slices.DeleteFunc(list.GetSlice(), func(text string) bool { return text == "" })
			}
			v.Set(key, value)
			found[key] = nodecontroller.OriginFlag
			return
		}
	}
	section, name, nested := strings.Cut(key, ".")
	names := []string{envName(section)}
	if nested {
		names = []string{envName(section + "-" + name), envName(name)}
	}
	for _, env := range names {
		if value, ok := os.LookupEnv(env); ok && value != "" {
			if v.Set(key, value); isTexts {
				v.Set(key, lines(value))
			}
			found[key] = nodecontroller.OriginEnvironment
			return
		}
	}
	if v.InConfig(key) {
		if text, ok := v.Get(key).(string); ok && isTexts { // else its commas would make a list of it
			v.Set(key, lines(text))
		}
		found[key] = nodecontroller.OriginFile
	}
}

func lines(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' })
}

func envName(option string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(option, "-", "_"))
}

func defaultOf(o option) any {
	switch def := o.def.(type) {
	case pairs, gates:
		return ""
	case grace:
		return time.Duration(def)
	case texts:
		return []string(def)
	default:
		return def
	}
}

// readConfigFile is the content of the file of --config, checked for unknown
// keys and without its header; an option at the top that belongs to roles is
// moved into the sections that do not set it themselves.
func readConfigFile(fs *pflag.FlagSet, common []option) (map[string]any, error) {
	path := os.Getenv(envName("config"))
	if f := fs.Lookup("config"); f != nil && f.Changed {
		path = f.Value.String()
	}
	if path == "" {
		return map[string]any{}, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	var file map[string]any
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return nil, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	if err := checkConfig(file, common); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	spread(file)
	return file, nil
}

// checkConfig reports every key of file that is not known, and a wrong header.
func checkConfig(file map[string]any, common []option) error {
	var errs []error
	if file["apiVersion"] != configAPIVersion || file["kind"] != configKind {
		errs = append(errs, fmt.Errorf("must begin with apiVersion: %s and kind: %s", configAPIVersion, configKind))
	}
	known := map[string]bool{"apiVersion": true, "kind": true}
	for _, o := range common {
		known[o.name] = !slices.Contains(flagOnly, o.name)
	}
	// One file serves every command, also those that have fewer options.
	for _, o := range commonOptions(true, allRoles()...) {
		known[o.name] = !slices.Contains(flagOnly, o.name)
	}
	for _, role := range allRoleOptions(true) {
		inSection := map[string]bool{}
		for _, o := range role.options {
			known[o.name], inSection[o.name] = true, true
		}
		section, present := file[role.section]
		if !present {
			continue
		}
		known[role.section] = true
		values, ok := section.(map[string]any)
		if !ok && section != nil {
			errs = append(errs, fmt.Errorf("key %q: must hold the options of the %s", role.section, role.section))
		}
		for _, key := range slices.Sorted(maps.Keys(values)) {
			if !inSection[key] {
				errs = append(errs, fmt.Errorf("unknown key %q", role.section+"."+key))
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(file)) {
		if !known[key] {
			errs = append(errs, fmt.Errorf("unknown key %q", key))
		}
	}
	return errors.Join(errs...)
}

// spread moves the options of roles from the top into the sections. Maps become
// the text that the flag takes: viper folds the case of their keys otherwise.
func spread(file map[string]any) {
	delete(file, "apiVersion")
	delete(file, "kind")
	for name, between := range map[string]string{"feature-gates": "=", "leader-election-labels": ":"} {
		if values, ok := file[name].(map[string]any); ok {
			var items []string
			for _, k := range slices.Sorted(maps.Keys(values)) {
				items = append(items, fmt.Sprintf("%s%s%v", k, between, values[k]))
			}
			file[name] = strings.Join(items, ",")
		}
	}
	top := map[string]any{}
	for _, role := range allRoleOptions(true) {
		for _, o := range role.options {
			if value, ok := file[o.name]; ok {
				top[o.name] = value
			}
		}
	}
	for _, role := range allRoleOptions(true) {
		section, _ := file[role.section].(map[string]any)
		if section == nil {
			section = map[string]any{}
		}
		for _, o := range role.options {
			if value, ok := top[o.name]; ok {
				if _, own := section[o.name]; !own {
					section[o.name] = value
				}
			}
		}
		file[role.section] = section
	}
	for name := range top {
		delete(file, name)
	}
}
