package nodecontroller

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"
)

// Origin is where the value of a setting comes from.
type Origin string

// The origins. The last three are explicit: no profile changes such a setting.
const (
	OriginDefault     Origin = "default"
	OriginDerived     Origin = "derived" // from the name of the driver
	OriginProfile     Origin = "profile"
	OriginFlag        Origin = "flag"
	OriginEnvironment Origin = "environment"
	OriginFile        Origin = "file"
)

// Setting is the value in effect of one setting.
type Setting struct {
	Name   string // that of its flag
	Value  string
	Origin Origin
}

// Driver is the name of the driver as far as it is known without asking it: as it was
// set, else as the profile expects it, else empty.
func (c Config) Driver() string {
	if c.DriverName != "" {
		return c.DriverName
	}
	p, _ := c.profile() // an unknown profile is an error of Resolve and Validate
	return p.driver
}

// Resolve is c for driver, with the presets of its profile and the names that follow
// from the driver filled in wherever nothing was set. A text that was set to nothing
// counts as not set. The settings are in the order of the fields of [Config].
func (c Config) Resolve(driver string) (Config, []Setting, error) {
	p, err := c.profile()
	switch {
	case err != nil:
		return c, nil, err
	case driver == "":
		return c, nil, errors.New("--driver-name: must be set where neither a connection to the driver nor a profile tells its name")
	case c.DriverName != "" && c.DriverName != driver:
		return c, nil, fmt.Errorf("--driver-name: is %q, but the driver calls itself %q; leave the flag out, or connect to the other driver", c.DriverName, driver)
	case p.driver != "" && p.driver != driver:
		return c, nil, fmt.Errorf("--profile: %s is for the driver %q, but the driver is %q; choose another profile, or %s", c.Profile, p.driver, driver, ProfileNone)
	}
	origins := c.origins()
	values := reflect.ValueOf(&c).Elem()
	fill := func(origin Origin, presets map[string]any) {
		for name, preset := range presets {
			field := values.Field(fields()[name])
			empty := field.Kind() == reflect.String && field.Len() == 0
			if _, set := origins[name]; !set || empty {
				field.Set(reflect.ValueOf(preset))
				origins[name] = origin
			}
		}
	}
	fill(OriginProfile, p.presets)
	fill(OriginDerived, derived(driver))
	if c.DriverName == "" {
		c.DriverName, origins["driver-name"] = driver, OriginDerived
		if p.driver != "" {
			origins["driver-name"] = OriginProfile
		}
	}
	if c.SkipNodeFinalize && c.NodeCleanup != CleanupOff {
		c.NodeCleanup, origins["node-cleanup"] = CleanupOff, OriginDerived
	}
	return c, c.settings(origins), nil
}

// MayBePreset tells whether a setting that nobody sets may get its value from a profile
// or from the name of the driver, instead of its default.
func MayBePreset(name string) bool {
	if _, ok := derived("")[name]; ok {
		return true
	}
	for _, p := range profiles {
		if _, ok := p.presets[name]; ok {
			return true
		}
	}
	return name == "driver-name"
}

// origins is the explicit settings of c, in a map of the caller's own.
func (c Config) origins() map[string]Origin {
	if c.Explicit != nil {
		return maps.Clone(c.Explicit)
	}
	origins := map[string]Origin{}
	have, def := reflect.ValueOf(c), reflect.ValueOf(DefaultConfig())
	for name, i := range fields() {
		if !reflect.DeepEqual(have.Field(i).Interface(), def.Field(i).Interface()) {
			origins[name] = OriginFlag
		}
	}
	return origins
}

// settings are all settings of c, which must be resolved.
func (c Config) settings(origins map[string]Origin) []Setting {
	values := reflect.ValueOf(c)
	settings := make([]Setting, 0, values.NumField())
	for i := range values.NumField() {
		name := flagName(values.Type().Field(i))
		if name == "" {
			continue
		}
		origin, ok := origins[name]
		if !ok {
			origin = OriginDefault
		}
		settings = append(settings, Setting{Name: name, Value: text(values.Field(i).Interface()), Origin: origin})
	}
	return settings
}

func text(value any) string {
	if list, ok := value.([]string); ok {
		return strings.Join(list, ", ")
	}
	return fmt.Sprint(value)
}

// fields are the indexes of the fields of [Config] by the names of their flags.
var fields = sync.OnceValue(func() map[string]int {
	byName := map[string]int{}
	t := reflect.TypeFor[Config]()
	for i := range t.NumField() {
		if name := flagName(t.Field(i)); name != "" {
			byName[name] = i
		}
	}
	return byName
})

// flagName is empty for fields that no operator sets.
func flagName(f reflect.StructField) string {
	name := f.Tag.Get("mapstructure")
	if name == "-" {
		return ""
	}
	return name
}
