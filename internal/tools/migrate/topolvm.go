// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// legacyVariable selects topolvm.cybozu.com with any value, in topolvm-controller and in the command topolvm.
const legacyVariable = "USE_LEGACY"

// add adds s. topolvm-controller comes first: the socket, the ports and the probes of the new container are its own.
func (g *group) add(s *source) {
	if s.kind == topolvm {
		g.sources, g.serves = slices.Insert(g.sources, 0, s), true
		return
	}
	g.sources = append(g.sources, s)
}

// legacy reports whether the new container serves topolvm.cybozu.com.
func (g *group) legacy() bool {
	return slices.ContainsFunc(g.sources, func(s *source) bool { return s.env[legacyVariable] != "" })
}

// prepareTopolvm writes out the defaults of topolvm-controller, and notes what the command topolvm does differently.
func (s *source) prepareTopolvm(g *group) {
	s.writeTopolvmDefaults(g)
	if !s.on("skip-node-finalize") {
		g.changed("PVCs and LogicalVolumes of a deleted Node are cleaned up after more checks than in %s, and also if the Node was "+
			"deleted without its finalizer: docs/topolvm.md. --node-cleanup=off disables it", s.name)
	}
	g.changed("the metrics of %s have the names of storage-controller: docs/metrics.md", s.name)
	if v, known := s.release(); !known || v.before(0, 40) { // v0.40 needs Kubernetes 1.27
		g.changed("the finalizer topolvm.io/pvc is removed from PVCs, /pvc/mutate changes nothing, and pods of a deleted PVC are not "+
			"deleted, as in TopoLVM v0.40 and later. Before Kubernetes 1.27, set --pvc-finalizer-mode=enforce to keep what %s did",
			s.name)
	}
	for _, f := range s.flags {
		switch {
		case slices.Contains([]string{"minimum-allocation-ext4", "minimum-allocation-xfs", "minimum-allocation-btrfs"}, f.name):
			g.changed("%s takes effect now; topolvm-controller ignores it", f.argument())
		case slices.Contains([]string{"zap-devel", "zap-stacktrace-level", "zap-time-encoding"}, f.name):
			g.changed("%s has no effect: set --logging-format and --v", f.argument())
		}
	}
	if slices.ContainsFunc(g.sources, func(s *source) bool { return s.kind == csiProvisioner }) {
		g.changed("a PVC has the finalizer storage-controller.io/provisioning while its volume is created, so that no LogicalVolume " +
			"leaks. That takes two more requests per volume; to avoid them, set --provisioning-protection=off")
	}
	if len(g.sources) > 1 {
		g.info("--csi-address was dropped: the roles call the service in memory")
	}
}

// driverHealth is the flag of the command topolvm that replaces livenessprobe.
const driverHealth = "driver-health-endpoint"

// writeTopolvmDefaults sets the flags whose default in the command topolvm differs from that of topolvm-controller, or depends on
// the other sources.
func (s *source) writeTopolvmDefaults(g *group) {
	defaults := []setting{newSetting("leader-election", "true"), newSetting("enable-webhooks", "true")}
	if !slices.ContainsFunc(g.sources, func(s *source) bool { return s.kind == livenessprobe }) {
		defaults = append(defaults, newSetting(driverHealth, ""))
	}
	for _, f := range defaults {
		if !s.has(f.name) {
			s.write(f)
		}
	}
}

// isBundled reports whether s is a sidecar in the image of TopoLVM v0.35 or later. Its version is not known, but not older than the
// changes of defaults that matter to TopoLVM.
func (s *source) isBundled() bool {
	controller := source{kind: topolvm, node: s.node}
	v, known := controller.release()
	return known && !v.before(0, 35) && strings.HasPrefix(ImageName(text(get(s.node, "image"))), "topolvm")
}

// topolvmRoles are the roles of the command topolvm, in the order of their names in other manifests.
var topolvmRoles = []string{"provisioner", "capacity", "nodecontroller", "resizer", "snapshotter"}

// roles returns the roles of the command topolvm that do the work of s.
func (s *source) roles() []string {
	switch {
	case s.kind == topolvm:
		return []string{"nodecontroller"}
	case s.kind == livenessprobe:
		return nil
	case s.on("enable-capacity"):
		return []string{"provisioner", "capacity"}
	}
	return []string{strings.TrimPrefix(string(s.kind), "csi-")}
}

