// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/csiclient"
)

// mayRun reports whether --controllers allows the role called name.
func mayRun(s Settings, name string) bool {
	c := s.Common.Controllers
	return !slices.Contains(c, "-"+name) && (!namesRoles(s) || slices.Contains(c, name))
}

// namesRoles reports whether --controllers names roles that run, rather than roles that do not.
func namesRoles(s Settings) bool {
	return slices.ContainsFunc(s.Common.Controllers, func(name string) bool { return !strings.HasPrefix(name, "-") })
}

// named reports whether the command or --controllers names r. Such a role must start, and its errors end
// the process. The other roles of "all" are disabled while they cannot run.
func (c Config) named(r Role) bool {
	return !c.all || slices.Contains(c.Common.Controllers, r.Name) && mayRun(c.Settings, r.Name)
}

// Enabled returns c without the roles that the settings disable.
func (c Config) Enabled() Config {
	roles := c.roles
	c.roles = slices.DeleteFunc(slices.Clone(roles), func(r Role) bool {
		always := !c.all && r.Name == roles[0].Name || slices.Contains(c.Common.Controllers, r.Name)
		return !always && r.enabled != nil && !r.enabled(c.Settings)
	})
	return c
}

// skipped is a role that does not run, and why.
type skipped struct {
	role   string
	reason error
}

// choose returns the roles that run for a driver. Named roles run for every driver that they do not refuse; if one refuses it, the
// process must not run. The others run if the driver and the environment support them. known reports whether the capabilities of
// the driver are known; otherwise it may support all.
func (c Config) choose(d csiclient.Driver, known bool) (chosen []Role, others []skipped, err error) {
	var refusals []error
	for _, r := range c.roles {
		if !mayRun(c.Settings, r.Name) {
			continue
		}
		why := c.unsuitable(r, d, known)
		switch {
		case why == nil:
			chosen = append(chosen, r)
		case c.named(r):
			refusals = append(refusals, fmt.Errorf("%s: %w", r.Name, why))
		default:
			others = append(others, skipped{r.Name, why})
		}
	}
	return chosen, others, errors.Join(refusals...)
}

// unsuitable returns why r does not run for a driver; see [Config.choose].
func (c Config) unsuitable(r Role, d csiclient.Driver, known bool) error {
	if r.refused != nil {
		if why := r.refused(c.Settings, d.Name); why != nil {
			return why
		}
	}
	if c.named(r) || !known {
		return nil
	}
	why := r.supported(d)
	if why == nil && r.environment != nil {
		why = r.environment(c.Settings)
	}
	return why
}

// nameWithoutConnection returns the name of the driver if the roles need no connection to it and none was
// requested, else "".
func (c Config) nameWithoutConnection() string {
	if c.service || c.Origin("csi-address") != "" || c.Origin("csi-socket") != "" || len(c.roles) > 1 && !namesRoles(c.Settings) {
		return ""
	}
	name := ""
	for _, r := range c.roles {
		if len(c.roles) > 1 && !mayRun(c.Settings, r.Name) {
			continue
		}
		if r.driverName == nil {
			return ""
		}
		name = r.driverName(c.Settings)
	}
	return name
}
