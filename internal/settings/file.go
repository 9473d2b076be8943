// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// The header of a configuration file.
const (
	configAPIVersion = "config.storage-controller.io/v1alpha1"
	configKind       = "StorageControllerConfiguration"
)

// Keys returns the keys that a configuration file may contain, sorted. A key of a role may be used in
// its section, or at the top for all roles that have it.
func (s Schema) Keys() []string {
	keys := []string{"apiVersion", "kind"}
	for _, o := range slices.Concat(s.Common, s.Shared) {
		if !slices.Contains(flagOnly, o.Name) {
			keys = append(keys, o.Name)
		}
	}
	for _, section := range s.Sections {
		keys = append(keys, section.Name)
		for _, o := range section.Options {
			keys = append(keys, o.Name, section.Name+"."+o.Name)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// ConfigFile returns the path of the configuration file, "" for none.
func ConfigFile(fs *pflag.FlagSet) string {
	switch f := fs.Lookup("config"); {
	case f == nil:
		return ""
	case f.Changed:
		return f.Value.String()
	}
	return os.Getenv(envName("config"))
}

// readConfigFile returns the content of the file of --config without its header. Unknown keys are an
// error. An option of roles at the top is moved into the sections that do not set it.
func readConfigFile(fs *pflag.FlagSet, schema Schema) (map[string]any, error) {
	path := ConfigFile(fs)
	if path == "" {
		return map[string]any{}, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	var file map[string]any
	if err = oneDocument(data); err == nil {
		err = yaml.UnmarshalStrict(data, &file) // of the first document
	}
	if err != nil {
		return nil, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	if err := checkConfig(file, schema); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	joinMaps(file)
	moveIntoSections(file, schema.Sections)
	return file, nil
}

// oneDocument returns an error if data has several YAML documents.
func oneDocument(data []byte) error {
	documents := 0
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		document, err := reader.Read()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		var content any
		if err := yaml.Unmarshal(document, &content); err != nil || content != nil {
			documents++
		}
		if documents > 1 {
			return errors.New("it has several documents, separated by ---. Merge them")
		}
	}
}

// checkConfig returns an error for each unknown key of file, and for a wrong header.
func checkConfig(file map[string]any, schema Schema) error {
	var errs []error
	if file["apiVersion"] != configAPIVersion || file["kind"] != configKind {
		errs = append(errs, fmt.Errorf("must begin with apiVersion: %s and kind: %s", configAPIVersion, configKind))
	}
	known := schema.Keys()
	for _, key := range slices.Sorted(maps.Keys(file)) {
		if !slices.Contains(known, key) || strings.Contains(key, ".") {
			errs = append(errs, errors.New(unknownKey(key, key)))
		}
	}
	for _, section := range schema.Sections {
		content, present := file[section.Name]
		values, ok := content.(map[string]any)
		if present && !ok && content != nil {
			errs = append(errs, fmt.Errorf("key %q: must contain the options of the %s", section.Name, section.Name))
		}
		for _, key := range slices.Sorted(maps.Keys(values)) {
			if name := section.Name + "." + key; !slices.Contains(known, name) {
				errs = append(errs, errors.New(unknownKey(name, key)))
			}
		}
	}
	return errors.Join(errs...)
}

// joinMaps removes the header of file, and replaces maps by the text that their flag takes: viper
// would fold the case of their keys.
func joinMaps(file map[string]any) {
	delete(file, "apiVersion")
	delete(file, "kind")
	for name, between := range map[string]string{"feature-gates": "=", "leader-election-labels": ":"} {
		if values, ok := file[name].(map[string]any); ok {
			file[name] = joinMap(values, func(k string, v any) string { return fmt.Sprintf("%s%s%v", k, between, v) })
		}
	}
}

// moveIntoSections moves the options of roles from the top of file into the sections. An alias of an option is
// the name of one that another role has.
func moveIntoSections(file map[string]any, sections []Section) {
	top := map[string]any{}
	for _, s := range sections {
		for _, o := range s.Options {
			if value, ok := file[o.Name]; ok {
				top[o.Name] = value
			}
		}
	}
	for _, s := range sections {
		values, _ := file[s.Name].(map[string]any)
		if values == nil {
			values = map[string]any{}
		}
		for _, o := range s.Options {
			value, ok := top[o.Name]
			if !ok {
				value, ok = top[o.Alias]
			}
			if _, own := values[o.Name]; ok && !own {
				values[o.Name] = value
			}
		}
		file[s.Name] = values
	}
	for name := range top {
		delete(file, name)
	}
}

// Marshal returns s as a configuration file with the same effect.
func (s Settings) Marshal() ([]byte, error) {
	values := map[string]any{}
	err := mapstructure.Decode(s.Common, &values)
	for _, section := range s.schema.Sections {
		own := map[string]any{}
		err = errors.Join(err, mapstructure.Decode(s.sections[section.Name], &own))
		if section.Preset != nil { // in a file, a default would override the preset
			maps.DeleteFunc(own, func(name string, _ any) bool {
				return section.Preset(name) && s.origins[section.Name+"."+name] == ""
			})
		}
		values[section.Name] = own
	}
	if err != nil {
		return nil, fmt.Errorf("printing the configuration: %w", err)
	}
	if s.origins["csi-address"] == "" { // its presence would request a connection to the driver
		delete(values, "csi-address")
	}
	values = readable(values).(map[string]any)
	values["apiVersion"], values["kind"] = configAPIVersion, configKind
	return yaml.Marshal(values)
}

// readable replaces values such as durations by what the file contains.
func readable(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for k := range v {
			v[k] = readable(v[k])
		}
		return v
	case fmt.Stringer:
		return v.String()
	case Pairs:
		return map[string]string(v)
	case Gates:
		return map[string]bool(v)
	}
	return value
}
