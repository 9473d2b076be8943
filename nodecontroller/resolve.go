// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
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
	fs, origins := c.flags(), c.origins()
	derive := func(name, value string) {
		if err := fs.Set(name, value); err != nil {
			panic(fmt.Sprintf("nodecontroller: %v", err)) // the value has the wrong name or type; a test derives all of them
		}
		origins[name] = OriginDerived
	}
	for name, value := range derived(driver, c.PVCFinalizerMode) {
		if _, set := origins[name]; !set || fs.Lookup(name).Value.String() == "" {
			derive(name, value)
		}
	}
	if c.DriverName == "" {
		derive("driver-name", driver)
	}
	if c.SkipNodeFinalize && c.NodeCleanup != nodecleanup.ModeOff {
		derive("node-cleanup", string(nodecleanup.ModeOff))
	}
	return c, settings(fs, origins), nil
}

// flags returns the flags that set the fields of c.
func (c *Config) flags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(fs)
	return fs
}

// origins returns the sources of the explicit settings of c.
func (c Config) origins() map[string]Origin {
	if c.Explicit != nil {
		return maps.Clone(c.Explicit)
	}
	defaults := DefaultConfig()
	origins, unset := map[string]Origin{}, defaults.flags()
	c.flags().VisitAll(func(f *pflag.Flag) {
		if f.Value.String() != unset.Lookup(f.Name).Value.String() {
			origins[f.Name] = OriginFlag
		}
	})
	return origins
}

// settings returns the values of flags as they are shown to users, by name.
func settings(fs *pflag.FlagSet, origins map[string]Origin) []Setting {
	var all []Setting
	fs.VisitAll(func(f *pflag.Flag) {
		s := Setting{Name: f.Name, Value: f.Value.String(), Origin: OriginDefault}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			s.Value = strings.Join(list.GetSlice(), ", ")
		}
		if origin, ok := origins[f.Name]; ok {
			s.Origin = origin
		}
		all = append(all, s)
	})
	return all
}
