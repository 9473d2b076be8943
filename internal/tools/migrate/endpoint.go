package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// endpointOf is the address at which a source serves metrics and health, "" for none.
func endpointOf(s *source) string {
	for _, name := range []string{"http-endpoint", "metrics-address"} {
		if f, ok := s.lookup(name); ok && f.known != "" {
			return f.known
		}
	}
	return ""
}

// endpoint is the source whose address the new container has, nil for none.
func (g *group) endpoint() *source {
	for _, s := range g.replaced() {
		if endpointOf(s) != "" {
			return s
		}
	}
	return nil
}

// portOf is the number at the end of an address.
func portOf(address string) string {
	return address[strings.LastIndex(address, ":")+1:]
}

// moved are the ports of endpoints that are no more, and where what they served is now.
func (g *group) moved() (from []string, to string) {
	chosen := g.endpoint()
	if chosen == nil {
		return nil, ""
	}
	to = portOf(endpointOf(chosen))
	for _, s := range g.replaced() {
		if p := portOf(endpointOf(s)); p != "" && p != to && !slices.Contains(from, p) {
			from = append(from, p)
		}
	}
	return from, to
}

// ports are those of all sources but for the endpoints that are no more.
func (g *group) ports() []*yaml.Node {
	from, to := g.moved()
	have := func(all []*yaml.Node, p *yaml.Node) bool {
		return slices.ContainsFunc(all, func(q *yaml.Node) bool {
			return text(get(p, "containerPort")) == text(get(q, "containerPort")) && text(get(p, "protocol")) == text(get(q, "protocol"))
		})
	}
	var all []*yaml.Node
	var gone []*yaml.Node
	for _, p := range g.together("ports") {
		switch {
		case slices.Contains(from, text(get(p, "containerPort"))):
			gone = append(gone, p)
		case !have(all, p):
			all = append(all, p)
		}
	}
	for _, p := range gone {
		old := text(get(p, "containerPort"))
		moved := resolved(p)
		set(moved, "containerPort", number(to))
		if !have(all, moved) {
			all = append(all, moved)
			continue
		}
		if name, now := text(get(p, "name")), g.portName(all, to); name != "" && name != now {
			g.note("the port %s (%s) is gone: Services, monitors and policies that name it must name %s", name, old, now)
		}
	}
	return all
}

// portName is the name of a port, else its number.
func (g *group) portName(ports []*yaml.Node, number string) string {
	for _, p := range ports {
		if text(get(p, "containerPort")) == number && text(get(p, "name")) != "" {
			return text(get(p, "name"))
		}
	}
	return number
}

// readers says what moved, and which containers that stay may ask in vain.
func (g *group) readers() {
	from, to := g.moved()
	for _, port := range from {
		g.note("metrics and health of all roles are at port %s; nothing listens at %s any more", to, port)
		for _, c := range g.others {
			for _, arg := range append(items(get(c, "command")), items(get(c, "args"))...) {
				if strings.Contains(text(arg), ":"+port) {
					g.note("container %s uses port %s (%s): it must use %s, or go", text(get(c, "name")), port, text(arg), to)
				}
			}
		}
	}
}

// probe is the first of its kind that can be kept, at the port that there is now.
func (g *group) probe(key string) *yaml.Node {
	var chosen *yaml.Node
	var owner string
	for _, s := range g.replaced() {
		p := resolved(get(s.node, key))
		if p == nil {
			continue
		}
		if get(p, "exec") != nil {
			g.note("%s of %s was dropped: it runs a program, and the image of storage-controller has no other than itself. GET /livez and /readyz at the --http-endpoint say more", key, s.name)
			continue
		}
		g.follow(s, p)
		switch {
		case chosen == nil:
			chosen, owner = p, s.name
		case !sameValue(chosen, p):
			g.note("%s of %s differs from that of %s, which is kept", key, s.name, owner)
		}
	}
	return chosen
}

// follow changes the port of a probe to the one of the new container.
func (g *group) follow(s *source, probe *yaml.Node) {
	from, to := g.moved()
	for _, how := range []string{"httpGet", "tcpSocket", "grpc"} {
		port := get(probe, how, "port")
		if port == nil {
			continue
		}
		number := port.Value
		for _, p := range items(get(s.node, "ports")) {
			if text(get(p, "name")) == number {
				number = text(get(p, "containerPort"))
			}
		}
		if !slices.Contains(from, number) {
			continue
		}
		name := g.portName(g.ports(), to)
		*port = *scalar(name)
		if name == to {
			port.Tag, port.Style = "!!int", 0
		}
	}
}