// topolvmArguments returns the arguments of the command topolvm. It has no sections: the flags of one role have its name as prefix.
func (g *group) topolvmArguments() []*yaml.Node {
	roles, done := []string{}, map[string]bool{}
	for _, s := range g.sources {
		roles = append(roles, s.roles()...)
		s.toTopolvm(g)
	}
	slices.SortFunc(roles, func(a, b string) int { return slices.Index(topolvmRoles, a) - slices.Index(topolvmRoles, b) })
	flags := []setting{newSetting("controllers", strings.Join(roles, ","))}
	for _, s := range g.sources {
		for _, f := range s.flags {
			if !done[f.name] {
				done[f.name] = true
				flags = append(flags, g.topolvmFlags(f.name, roles)...)
			}
		}
	}
	args := []*yaml.Node{scalar("topolvm")}
	g.known = []string{"topolvm"}
	for _, f := range flags {
		arg := scalar(f.argument())
		if f.node != nil {
			arg.Style = f.node.Style & (yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle)
			arg.HeadComment, arg.LineComment, arg.FootComment = f.node.HeadComment, f.node.LineComment, f.node.FootComment
		}
		args, g.known = append(args, arg), append(g.known, f.String())
	}
	return args
}

// toTopolvm gives the flags of s the names that they have in the command topolvm, and drops those that it does not have.
func (s *source) toTopolvm(g *group) {
	if s.kind == livenessprobe {
		s.healthFlags(g)
		return
	}
	var kept []setting
	for _, f := range s.flags {
		switch { // the other roles have flags of these names
		case s.kind == csiResizer && f.name == "worker-threads":
			f.name = "workers"
		case s.kind == csiResizer && f.name == "resync":
			f.name = "resync-period"
		}
		f.value = s.literal(f.value, s.differing)
		if _, known := g.m.Tables.Flags["topolvm"][f.name]; known {
			kept = append(kept, f)
		} else {
			s.literals = append(s.literals, FlagChange{f.argument(), ""})
		}
	}
	s.flags = kept
}

// healthFlags replaces the flags of a livenessprobe by those of the health check.
func (s *source) healthFlags(g *group) {
	var kept []setting
	endpoint := newSetting(driverHealth, ":9808") // the default port of livenessprobe
	for _, f := range s.flags {
		value := s.literal(f.value, s.differing)
		switch f.name {
		case "probe-timeout":
			f.value = value
			kept = append(kept, f)
			continue
		case "http-endpoint":
			endpoint.value, endpoint.expanded = value, f.expanded
		case "health-port":
			endpoint.value, endpoint.expanded = ":"+value, ":"+f.expanded
		}
		s.literals = append(s.literals, FlagChange{f.argument(), ""})
		if f.name == "http-endpoint" || f.name == "metrics-address" {
			g.changed("the metrics of %s at %s are now among those of the roles, at --http-endpoint", s.name, f.value)
		}
	}
	s.appended = []setting{endpoint}
	s.flags = append(kept, endpoint)
}

// topolvmFlags returns the flags of the command topolvm for one flag of the sources: for all roles that have it if they agree,
// otherwise with the prefix of each role.
func (g *group) topolvmFlags(name string, roles []string) []setting {
	known := g.m.Tables.Flags["topolvm"]
	has := func(role string) bool {
		_, prefixed := known[role+"-"+name]
		return prefixed || strings.HasPrefix(name, role+"-")
	}
	having := len(slices.DeleteFunc(slices.Clone(roles), func(role string) bool { return !has(role) }))
	var all, prefixed []setting
	var of []*source // those of all
	for _, s := range g.sources {
		f, set := s.lookup(name)
		if !set {
			continue
		}
		all, of = append(all, f), append(of, s)
		for _, role := range slices.DeleteFunc(s.roles(), func(role string) bool { return !has(role) }) {
			own := f
			if _, ok := known[role+"-"+name]; ok {
				own.name = role + "-" + name
			}
			if len(prefixed) > 0 {
				own.node = nil // the first one has its comment
			}
			prefixed = append(prefixed, own)
		}
	}
	agree := !slices.ContainsFunc(all, func(f setting) bool { return f.expanded != all[0].expanded })
	ofRole := slices.ContainsFunc(topolvmRoles, has)
	result := all[:1]
	switch {
	case ofRole && len(prefixed) == 0:
		g.info("%s was dropped: its role did not run", all[0].argument())
		result = nil
	case ofRole && !(agree && len(prefixed) == having):
		result = prefixed
	case name == "v":
		result = []setting{slices.MaxFunc(all, func(a, b setting) int { return cmp.Compare(verbosity(a), verbosity(b)) })}
	case !agree:
		g.changed("--%s applies to all roles: %s was kept, which is that of the first container", name, all[0].argument())
	}
	for i, s := range of {
		s.noteTopolvmFlags(all[i], result)
	}
	return result
}

func verbosity(f setting) int {
	n, _ := strconv.Atoi(f.expanded)
	return n
}

// noteTopolvmFlags adds the flags that replace f of s to the report, unless they are the same.
func (s *source) noteTopolvmFlags(f setting, result []setting) {
	var own []string
	for _, r := range result {
		if r.name == f.name || slices.ContainsFunc(s.roles(), func(role string) bool { return r.name == role+"-"+f.name }) {
			own = append(own, r.argument())
		}
	}
	if after := strings.Join(own, " "); f.written != "" && after != f.argument() {
		s.literals = append(s.literals, FlagChange{f.argument(), after})
	}
}
