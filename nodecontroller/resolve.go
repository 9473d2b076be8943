// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/go-viper/mapstructure/v2"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// Origin is the source of a setting.
type Origin string

// The sources. A profile changes no setting with one of the last three.
const (
	OriginDefault     Origin = "default"
	OriginDerived     Origin = "derived" // from the name of the driver
	OriginProfile     Origin = "profile"
	OriginFlag        Origin = "flag"
	OriginEnvironment Origin = "environment"
	OriginFile        Origin = "file"
)

// Setting is a setting in effect.
type Setting struct {
	Name   string // of the flag
	Value  string
	Origin Origin
}

// Driver returns the name of the driver as far as it is known without a connection to it: the
// one that was set, or the one that the profile requires, or an empty text.
func (c Config) Driver() string {
	if c.DriverName != "" {
		return c.DriverName
	}
	p, _ := c.profile() // Resolve and Validate report an unknown profile
	return p.driver
}

// Resolve completes c for driver: settings that were not set get the presets of the profile, then the names
// derived from the driver. An empty text counts as not set. It also returns all settings by name.
func (c Config) Resolve(driver string) (Config, []Setting, error) {
	p, err := c.profile()
	switch {
	case err != nil:
		return c, nil, err
	case driver == "":
		return c, nil, errors.New("--driver-name: must be set if neither a connection to the driver nor a profile provides it")
	case c.DriverName != "" && c.DriverName != driver:
		return c, nil, fmt.Errorf("--driver-name: is %q, but the driver reports %q; remove the flag, or connect to the other driver",
			c.DriverName, driver)
	case p.driver != "" && p.driver != driver:
		return c, nil, fmt.Errorf("--profile: %s requires the driver %q, but the driver is %q; choose another profile, or %s",
			c.Profile, p.driver, driver, ProfileNone)
	}
	values, origins := c.values(), c.origins()
	fill := func(origin Origin, presets map[string]any) {
		for name, preset := range presets {
			if _, set := origins[name]; !set || values[name] == "" {
				values[name], origins[name] = preset, origin
			}
		}
	}
	fill(OriginProfile, p.presets)
	fill(OriginDerived, derived(driver))
	if c.DriverName == "" {
		values["driver-name"], origins["driver-name"] = driver, OriginDerived
		if p.driver != "" {
			origins["driver-name"] = OriginProfile
		}
	}
	if c.SkipNodeFinalize && values["node-cleanup"] != nodecleanup.ModeOff {
		values["node-cleanup"], origins["node-cleanup"] = nodecleanup.ModeOff, OriginDerived
	}
	return c.with(values), settings(values, origins), nil
}

// MayBePreset reports whether a profile or the name of the driver may replace the default of a setting.
func MayBePreset(name string) bool {
	presets := []map[string]any{derived("")}
	for _, p := range profiles {
		presets = append(presets, p.presets)
	}
	return name == "driver-name" || slices.ContainsFunc(presets, func(m map[string]any) bool { return m[name] != nil })
}

// values returns the settings of c by the names of their flags.
func (c Config) values() map[string]any {
	values := map[string]any{}
	if err := mapstructure.Decode(c, &values); err != nil {
		panic(fmt.Sprintf("nodecontroller: %v", err)) // the types are those of Config
	}
	return values
}

// with returns a copy of c with these values.
func (c Config) with(values map[string]any) Config {
	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{Result: &c, ZeroFields: true, ErrorUnused: true})
	if err == nil {
		err = decoder.Decode(values)
	}
	if err != nil {
		panic(fmt.Sprintf("nodecontroller: %v", err)) // a preset has the wrong name or type; a test decodes all of them
	}
	return c
}

// origins returns the sources of the explicit settings of c.
func (c Config) origins() map[string]Origin {
	if c.Explicit != nil {
		return maps.Clone(c.Explicit)
	}
	origins, defaults := map[string]Origin{}, DefaultConfig().values()
	for name, value := range c.values() {
		if !reflect.DeepEqual(value, defaults[name]) {
			origins[name] = OriginFlag
		}
	}
	return origins
}

// settings returns values as they are shown to users, by name.
func settings(values map[string]any, origins map[string]Origin) []Setting {
	var all []Setting
	for _, name := range slices.Sorted(maps.Keys(values)) {
		s := Setting{Name: name, Value: fmt.Sprint(values[name]), Origin: OriginDefault}
		if list, ok := values[name].([]string); ok {
			s.Value = strings.Join(list, ", ")
		}
		if origin, ok := origins[name]; ok {
			s.Origin = origin
		}
		all = append(all, s)
	}
	return all
}
