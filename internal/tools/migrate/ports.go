// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"slices"

	"go.yaml.in/yaml/v3"
)

// ports returns the ports of all sources. Kubernetes looks up the name of a port in the first container that has it, so that the
// first one keeps it.
func (g *group) ports() []*yaml.Node {
	var all []*yaml.Node
	protocol := func(p *yaml.Node) string { return cmp.Or(text(get(p, "protocol")), "TCP") }
	for _, p := range g.joined("ports") {
		name, port := text(get(p, "name")), text(get(p, "containerPort"))
		same := slices.ContainsFunc(all, func(q *yaml.Node) bool {
			return port == text(get(q, "containerPort")) && protocol(p) == protocol(q)
		})
		if same {
			continue
		}
		if name != "" && portNamed(all, name) != "" {
			g.changed("the name %s of port %s was dropped, because port %s has it, too: a PodMonitor that names it selects only port "+
				"%[3]s, as a Service did before", name, port, portNamed(all, name))
			p = without(p, "name")
		}
		all = append(all, p)
	}
	return all
}

// portNamed returns the number of the port with a name, "" for none.
func portNamed(ports []*yaml.Node, name string) string {
	for _, p := range ports {
		if text(get(p, "name")) == name {
			return text(get(p, "containerPort"))
		}
	}
	return ""
}

// probe returns the first probe that runs no program.
func (g *group) probe(key string) *yaml.Node {
	var chosen *yaml.Node
	var owner string
	for _, s := range g.sources {
		p := resolved(get(s.node, key))
		if p == nil {
			continue
		}
		if get(p, "exec") != nil {
			g.changed("%s of %s was dropped: it runs a program that the image of storage-controller does not contain. "+
				"Use GET /livez and /readyz at the --http-endpoint", key, s.name)
			continue
		}
		g.numberPort(s, p)
		switch {
		case chosen == nil:
			chosen, owner = p, s.name
		case !sameValue(chosen, p):
			g.changed("%s of %s was dropped: it differs from that of %s", key, s.name, owner)
		}
	}
	return chosen
}

// numberPort replaces the name of the port of a probe by its number if the new container has no port of that name and number.
func (g *group) numberPort(s *source, probe *yaml.Node) {
	for _, handler := range []string{"httpGet", "tcpSocket"} {
		port := get(probe, handler, "port")
		target := portNamed(items(get(s.node, "ports")), text(port))
		if target != "" && portNamed(g.ports(), text(port)) != target {
			*port = *number(target)
		}
	}
}
