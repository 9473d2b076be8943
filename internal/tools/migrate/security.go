// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import "go.yaml.in/yaml/v3"

// securityContext returns the security context of one source as a whole, because its fields
// depend on each other. Each of them allowed a sidecar to connect to the socket and the API
// server, so that one without privileges is preferred.
func (g *group) securityContext() *yaml.Node {
	var chosen *source
	differ := false
	for _, s := range g.sources {
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
		g.info("the security contexts differ. That of %s was kept; it was sufficient to connect to the driver", chosen.name)
	}
	if chosen == nil {
		return nil
	}
	return get(chosen.node, "securityContext")
}

func isPrivileged(s *source) bool {
	return text(get(s.node, "securityContext", "privileged")) == "true"
}

// addRunAsUser sets the user of c to root if the image decided it before. The images of the
// sidecars run as root, that of storage-controller does not, and the driver owns the socket.
func addRunAsUser(g *group, c *yaml.Node) {
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
		sc.Style = 0 // an empty flow mapping would put it on one line
		set(sc, "runAsUser", number("0"))
		g.info("runAsUser: 0 was added: the images of the sidecars run as root, that of storage-controller as user 65532. " +
			"Remove it if user 65532 may write to the socket")
	}
}
