// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
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
	OriginDefault     Origin = "default"
)

// Value is a setting as it is shown to users, without passwords.
type Value struct{ Name, Value, Origin string }

// Settings holds everything that an operator may set for a command.
type Settings struct {
	Common Common
	// Values lists every setting of the command in the order of its flags.
	Values []Value
	// NoOps lists the flags without effect that were set.
	NoOps []string

	sections map[string]any // pointers to the structs of the roles, by section
	origins  map[string]Origin
	schema   Schema
}

// Of returns the settings of a section, decoded into T.
func Of[T any](s Settings, section string) T {
	if values, ok := s.sections[section].(*T); ok {
		return *values
	}
	var zero T
	return zero
}

// Origin returns the source of an option that was set, and "" for a default. The key of an option of
// a role is SECTION.OPTION.
func (s Settings) Origin(key string) Origin { return s.origins[key] }

// Origins returns the source of each option of a section that was set.
func (s Settings) Origins(section string) map[string]Origin {
	mine := map[string]Origin{}
	for key, origin := range s.origins {
		if name, ok := strings.CutPrefix(key, section+"."); ok {
			mine[name] = origin
		}
	}
	return mine
}

// OfOthers returns the options of roles that were set, by their keys, for roles other than chosen. Options
// that a chosen role has under the same name, or the name of their alias, are left out.
func (s Settings) OfOthers(chosen []string) map[string]Origin {
	running := slices.DeleteFunc(slices.Clone(s.schema.Sections),
		func(section Section) bool { return !slices.Contains(chosen, section.Name) })
	others := map[string]Origin{}
	for key, origin := range s.origins {
		section, name, nested := strings.Cut(key, ".")
		if !nested || slices.Contains(chosen, section) || SectionsWith(running, name) != nil {
			continue
		}
		if alias := s.schema.alias(section, name); alias == "" || SectionsWith(running, alias) == nil {
			others[key] = origin
		}
	}
	return others
}

// alias returns the alias of an option, "" for none.
func (s Schema) alias(section, name string) string {
	for _, candidate := range s.Sections {
		for _, o := range candidate.Options {
			if candidate.Name == section && o.Name == name {
				return o.Alias
			}
		}
	}
	return ""
}

// Read combines flags, environment, configuration file and defaults, in this order of precedence. The
// prefixed option of a role takes precedence over the common one from the same source.
func Read(fs *pflag.FlagSet, schema Schema) (Settings, error) {
	file, err := readConfigFile(fs, schema)
	if err != nil {
		return Settings{}, err
	}
	r := reader{viper.New(), Settings{origins: map[string]Origin{}, sections: map[string]any{}, schema: schema}}
	if err := r.v.MergeConfigMap(file); err != nil {
		return Settings{}, fmt.Errorf("reading the configuration: %w", err)
	}
	for _, o := range schema.Common {
		if !slices.Contains(flagOnly, o.Name) {
			r.bind(o.Name, o, flagsOf(fs, o.Name))
			r.show(o.Name)
		}
	}
	for _, section := range schema.Sections {
		for _, o := range section.Options {
			key := section.Name + "." + o.Name
			if section.Unused {
				r.bind(key, o, nil)
				continue
			}
			names := []string{section.Name + "-" + o.Name, o.Name}
			if o.Alias != "" {
				names = append(names, o.Alias)
			}
			r.bind(key, o, flagsOf(fs, names...))
			r.show(key)
		}
	}
	fs.Visit(func(f *pflag.Flag) {
		if _, ok := f.Value.(noOp); ok {
			r.s.NoOps = append(r.s.NoOps, f.Name)
		}
	})
	err = r.checkNumbers()
	if err == nil {
		err = r.decode()
	}
	if err != nil {
		return Settings{}, fmt.Errorf("reading the configuration: %w", err)
	}
	return r.s, nil
}

// checkNumbers returns an error for each option whose number is too large. The decoder would convert a number of the configuration
// file that its type cannot hold to another one.
func (r reader) checkNumbers() error {
	var errs []error
	check := func(key string, o Option) {
		if err := o.checkNumber(r.v.Get(key)); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		}
	}
	for _, o := range r.s.schema.Common {
		check(o.Name, o)
	}
	for _, section := range r.s.schema.Sections {
		for _, o := range section.Options {
			check(section.Name+"."+o.Name, o)
		}
	}
	return errors.Join(errs...)
}

// flagsOf returns those of the named flags that the command has.
func flagsOf(fs *pflag.FlagSet, names ...string) []*pflag.Flag {
	var flags []*pflag.Flag
	for _, name := range names {
		if f := fs.Lookup(name); f != nil {
			flags = append(flags, f)
		}
	}
	return flags
}

// reader collects the values of options.
type reader struct {
	v *viper.Viper
	s Settings
}

