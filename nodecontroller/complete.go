// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// Complete completes c for driver: settings that were not set get the values derived from the name of the driver. set reports
// whether the setting of a flag was set; an empty text counts as not set. It also returns the names of the flags whose settings
// were derived.
func (c Config) Complete(driver string, set func(flag string) bool) (_ Config, names []string, err error) {
	switch {
	case driver == "":
		return c, nil, errors.New("--driver-name: must be set without a connection to the driver")
	case c.DriverName != "" && c.DriverName != driver:
		return c, nil, fmt.Errorf("--driver-name: is %q, but the driver reports %q; remove the flag, or connect to the other driver",
			c.DriverName, driver)
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(fs)
	for name, value := range derived(driver, c.PVCFinalizerMode) {
		if set(name) && fs.Lookup(name).Value.String() != "" {
			continue
		}
		if err := fs.Set(name, value); err != nil {
			panic(fmt.Sprintf("nodecontroller: %v", err)) // the value has the wrong name or type; a test derives all of them
		}
		names = append(names, name)
	}
	if c.SkipNodeFinalize && c.NodeCleanup != nodecleanup.ModeOff {
		c.NodeCleanup = nodecleanup.ModeOff
		names = append(names, "node-cleanup")
	}
	return c, names, nil
}
