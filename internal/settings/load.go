// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// Load sets the options of s, which have their defaults, to flags, environment and configuration file, in this order of
// precedence. fs has the flags of [Register]. The option of a role, in its section or with its prefix, takes precedence over the
// common one from the same source.
func (s *Set) Load(fs *pflag.FlagSet, sections ...Section) error {
	file, err := s.readFile(fs)
	if err != nil {
		return err
	}
	v := viper.New()
	if err := v.MergeConfigMap(file); err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	s.origins = map[string]Origin{}
	contradictions := []error{flagsOfSections(sections)}
	var numbers []error
	var wrong error
	for _, g := range s.Groups {
		var ofGroup []string
		g.Flags.VisitAll(func(f *pflag.Flag) {
			if slices.Contains(flagOnly, f.Name) {
				return
			}
			key := g.key(f.Name)
			value, origin, err := g.find(v, fs, f, sections)
			if err == nil && g.Name == "" && !g.Unused {
				value, origin, err = s.agree(f, value, origin, sections)
			}
			contradictions = append(contradictions, err)
			if value != nil {
				if err := checkNumber(f, value); err != nil {
					numbers = append(numbers, fmt.Errorf("%s: %w", key, err))
				} else if err := setTo(f, value); err != nil {
					ofGroup = append(ofGroup, fmt.Sprintf("'%s' %v", f.Name, err))
				}
			}
			if origin != "" {
				s.origins[key] = origin
			}
			if !g.Unused || g.Separate && origin != "" {
				s.show(key, value, f)
			}
		})
		if wrong == nil && len(ofGroup) > 0 { // a wrong value at the top is wrong for every role
			wrong = errors.New(strings.TrimPrefix(g.Name+": ", ": ") + strings.Join(ofGroup, "; "))
		}
	}
	fs.Visit(func(f *pflag.Flag) {
		if _, ok := f.Value.(noOp); ok {
			s.NoOps = append(s.NoOps, f.Name)
		}
	})
	if err := errors.Join(contradictions...); err != nil {
		return err
	}
	if err := cmp.Or(errors.Join(numbers...), wrong); err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	return nil
}

// flagsOfSections returns an error for each flag that sections must not set.
func flagsOfSections(sections []Section) error {
	var errs []error
	for _, section := range sections {
		for _, name := range flagOnly {
			if changed(section.Flags, name) != nil {
				errs = append(errs, fmt.Errorf("section %s: --%s: set it before the first section", section.Name, name))
			}
		}
	}
	return errors.Join(errs...)
}

// find returns the value of the option f from the source with the highest precedence, and this source. It returns nil if
// the option was not set.
func (g Group) find(v *viper.Viper, fs *pflag.FlagSet, f *pflag.Flag, sections []Section) (any, Origin, error) {
	key := g.key(f.Name)
	if g.Name == "" && g.Unused { // only the file sets it: the variable may be for another container, with another command
		return v.Get(key), "", nil
	}
	prefixed := strings.ReplaceAll(key, ".", "-")
	for _, section := range sections {
		if !slices.Contains(section.Roles, g.Name) {
			continue
		}
		if own := changed(section.Flags, f.Name, alias(f)); own != nil {
			if changed(fs, prefixed) != nil {
				return nil, "", fmt.Errorf("--%s and --%s in section %s: only one of them may be set", prefixed, own.Name, section.Name)
			}
			return given(own), OriginFlag, nil
		}
	}
	if !g.Unused {
		if set := changed(fs, prefixed, f.Name, alias(f)); set != nil {
			return given(set), OriginFlag, nil
		}
	}
	variables := g.variables(f)
	_ = v.BindEnv(append([]string{key}, variables...)...) // fails without a key
	if slices.ContainsFunc(variables, func(name string) bool { return os.Getenv(name) != "" }) {
		return v.Get(key), OriginEnvironment, nil
	}
	keys := []string{key, f.Name, alias(f)} // of the role, then at the top
	if g.Separate {
		keys = keys[:1]
	}
	for _, key := range keys {
		if value := v.Get(key); value != nil {
			return value, OriginFile, nil
		}
	}
	return nil, "", nil
}