// bind sets key to the first of flags that was set, else to the environment, else to the file, else to
// the default, and records the origin.
func (r reader) bind(key string, o Option, flags []*pflag.Flag) {
	r.v.SetDefault(key, o.initial())
	for _, f := range flags {
		if f.Changed {
			var value any = f.Value.String()
			if list, ok := f.Value.(pflag.SliceValue); ok {
				// String adds brackets. A flag that is set to nothing means an empty list.
				value = slices.DeleteFunc(list.GetSlice(), func(text string) bool { return text == "" })
			}
			r.v.Set(key, value)
			r.s.origins[key] = OriginFlag
			return
		}
	}
	section, name, nested := strings.Cut(key, ".")
	names := []string{envName(section)}
	if nested {
		names = []string{envName(section + "-" + name), envName(name)}
		if o.Alias != "" {
			names = append(names, envName(o.Alias))
		}
	}
	for _, env := range names {
		if value, ok := os.LookupEnv(env); ok && value != "" {
			r.v.Set(key, value)
			r.s.origins[key] = OriginEnvironment
			return
		}
	}
	if r.v.InConfig(key) {
		r.s.origins[key] = OriginFile
	}
}

// show adds the value of key to those that are shown to users.
func (r *reader) show(key string) {
	origin := OriginDefault
	if o, ok := r.s.origins[key]; ok {
		origin = o
	}
	value := urlPassword.ReplaceAllString(fmt.Sprint(r.v.Get(key)), "${1}xxxxx@")
	r.s.Values = append(r.s.Values, Value{key, value, string(origin)})
}

// urlPassword matches the password in a setting such as --master.
var urlPassword = regexp.MustCompile(`(://[^/@\s]*:)[^/@\s]*@`)

// decode decodes the values into the structs of the settings. An option without a field is an error.
func (r *reader) decode() error {
	values := r.v.AllSettings()
	for _, section := range r.s.schema.Sections {
		config := section.Config()
		if err := decodeInto(config, values[section.Name]); err != nil {
			return fmt.Errorf("%s: %w", section.Name, err)
		}
		r.s.sections[section.Name] = config
		delete(values, section.Name)
	}
	return decodeInto(&r.s.Common, values)
}

// decodeInto decodes values into the struct that target points to.
func decodeInto(target, values any) error {
	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: target, ErrorUnused: true, WeaklyTypedInput: true,
		DecodeHook: mapstructure.ComposeDecodeHookFunc(
			mapstructure.TextUnmarshallerHookFunc(),
			decodeDuration,
			refuseConversions,
			mapstructure.StringToSliceHookFunc(","),
		),
	})
	if err != nil {
		return err
	}
	return oneLine(decoder.Decode(values))
}

// oneLine returns an error of the decoder without its headline and line breaks.
func oneLine(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	if _, list, found := strings.Cut(text, "\n\n"); found {
		text = list
	}
	return errors.New(strings.ReplaceAll(text, "\n", "; "))
}

// decodeDuration converts text to a duration, and returns an error for a number other than 0: the decoder would take it
// as nanoseconds.
func decodeDuration(_, to reflect.Type, value any) (any, error) {
	if to != reflect.TypeFor[time.Duration]() {
		return value, nil
	}
	switch v := value.(type) {
	case string:
		return time.ParseDuration(v)
	case bool, float64:
		if v != 0.0 {
			return nil, fmt.Errorf("needs a unit, such as 30s, got %v", v)
		}
	}
	return value, nil
}

// refuseConversions returns an error for a value of the configuration file that the decoder would convert to
// another one, although the flag refuses it.
func refuseConversions(_, to reflect.Type, value any) (any, error) {
	_, isBool := value.(bool)
	number, isNumber := value.(float64)
	want := ""
	switch to.Kind() {
	case reflect.Bool:
		if isNumber && number != 0 && number != 1 || value == "" {
			want = "true or false"
		}
	case reflect.Int:
		if isBool || isNumber && number != math.Trunc(number) || value == "" {
			want = "a whole number"
		}
	case reflect.Float64:
		if isBool || value == "" {
			want = "a number"
		}
	case reflect.String:
		if isBool { // off, on, yes and no, too
			want = "text in quotes"
		}
	}
	if want != "" {
		return nil, fmt.Errorf("must be %s, got %#v", want, value)
	}
	return value, nil
}

// envName returns the environment variable of an option.
func envName(option string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(option, "-", "_"))
}

// ofService matches the variables that Kubernetes sets for Services whose names begin with storage-controller.
var ofService = regexp.MustCompile(`_(SERVICE_(HOST|PORT(_[^=]+)?)|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)=|_PORT=[a-z]+://`)

// UnknownVariables returns the items of environ that have the prefix of options but set none. Variables
// of Services are not among them.
func (s Schema) UnknownVariables(environ []string) []string {
	known := map[string]bool{envName("config"): true}
	for _, o := range slices.Concat(s.Common, s.Shared) {
		known[envName(o.Name)] = true
	}
	for _, section := range s.Sections {
		for _, o := range section.Options {
			known[envName(o.Name)], known[envName(section.Name+"-"+o.Name)] = true, true
		}
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
