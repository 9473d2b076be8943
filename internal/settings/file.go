// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// The header of a configuration file.
const (
	configAPIVersion = "config.storage-controller.io/v1alpha1"
	configKind       = "StorageControllerConfiguration"
)

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

// readFile returns the content of the file of --config. Unknown keys are an error.
func (s *Set) readFile(fs *pflag.FlagSet) (map[string]any, error) {
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
	if err := s.checkFile(file); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	joinMaps(file)
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

// checkFile returns an error for each unknown key of file, and for a wrong header.
func (s *Set) checkFile(file map[string]any) error {
	var errs []error
	if file["apiVersion"] != configAPIVersion || file["kind"] != configKind {
		errs = append(errs, fmt.Errorf("must begin with apiVersion: %s and kind: %s", configAPIVersion, configKind))
	}
	known := s.Keys()
	for _, key := range slices.Sorted(maps.Keys(file)) {
		if !slices.Contains(known, key) || strings.Contains(key, ".") {
			errs = append(errs, errors.New(unknownKey(key, key)))
		}
	}
	for _, section := range s.Roles() {
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

// joinMaps replaces maps in file by the text that their flag takes: viper would fold the case of their keys.
func joinMaps(file map[string]any) {
	separators := map[string]string{"feature-gates": "=", "leader-election-labels": ":"}
	for name, value := range file {
		values, ok := value.(map[string]any)
		if !ok {
			continue
		}
		if between := separators[name]; between != "" {
			file[name] = joinMap(values, func(k string, v any) string { return fmt.Sprintf("%s%s%v", k, between, v) })
		} else {
			joinMaps(values) // of a role
		}
	}
}

// File returns s as a configuration file with the same effect.
func (s *Set) File() ([]byte, error) {
	values := map[string]any{"apiVersion": configAPIVersion, "kind": configKind}
	for _, g := range s.Groups {
		own := values
		if g.Name != "" {
			own = map[string]any{}
			values[g.Name] = own
		}
		g.Flags.VisitAll(func(f *pflag.Flag) {
			_, omitted := f.Annotations["omitted"]
			if !slices.Contains(flagOnly, f.Name) && (!omitted || s.Origin(g.key(f.Name)) != "") {
				own[f.Name] = valueInFile(f)
			}
		})
	}
	out, err := yaml.Marshal(values)
	if err != nil {
		return nil, fmt.Errorf("printing the configuration: %w", err)
	}
	return out, nil
}

// valueInFile returns the value of a flag as the file contains it.
func valueInFile(f *pflag.Flag) any {
	switch v := f.Value.(type) {
	case pflag.SliceValue:
		return v.GetSlice()
	case *Names:
		return *v
	case *Pairs:
		return *v
	case *Gates:
		return *v
	}
	text := f.Value.String()
	switch f.Value.Type() {
	case "bool", "int", "uint":
		return json.RawMessage(text)
	case "float64":
		number, _ := strconv.ParseFloat(text, 64) // the flag has formatted it
		return number
	}
	return text
}
