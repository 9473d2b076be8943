// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"slices"
	"strings"
)

// notePermissions notes the permissions that a new container needs and the sidecars did not. It
// names the directories of deploy/rbac that grant them.
func (m *migration) notePermissions(g *group) {
	account := cmp.Or(text(get(g.object.pod, "serviceAccountName")), text(get(g.object.pod, "serviceAccount")), "default")
	for _, s := range g.sources {
		if s.kind == livenessprobe {
			continue
		}
		m.workloads[s.kind] = append(m.workloads[s.kind], g.object.name)
		var missing []string
		switch s.kind {
		case csiProvisioner:
			missing = provisionerPermissions(s, m.Tables, g.elects())
		case csiAttacher:
			missing = attacherPermissions(s, m.Tables, g.elects())
		case csiResizer:
			missing = resizerPermissions(s, m.Tables, g.elects())
		case csiSnapshotter:
			missing = leasePermissions(s, m.Tables, g.elects())
		case topolvm:
			missing = nodecontrollerPermissions(s)
		}
		if len(missing) > 0 {
			m.note(g.object.name, "", "ServiceAccount %s needs more permissions than for %s: %s",
				account, s.kind, strings.Join(missing, "; "))
		}
	}
}

func provisionerPermissions(s *source, t Tables, elects bool) []string {
	missing := []string{
		"patch on persistentvolumeclaims, which saves a request for each change of a claim (deploy/rbac/provisioner)",
		"if the driver supports snapshots, watch and patch on volumesnapshots (deploy/rbac/provisioner-snapshots)",
		"if the driver supports MODIFY_VOLUME, volumeattributesclasses (deploy/rbac/provisioner-volumeattributesclasses)",
	}
	missing = append(missing, leasePermissions(s, t, elects)...)
	if f, ok := s.lookup("feature-gates"); ok && slices.Contains(strings.Split(f.expanded, ","), "CrossNamespaceVolumeDataSource=true") {
		missing = append(missing, "referencegrants (deploy/rbac/provisioner-cross-namespace)")
	}
	return missing
}

// leasePermissions returns the permission for a Lease that s did not use.
func leasePermissions(s *source, t Tables, elects bool) []string {
	if elects && !s.on(t, "leader-election") {
		return []string{"its Lease, because leader election was off (deploy/rbac/" + roles[s.kind] + "-leader-election)"}
	}
	return nil
}

func resizerPermissions(s *source, t Tables, elects bool) []string {
	missing := leasePermissions(s, t, elects)
	if f, given := s.lookup("handle-volume-inuse-error"); !given || isTrue(f.expanded) {
		missing = append(missing, "if the driver reports PUBLISH_UNPUBLISH_VOLUME, list and watch on volumeattachments, "+
			"which show whether a volume is in use (deploy/rbac/resizer-attachments)")
	}
	return missing
}

func attacherPermissions(s *source, t Tables, elects bool) []string {
	const events = "create and patch on events in the namespace of the Lease (deploy/rbac/attacher-leader-election)"
	switch {
	case !elects:
		return nil
	case s.on(t, "leader-election"):
		return []string{events}
	}
	return []string{"its Lease, because leader election was off, and " + events}
}

func nodecontrollerPermissions(s *source) []string {
	claims := "pvc-strip"
	if f, _ := s.lookup("profile"); f.value == "topolvm-classic" {
		claims = "pvc-enforce"
	}
	missing := []string{"deploy/rbac/nodecontroller"}
	for _, feature := range []string{
		"leader-election", "node-finalizer", "cleanup", "custom-resources", claims, "resize-nudge",
	} {
		missing = append(missing, "deploy/rbac/nodecontroller-"+feature)
	}
	return missing
}
