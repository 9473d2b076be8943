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
	"github.com/storage-controller/storage-controller/topolvm"
)

// Origin is the source of a setting.
type Origin string

// The sources.
const (
	OriginDefault     Origin = "default"
	OriginDerived     Origin = "derived" // from the name of the driver
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

// Resolve completes c for driver: settings that were not set get the values derived from the name of the driver. An empty text
// counts as not set. It also returns all settings by name.
func (c Config) Resolve(driver string) (Config, []Setting, error) {
	switch {
	case driver == "":
		return c, nil, errors.New("--driver-name: must be set without a connection to the driver")
	case c.DriverName != "" && c.DriverName != driver:
		return c, nil, fmt.Errorf("--driver-name: is %q, but the driver reports %q; remove the flag, or connect to the other driver",
			c.DriverName, driver)
	}
	values, origins := c.values(), c.origins()
	for name, value := range derived(driver, c.PVCFinalizerMode) {
		if _, set := origins[name]; !set || values[name] == "" {
			values[name], origins[name] = value, OriginDerived
		}
	}
	if c.DriverName == "" {
		values["driver-name"], origins["driver-name"] = driver, OriginDerived
	}
	if c.SkipNodeFinalize && values["node-cleanup"] != nodecleanup.ModeOff {
		values["node-cleanup"], origins["node-cleanup"] = nodecleanup.ModeOff, OriginDerived
	}
	return c.with(values), settings(values, origins), nil
}

// MayBeDerived reports whether the name of a driver may replace the default of a setting.
func MayBeDerived(name string) bool {
	return name == "driver-name" || derived(topolvm.Driver, "")[name] != nil
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
		panic(fmt.Sprintf("nodecontroller: %v", err)) // a derived value has the wrong name or type; a test decodes all of them
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