// given returns what a flag was set to: a list, or a text.
func given(f *pflag.Flag) any {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		// String adds brackets. A flag that is set to nothing means an empty list.
		return slices.DeleteFunc(slices.Clone(list.GetSlice()), func(text string) bool { return text == "" })
	}
	return f.Value.String()
}

// show adds an option to those that are shown to users. value is nil for the default.
func (s *Set) show(key string, value any, f *pflag.Flag) {
	if value == nil {
		value = f.Value
	}
	text := urlPassword.ReplaceAllString(fmt.Sprint(value), "${1}xxxxx@")
	s.Values = append(s.Values, Value{key, text, string(cmp.Or(s.origins[key], OriginDefault))})
}

// urlPassword matches the password in a setting such as --master.
var urlPassword = regexp.MustCompile(`(://[^/@\s]*:)[^/@\s]*@`)

// maxThreads is the number of threads and workers that an option can set. Each takes memory, and is a call of the driver at a time.
const maxThreads = 10_000

// checkNumber returns an error if value is a number that the option f must not have.
func checkNumber(f *pflag.Flag, value any) error {
	kind := f.Value.Type()
	if kind != "int" && kind != "uint" {
		return nil
	}
	most := float64(math.MaxInt32)
	if strings.HasSuffix(f.Name, "threads") || strings.HasSuffix(f.Name, "workers") {
		most = maxThreads
	}
	least := -most
	if kind == "uint" {
		least = 0
	}
	number, err := strconv.ParseFloat(fmt.Sprint(value), 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax): // setTo refuses it
		return nil
	case number > most:
		return fmt.Errorf("must be at most %.0f, got %.0f", most, number)
	case number < least:
		return fmt.Errorf("must be at least %.0f, got %.0f", least, number)
	}
	return nil
}

// setTo sets f to value, which is a text, a list of texts, or anything else that YAML has.
func setTo(f *pflag.Flag, value any) error {
	switch v := f.Value.(type) {
	case pflag.SliceValue:
		texts, err := textsOf(value)
		if err != nil {
			return err
		}
		return v.Replace(texts)
	case *Names, *Gates, *Pairs:
		texts, err := textsOf(value)
		if _, pairs := v.(*Pairs); err != nil || pairs && len(texts) == 0 { // the flag needs a pair
			return err
		}
		return v.Set(strings.Join(texts, ","))
	}
	kind := f.Value.Type()
	text, err := textOf(kind, value)
	if err != nil {
		return err
	}
	err = f.Value.Set(text)
	switch kind {
	case "bool", "int", "uint", "float64", "duration": // the error would not contain the value
		if err != nil {
			return fmt.Errorf("%s, got %#v", wanted[kind], value)
		}
	}
	return err
}

// textsOf returns value as the texts for a list. A text has them separated by commas.
func textsOf(value any) ([]string, error) {
	var items []any
	switch v := value.(type) {
	case []string:
		return v, nil
	case []any:
		items = v
	case string:
		if v == "" {
			return []string{}, nil
		}
		return strings.Split(v, ","), nil
	default:
		items = []any{value}
	}
	texts := []string{}
	for _, item := range items {
		text, err := textOf("string", item)
		if err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return texts, nil
}

// wanted describes the values of each type of flags.
var wanted = map[string]string{
	"bool": "must be true or false", "int": "must be a whole number", "uint": "must be a whole number", "float64": "must be a number",
	"string": "must be text in quotes", "duration": "must be a time with a unit, such as 30s",
}

// textOf returns value as the text for a flag. It returns an error for a value that YAML has read as another type than the
// user may have meant, such as off or a time without a unit.
func textOf(kind string, value any) (string, error) {
	switch v := value.(type) {
	case string:
		return v, nil
	case bool:
		if kind == "bool" {
			return strconv.FormatBool(v), nil
		}
	case float64:
		if kind != "duration" || v == 0 {
			return strconv.FormatFloat(v, 'f', -1, 64), nil
		}
	}
	return "", fmt.Errorf("%s, got %v", wanted[kind], value)
}
