// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// endpoint returns the address at which a source serves metrics and health, "" for none.
func (s *source) endpoint() string {
	if s.kind == topolvm {
		f, given := s.lookup("metrics-bind-address")
		switch {
		case !given:
			return ":8080"
		case f.expanded == "0":
			return ""
		}
		return f.expanded
	}
	for _, name := range []string{"http-endpoint", "metrics-address"} {
		if f, ok := s.lookup(name); ok && f.expanded != "" {
			return f.expanded
		}
	}
	return ""
}

// portOf returns the port of an address.
func portOf(address string) string {
	return address[strings.LastIndex(address, ":")+1:]
}

// isLoopback reports whether only the pod itself reaches an address.
func isLoopback(address string) bool {
	host, _, _ := net.SplitHostPort(address)
	ip, _ := netip.ParseAddr(host)
	return host == "localhost" || ip.IsLoopback()
}

// ports are the ports of a group. Its sources may have an address for metrics and health each;
// the new container has that of topolvm-controller, the first one that the kubelet reaches, or else the first one.
type ports struct{ *group }

// server returns the source whose address the new container has, nil for none.
func (g ports) server() *source {
	var server *source
	for _, s := range g.sources {
		if address := s.endpoint(); s.kind == topolvm && address != "" {
			return s
		} else if s.kind != livenessprobe && address != "" &&
			(server == nil || isLoopback(server.endpoint()) && !isLoopback(address)) {
			server = s
		}
	}
	return server
}

// moved returns the ports of removed addresses, and the port that replaces them.
func (g ports) moved() (from []string, to string) {
	server := g.server()
	if server == nil {
		return nil, ""
	}
	to = portOf(server.endpoint())
	for _, s := range g.sources {
		if p := portOf(s.endpoint()); p != "" && p != to && !slices.Contains(from, p) {
			from = append(from, p)
		}
	}
	return from, to
}

// list returns the ports of all sources without those of removed addresses.
func (g ports) list() []*yaml.Node {
	from, to := g.moved()
	protocol := func(p *yaml.Node) string { return cmp.Or(text(get(p, "protocol")), "TCP") }
	have := func(all []*yaml.Node, p *yaml.Node) bool {
		return slices.ContainsFunc(all, func(q *yaml.Node) bool {
			return text(get(p, "containerPort")) == text(get(q, "containerPort")) && protocol(p) == protocol(q)
		})
	}
	var all, removed []*yaml.Node
	add := func(p *yaml.Node) {
		name, port := text(get(p, "name")), text(get(p, "containerPort"))
		if i := slices.IndexFunc(all, func(q *yaml.Node) bool { return name != "" && text(get(q, "name")) == name }); i >= 0 {
			g.changed("the name %s of port %s was dropped: port %s has it, too. What selects port %[2]s by its name must use its number",
				name, port, text(get(all[i], "containerPort")))
			p = without(p, "name")
		}
		all = append(all, p)
	}
	for _, p := range g.joined("ports") {
		switch {
		case slices.Contains(from, text(get(p, "containerPort"))):
			removed = append(removed, p)
		case !have(all, p):
			add(p)
		}
	}
	for _, p := range removed {
		moved := resolved(p)
		set(moved, "containerPort", number(to))
		if text(get(p, "hostPort")) == text(get(p, "containerPort")) {
			set(moved, "hostPort", number(to))
		}
		if !have(all, moved) {
			add(moved)
			continue
		}
		if name, now := text(get(p, "name")), nameOfPort(all, to); name != "" && name != now {
			g.info("the port %s (%s) was removed. What names it outside of this manifest must name %s",
				name, text(get(p, "containerPort")), now)
		}
	}
	return all
}

// nameOfPort returns the name of a port, or its number.
func nameOfPort(ports []*yaml.Node, number string) string {
	for _, p := range ports {
		if text(get(p, "containerPort")) == number && text(get(p, "name")) != "" {
			return text(get(p, "name"))
		}
	}
	return number
}

// noteMoved lists the moved ports, and what uses them: containers that stay, and objects of the input.
func (g ports) noteMoved() {
	from, to := g.moved()
	for _, s := range g.sources {
		if server := g.server(); isLoopback(s.endpoint()) && !isLoopback(server.endpoint()) {
			g.changed("metrics and health of %s were served at %s, which only its pod reaches. Other pods can read them at %s now", s.name,
				s.endpoint(), server.endpoint())
		}
	}
	if len(from) == 0 {
		return
	}
	g.changed("metrics and health of all roles are served at port %s, no longer at %s", to, enumerate(from))
	for _, port := range from {
		for _, c := range g.others {
			for _, arg := range slices.Concat(items(get(c, "command")), items(get(c, "args"))) {
				if strings.HasSuffix(text(arg), ":"+port) || strings.Contains(text(arg), ":"+port+"/") {
					g.must("container %s uses port %s (%s). Change it to %s, or remove the container",
						text(get(c, "name")), port, text(arg), to)
				}
			}
		}
	}
	for _, ref := range references(g.m.objects, g.object, append(g.removedNames(), from...)) {
		g.must("%s of %s is %s, which is not served any more. Set it to %s, or remove it if it is there already",
			ref.field, ref.object, ref.port, nameOfPort(g.list(), to))
	}
}

// removedNames returns the names of removed ports that no port has any more.
func (g ports) removedNames() []string {
	from, to := g.moved()
	var names []string
	for _, p := range g.joined("ports") {
		name := text(get(p, "name"))
		if slices.Contains(from, text(get(p, "containerPort"))) && name != "" && name != nameOfPort(g.list(), to) {
			names = append(names, name)
		}
	}
	return names
}

// probe returns the first probe that can be kept, with the port of the new container.
func (g ports) probe(key string) *yaml.Node {
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
		g.movePort(s, p)
		switch {
		case chosen == nil:
			chosen, owner = p, s.name
		case !sameValue(chosen, p):
			g.changed("%s of %s was dropped: it differs from that of %s", key, s.name, owner)
		}
	}
	return chosen
}

// movePort replaces the port of a probe if it was moved, or if it has another name now.
func (g ports) movePort(s *source, probe *yaml.Node) {
	from, to := g.moved()
	for _, handler := range []string{"httpGet", "tcpSocket", "grpc"} {
		port := get(probe, handler, "port")
		if port == nil {
			continue
		}
		target := port.Value
		for _, p := range items(get(s.node, "ports")) {
			if text(get(p, "name")) == port.Value {
				target = text(get(p, "containerPort"))
			}
		}
		if slices.Contains(from, target) {
			target = to
		} else if target == port.Value { // a number
			continue
		}
		name := nameOfPort(g.list(), target)
		if name == port.Value {
			continue
		}
		*port = *scalar(name)
		if name == target {
			port.Tag, port.Style = "!!int", 0
		}
	}
}
