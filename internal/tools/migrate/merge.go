// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// merger merges the flags of the sources of a group into those of a command that runs several roles.
type merger struct{ *group }

// candidate is a setting of one source.
type candidate struct {
	setting
	source *source
}

// flags returns the merged flags, in the order in which the sources have them.
func (g merger) flags() []setting {
	var out []setting
	done := map[string]bool{}
	for _, s := range g.sources {
		for _, f := range s.flags {
			if !done[f.name] {
				done[f.name] = true
				out = append(out, g.merge(f.name)...)
			}
		}
	}
	return out
}

// merge returns what the new container has for one flag of the sources.
func (g merger) merge(name string) []setting {
	var all []candidate
	for _, s := range g.sources {
		if f, ok := s.lookup(name); ok {
			all = append(all, candidate{f, s})
		}
	}
	if len(g.m.Tables.rolesWith(name)) > 0 {
		return g.perRole(name, all)
	}
	preferred := all
	switch name {
	case "csi-address": // every path leads to the same socket, which has the mount of the first container
		if all[0].source != g.sources[0] {
			return nil // that has the default
		}
		return []setting{all[0].setting}
	case "leader-election":
		return g.election(all)
	case "leader-election-lease-duration", "leader-election-renew-deadline", "leader-election-retry-period":
		return g.leaseTiming(name, all)
	case "leader-election-labels", "feature-gates":
		return []setting{g.union(name, all)}
	case "http-endpoint", "metrics-address", "metrics-path":
		return g.endpoint(name, all)
	case "v", "kube-api-qps", "kube-api-burst":
		return []setting{g.largest(name, all)}
	case "leader-election-namespace":
		preferred = slices.DeleteFunc(slices.Clone(all), func(c candidate) bool { return g.leaseNamespace(c.source) == "" })
		if len(preferred) == 0 && g.elects() {
			return nil // those that elect have the default
		}
	}
	if len(preferred) == 0 {
		preferred = all
	}
	chosen := preferred[0]
	if name == "max-grpc-log-length" && len(all) < len(g.counted()) {
		g.changed("--%s=%s of %s applies to all roles", name, chosen.value, chosen.source.name)
	}
	for _, c := range all {
		if c.expanded != chosen.expanded {
			g.changed("--%s=%s of %s was dropped: it applies to all roles, and %s has %s",
				name, c.value, c.source.name, chosen.source.name, chosen.value)
		}
	}
	return []setting{chosen.setting}
}

func allEqual(all []candidate) bool {
	return !slices.ContainsFunc(all, func(c candidate) bool { return c.expanded != all[0].expanded })
}

// perRole merges a flag that each role may have for itself. It is set for all roles if all have
// the same value, otherwise with the prefix of each role. Without the prefix it also sets roles
// that have it as an alias, which no sidecar has.
func (g merger) perRole(name string, all []candidate) []setting {
	roles := g.m.Tables.rolesWith(name)
	having := 0
	for _, r := range g.m.Tables.Roles {
		if slices.Contains(g.roles(), r.Name) && (slices.Contains(r.Options, name) || slices.Contains(r.Aliases, name)) {
			having++
		}
	}
	var out []setting
	for _, c := range all {
		for _, r := range c.source.roles {
			if !slices.Contains(roles, r) {
				continue
			}
			f := c.setting
			if len(out) > 0 {
				f.node = &yaml.Node{} // the first one has its comment
			}
			if _, prefixed := g.m.Tables.flag(g.command, r+"-"+name); prefixed {
				f.name = r + "-" + name
			}
			out = append(out, f)
		}
	}
	switch {
	case len(out) == 0:
		g.info("--%s=%s of %s was dropped: its role did not run", name, all[0].value, all[0].source.name)
	case len(out) == having && allEqual(all):
		return []setting{all[0].setting}
	}
	return out
}

// endpoint selects the flags of the source whose address the new container has.
func (g merger) endpoint(name string, all []candidate) []setting {
	server := ports(g).server()
	var out []setting
	for _, c := range all {
		switch {
		case c.source == server:
			out = append(out, c.setting)
		case name == "metrics-path":
			g.changed("--metrics-path=%s of %s was dropped: all roles have the same metrics endpoint", c.value, c.source.name)
		}
	}
	return out
}

