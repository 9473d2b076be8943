// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import "slices"

// driverHealth is the flag that replaces livenessprobe. Every command with a role has it.
const driverHealth = "driver-health-endpoint"

// addHealthCheck adds a livenessprobe to the first group whose new container calls the same driver. It reports
// whether there is one; otherwise livenessprobe is kept.
func addHealthCheck(groups []*group, s *source) bool {
	i := slices.IndexFunc(groups, func(g *group) bool {
		_, known := g.m.Tables.flag(g.command, driverHealth)
		return known && !slices.ContainsFunc(g.sources, func(have *source) bool {
			return have.socket() != s.socket() || have.kind == livenessprobe || mountConflict(have, s) != ""
		})
	})
	if i >= 0 {
		groups[i].sources = append(groups[i].sources, s)
	}
	return i >= 0
}

// prepareLivenessprobe translates the flags of livenessprobe.
func (s *source) prepareLivenessprobe(g *group) {
	endpoint := newSetting(driverHealth, ":9808") // the default port of livenessprobe
	var flags []setting
	for _, f := range s.flags {
		switch f.name {
		case "csi-address", "probe-timeout":
			flags = append(flags, f)
		case "http-endpoint":
			endpoint = f
			noteMetrics(g, s, f)
		case "health-port":
			endpoint = f
			endpoint.value, endpoint.expanded = ":"+f.value, ":"+f.expanded
		case "metrics-address":
			noteMetrics(g, s, f)
		case "v", "metrics-path": // of a program that does not run any more
		default:
			g.changed("--%s=%s of %s was dropped: the health check has no such flag", f.name, f.value, s.name)
		}
	}
	endpoint.name, endpoint.bare = driverHealth, false
	s.flags = append(flags, endpoint)
}

// noteMetrics notes where the metrics of livenessprobe are now, and what still reads them at its address.
func noteMetrics(g *group, s *source, f setting) {
	if (ports{g}).server() != nil {
		g.changed("the metrics of %s at %s are now among those of the roles, at --http-endpoint", s.name, f.value)
	} else {
		g.changed("the metrics of %s at %s are not served any more, because --http-endpoint is not set. Set it to serve the metrics of "+
			"this container", s.name, f.value)
	}
	for _, ref := range references(g.m.objects, g.object, []string{portOf(f.expanded)}) {
		g.must("%s of %s is %s, which does not serve the metrics of %s any more. If it reads them, correct it",
			ref.field, ref.object, ref.port, s.name)
	}
}

// healthFlags returns the flags of the health check, for a command that has those of one sidecar otherwise.
func healthFlags(g *group) []setting {
	var flags []setting
	for _, s := range g.sources[1:] {
		for _, f := range s.flags {
			if s.kind == livenessprobe && f.name != "csi-address" {
				flags = append(flags, f)
			}
		}
	}
	return flags
}
