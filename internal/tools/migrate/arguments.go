// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// arguments returns the arguments of the new container, and the same with expanded variables.
func (g *group) arguments() (args []*yaml.Node, known []string) {
	args, known = []*yaml.Node{scalar(g.command)}, []string{g.command}
	flags := slices.Concat(g.sources[0].flags, healthFlags(g))
	if g.merges() {
		flags = append([]setting{newSetting("controllers", strings.Join(g.roles(), ","))}, merger{g}.flags()...)
	}
	g.after = flags
	for _, f := range flags {
		args = append(args, f.argument())
		known = append(known, f.String())
	}
	return args, known
}

// roles returns the roles of the group in the order of the tables.
func (g *group) roles() []string {
	var roles []string
	for _, r := range g.m.Tables.Roles {
		for _, s := range g.sources {
			if slices.Contains(s.roles, r.Name) {
				roles = append(roles, r.Name)
			}
		}
	}
	return roles
}

// prepare sets the roles of s and reduces its flags to those that the new container gets.
func (s *source) prepare(g *group) {
	s.roles, s.before = []string{roles[s.kind]}, slices.Clone(s.flags)
	switch s.kind {
	case topolvm:
		s.prepareTopolvm(g)
	case livenessprobe:
		s.prepareLivenessprobe(g)
	default:
		groupSnapshotGate(s)
		s.carryOver(g)
		s.writeDefaults(g)
		if s.kind == csiProvisioner && s.on(g.m.Tables, "enable-capacity") {
			s.roles = append(s.roles, "capacity")
		}
	}
	s.dropConflicting(g)
}

// groupSnapshots is the flag of csi-snapshotter before v8.2, groupGate its successor, which is on by default since v8.7.
const (
	groupSnapshots = "enable-volume-group-snapshots"
	groupGate      = "CSIVolumeGroupSnapshot"
)

// groupSnapshotGate replaces the flag of csi-snapshotter before v8.2 with the feature gate.
func groupSnapshotGate(s *source) {
	if f, given := s.lookup(groupSnapshots); given {
		s.drop(f.name)
		gate := newSetting("feature-gates", groupGate+"="+f.value)
		gate.expanded = groupGate + "=" + f.expanded
		s.add(gate)
	}
}

func (s *source) drop(name string) {
	s.flags = slices.DeleteFunc(s.flags, func(f setting) bool { return f.name == name })
}

// dropConflicting drops flags that storage-controller refuses in combination with others, and bursts without a limit.
func (s *source) dropConflicting(g *group) {
	if s.on(g.m.Tables, "node-deployment") && s.on(g.m.Tables, "leader-election") {
		s.drop("leader-election")
		g.info("--leader-election of %s was dropped: with --node-deployment every instance is active", s.name)
	}
	for _, limit := range []string{"kube-api", "kube-api-capacity"} {
		f, burst := s.lookup(limit + "-burst")
		if _, limited := s.lookup(limit + "-qps"); burst && !limited {
			s.drop(f.name)
			g.info("--%s=%s of %s was dropped: --%s-qps is not set, and storage-controller has no limit by default", f.name, f.value,
				s.name, limit)
		}
	}
	_, endpoint := s.lookup("http-endpoint")
	if f, both := s.lookup("metrics-address"); both && endpoint {
		s.drop("metrics-address")
		if f.value != "" {
			g.info("--metrics-address=%s of %s was dropped: --http-endpoint is set, too", f.value, s.name)
		}
	}
}