// largest selects the largest number.
func (g merger) largest(name string, all []candidate) setting {
	number := func(c candidate) float64 {
		n, _ := strconv.ParseFloat(c.expanded, 64)
		if name == "kube-api-qps" && n < 0 { // no limit
			return math.Inf(1)
		}
		return n
	}
	chosen := slices.MaxFunc(all, func(a, b candidate) int { return cmp.Compare(number(a), number(b)) })
	if name == "v" && !allEqual(all) {
		g.info("--v=%s, the largest value, applies to all roles", chosen.value)
	}
	return chosen.setting
}

// enumerate joins items with commas and "and".
func enumerate(all []string) string {
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}

// election enables leader election if a source has it enabled.
func (g merger) election(all []candidate) []setting {
	i := slices.IndexFunc(all, func(c candidate) bool { return isTrue(c.expanded) })
	if i < 0 {
		return []setting{all[0].setting}
	}
	for _, s := range g.sources {
		if s.kind != livenessprobe && !s.on(g.m.Tables, "leader-election") {
			g.must("%s had no leader election; now it has, because %s had it. An old replica of %s ignores the Lease: "+
				"scale the old workload to 0 before the first rollout", s.name, all[i].source.name, s.name)
		}
	}
	return []setting{all[i].setting}
}

// leaseTiming takes the three durations of leader election from one source, because they depend
// on each other: the one with the longest Lease.
func (g merger) leaseTiming(name string, all []candidate) []setting {
	const lease, renew, retry = "leader-election-lease-duration", "leader-election-renew-deadline", "leader-election-retry-period"
	timing := func(s *source) string {
		return s.get(g.m.Tables, lease) + ", " + s.get(g.m.Tables, renew) + ", " + s.get(g.m.Tables, retry)
	}
	duration := func(s *source) time.Duration {
		d, _ := time.ParseDuration(s.get(g.m.Tables, lease))
		return d
	}
	electing := slices.DeleteFunc(slices.Clone(g.sources), func(s *source) bool { return !s.on(g.m.Tables, "leader-election") })
	if len(electing) == 0 {
		return []setting{all[0].setting}
	}
	chosen := slices.MaxFunc(electing, func(a, b *source) int { return cmp.Compare(duration(a), duration(b)) })
	if slices.ContainsFunc(electing, func(s *source) bool { return timing(s) != timing(electing[0]) }) {
		g.changed("the timings of leader election differ. Those of %s were kept (%s), because it has the longest Lease duration",
			chosen.name, timing(chosen))
	}
	if f, ok := chosen.lookup(name); ok {
		return []setting{f}
	}
	return nil // the default
}

// union merges a list of pairs. The first value of a key wins.
func (g merger) union(name string, all []candidate) setting {
	out := all[0].setting
	have := map[string]string{}
	var items []string
	for _, c := range all {
		for item := range strings.SplitSeq(c.value, ",") {
			key, value, _ := strings.Cut(strings.ReplaceAll(item, ":", "="), "=")
			before, exists := have[key]
			switch {
			case !exists:
				have[key] = value
				items = append(items, item)
			case before != value:
				g.changed("%s in --%s of %s was dropped: another container has %s", item, name, c.source.name, before)
			}
		}
	}
	if value, gated := have[attributesClass]; name == "feature-gates" && gated {
		g.noteSharedGate(value)
	}
	out.value = strings.Join(items, ",")
	out.expanded = Expand(out.value, all[0].source.env)
	return out
}

// attributesClass is the feature gate that csi-provisioner and csi-resizer both have.
const attributesClass = "VolumeAttributesClass"

// noteSharedGate notes that the gate of one sidecar applies to the other, too.
func (g merger) noteSharedGate(value string) {
	for _, s := range g.sources {
		if (s.kind == csiProvisioner || s.kind == csiResizer) && !s.namesGate(attributesClass) {
			g.changed("the feature gate %s=%s also applies to the %s, whose sidecar did not set it", attributesClass, value, s.roles[0])
		}
	}
}
