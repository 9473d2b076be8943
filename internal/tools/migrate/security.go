package migrate

import "go.yaml.in/yaml/v3"

// securityContext is that of one source as a whole, since its fields depend on each other.
// Each of them was enough for what all of them do, to call the socket and the API server;
// so one that is privileged comes last.
func (g *group) securityContext() *yaml.Node {
	var chosen *source
	differ := false
	for _, s := range g.replaced() {
		sc := get(s.node, "securityContext")
		if sc == nil {
			continue
		}
		if chosen != nil && !sameValue(sc, get(chosen.node, "securityContext")) {
			differ = true
		}
		if chosen == nil || isPrivileged(chosen) && !isPrivileged(s) {
			chosen = s
		}
	}
	if differ {
		g.note("the security contexts differ; that of %s is kept, which was enough to call the driver", chosen.name)
	}
	if chosen == nil {
		return nil
	}
	return get(chosen.node, "securityContext")
}

func isPrivileged(s *source) bool {
	return text(get(s.node, "securityContext", "privileged")) == "true"
}

// user keeps the user where the images decided: those of the sidecars run as root, ours
// does not, and the socket belongs to whoever runs the driver.
func (g *group) user(c *yaml.Node) {
	if len(g.replaced()) == 0 {
		return
	}
	for _, sc := range []*yaml.Node{get(c, "securityContext"), get(g.object.pod, "securityContext")} {
		if get(sc, "runAsUser") != nil || text(get(sc, "runAsNonRoot")) == "true" {
			return
		}
	}
	sc := get(c, "securityContext")
	if sc == nil {
		sc = mapping()
		set(c, "securityContext", sc)
	}
	if sc.Kind == yaml.MappingNode {
		sc.Style = 0 // {} cannot take it in a readable way
		set(sc, "runAsUser", number("0"))
		g.note("runAsUser: 0 was added: the images of the sidecars run as root and that of storage-controller does not. It can go where another user may write to the socket")
	}
}
