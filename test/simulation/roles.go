// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"strings"
)

// roles returns the roles that the processes run. Those in one element share a Lease, and run in the same process.
func (c scale) roles() [][]string {
	roles := [][]string{{"provisioner"}}
	if !c.features.Topolvm {
		roles = append(roles, []string{"attacher"})
	}
	if c.features.Resize {
		roles = append(roles, []string{"resizer"})
	}
	if c.features.Snapshots {
		roles = append(roles, []string{"snapshotter"})
	}
	if c.features.Capacity {
		roles[0] = append(roles[0], "capacity")
	}
	if c.features.Nodes {
		roles = append(roles, []string{"nodecontroller"})
	}
	return roles
}

// pickRoles has the processes of one in four histories run a part of the roles each: each role runs in one process at least.
func (s *simulation) pickRoles(size *scale) {
	pick := s.choices.Pick
	if size.features.Topolvm || pick(4) < 3 {
		return
	}
	size.replicas = max(size.replicas, 2)
	parts := make([][]string, size.replicas)
	for _, roles := range size.roles() {
		owner := pick(size.replicas)
		for i := range parts {
			if i == owner || pick(3) == 2 {
				parts[i] = append(parts[i], roles...)
			}
		}
	}
	for i := range parts {
		if len(parts[i]) == 0 {
			parts[i] = []string{"attacher"}
		}
		size.controllers = append(size.controllers, strings.Join(parts[i], ","))
	}
	s.happens("processes run different roles")
	s.record("the processes run %s", strings.Join(size.controllers, " and "))
}

// controllersOf returns the --controllers of the replica with that number.
func (c scale) controllersOf(replica int) string {
	if c.controllers != nil {
		return c.controllers[replica]
	}
	return strings.Join(slices.Concat(c.roles()...), ",")
}
