package migrate

import (
	"slices"
	"strings"
)

// hints says which permissions a new container needs that the old ones had not. The
// directories are those that the project ships; their files say at the top what they are for.
func (m *migration) hints(g *group) {
	if m.workloads == nil {
		m.workloads = map[kind][]string{}
	}
	for _, s := range g.sources {
		m.workloads[s.kind] = append(m.workloads[s.kind], g.object.name)
		var needs []string
		switch s.kind {
		case csiProvisioner:
			needs = g.provisionerNeeds(s)
		case csiAttacher:
			needs = g.attacherNeeds(s)
		case topolvm:
			needs = g.nodecontrollerNeeds(s)
		}
		if len(needs) == 0 {
			continue
		}
		account := text(get(g.object.pod, "serviceAccountName"))
		if account == "" {
			account = text(get(g.object.pod, "serviceAccount"))
		}
		if account == "" {
			account = "default"
		}
		m.note(g.object.name, "", "permissions of the ServiceAccount %s beyond those for %s: %s", account, s.kind, strings.Join(needs, "; "))
	}
}

func (g *group) provisionerNeeds(s *source) []string {
	needs := []string{
		"patch on persistentvolumeclaims (deploy/rbac/provisioner), without which each change of a claim takes two requests",
		"watch and patch on volumesnapshots, where the driver has snapshots (deploy/rbac/provisioner-snapshots)",
		"volumeattributesclasses, where the driver has MODIFY_VOLUME (deploy/rbac/provisioner-volumeattributesclasses)",
	}
	if g.elects() && !s.on(g.m.Tables, "leader-election") {
		needs = append(needs, "the Lease, which it did not use (deploy/rbac/provisioner-leader-election)")
	}
	if f, ok := s.lookup("feature-gates"); ok && slices.Contains(strings.Split(f.known, ","), "CrossNamespaceVolumeDataSource=true") {
		needs = append(needs, "referencegrants (deploy/rbac/provisioner-cross-namespace)")
	}
	return needs
}

func (g *group) attacherNeeds(s *source) []string {
	const file = "(deploy/rbac/attacher-leader-election)"
	switch {
	case !g.elects():
		return nil
	case s.on(g.m.Tables, "leader-election"):
		return []string{"create and patch on events beside the Lease, which tell who leads " + file}
	}
	return []string{"the Lease, which it did not use, and create and patch on events there " + file}
}

// nodecontrollerNeeds are those of the profiles of TopoLVM.
func (g *group) nodecontrollerNeeds(s *source) []string {
	claims := "pvc-strip"
	if f, _ := s.lookup("profile"); f.value == "topolvm-classic" {
		claims = "pvc-enforce"
	}
	needs := []string{"what deploy/rbac/nodecontroller grants"}
	for _, feature := range []string{"leader-election", "node-finalizer", "cleanup", "cleanup-unbound", "custom-resources", claims, "resize-nudge"} {
		needs = append(needs, "deploy/rbac/nodecontroller-"+feature)
	}
	return needs
}
