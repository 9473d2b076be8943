// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// container returns the new container. Its keys are in the order of the first source.
func (g *group) container() *yaml.Node {
	for _, s := range g.sources {
		if s.kind == topolvm {
			s.prepareTopolvm(g)
		} else {
			s.writeDefaults(g)
		}
	}
	env := g.environment()
	args := g.arguments
	if g.serves {
		args = g.topolvmArguments
	} else {
		for _, s := range g.sources {
			s.setAddress(g.sources[0])
		}
	}
	values := map[string]*yaml.Node{"args": sequence(args()...), "env": list(env)}
	g.m.commands = append(g.m.commands, g.known)
	g.m.replacements = append(g.m.replacements, replacementOf(g))
	if accept := g.m.Tables.Accept; accept != nil {
		if err := accept(slices.DeleteFunc(slices.Clone(g.known), hasReference), variablesOf(g, env)); err != nil {
			g.must("storage-controller does not accept these arguments: %s. Correct them", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	c := mapping(scalar("name"), scalar(g.name), scalar("image"), scalar(g.m.Image))
	for _, key := range g.keys() {
		v, done := values[key.Value]
		if !done {
			v = g.value(key.Value)
		}
		if v != nil {
			c.Content = append(c.Content, key, v)
		}
	}
	addRunAsUser(g, c)
	remarks{g}.add(values["args"], env)
	return c
}

// variablesOf returns the names of the environment variables of the new container. With envFrom all of those that the
// program requires may be set.
func variablesOf(g *group, env []*yaml.Node) []string {
	var names []string
	for _, e := range env {
		names = append(names, text(get(e, "name")))
	}
	if len(g.joined("envFrom")) > 0 {
		names = append(names, variablesRead...)
	}
	return names
}

// hasReference reports whether the value of an argument is not known before the container starts.
func hasReference(arg string) bool { return strings.Contains(arg, "$(") || strings.Contains(arg, "${") }

// keys returns the keys of the new container after name and image, with their comments, in the
// order of the first source.
func (g *group) keys() []*yaml.Node {
	have := []string{"name", "image"}
	var keys []*yaml.Node
	add := func(at int, key *yaml.Node) {
		if key.Value == "command" {
			c := *key
			key = &c
			key.Value = "args"
		}
		if !slices.Contains(have, key.Value) {
			have = append(have, key.Value)
			keys = slices.Insert(keys, at, key)
		}
	}
	for _, s := range g.sources {
		for i := 0; i+1 < len(s.node.Content); i += 2 {
			add(len(keys), s.node.Content[i])
		}
	}
	add(0, scalar("args"))
	add(1+slices.IndexFunc(keys, func(key *yaml.Node) bool { return key.Value == "args" }), scalar("env"))
	add(len(keys), scalar("volumeMounts"))
	return keys
}

func (g *group) value(key string) *yaml.Node {
	switch key {
	case "volumeMounts":
		return list(g.mounts())
	case "ports":
		return list(g.ports())
	case "resources":
		return g.resources()
	case "securityContext":
		return g.securityContext()
	case "livenessProbe", "readinessProbe", "startupProbe":
		return g.probe(key)
	case "envFrom", "volumeDevices":
		return list(g.joined(key))
	case "lifecycle":
		var names []string
		for _, s := range g.sources {
			if get(s.node, key) != nil {
				names = append(names, s.name)
			}
		}
		g.changed("the lifecycle hooks of %s were dropped: the image of storage-controller contains no other programs, "+
			"and storage-controller finishes running calls after SIGTERM", enumerate(names))
		return nil
	}
	return g.first(key)
}

func list(items []*yaml.Node) *yaml.Node {
	if len(items) == 0 {
		return nil
	}
	return sequence(items...)
}

// first returns the value of the first source with key, and notes the sources that differ.
func (g *group) first(key string) *yaml.Node {
	var first *yaml.Node
	for _, s := range g.sources {
		switch v := get(s.node, key); {
		case v == nil:
		case first == nil:
			first = v
		case !sameValue(first, v):
			g.changed("%s of %s was dropped: another container has a different value", key, s.name)
		}
	}
	return first
}

// joined returns the items of a list in all sources, without duplicates.
func (g *group) joined(path ...string) []*yaml.Node {
	var all []*yaml.Node
	for _, s := range g.sources {
		for _, item := range items(get(s.node, path...)) {
			if !slices.ContainsFunc(all, func(have *yaml.Node) bool { return sameValue(have, item) }) {
				all = append(all, item)
			}
		}
	}
	return all
}

// mounts returns the mounts of all sources. The roles share the path of the socket in the first container.
func (g *group) mounts() []*yaml.Node {
	var all []*yaml.Node
	for i, s := range g.sources {
		for _, m := range items(get(s.node, "volumeMounts")) {
			path := text(get(m, "mountPath"))
			if i > 0 && s.kind != livenessprobe && m == s.mount && !s.refersTo(path) {
				continue
			}
			if !slices.ContainsFunc(all, func(have *yaml.Node) bool { return text(get(have, "mountPath")) == path }) {
				all = append(all, m)
			}
		}
	}
	return all
}

// refersTo reports whether a flag other than the socket names a path below dir.
func (s *source) refersTo(dir string) bool {
	return slices.ContainsFunc(s.flags, func(f setting) bool {
		return f.name != "csi-address" && f.name != "csi-socket" && strings.HasPrefix(f.expanded, dir)
	})
}

// variablesRead are the variables that storage-controller reads.
var variablesRead = []string{"KUBECONFIG", "NAMESPACE", "NODE_NAME", "POD_NAME", "POD_NAMESPACE", legacyVariable}

// environment returns the variables of all sources, and sets their variables that have another value in the new container.
func (g *group) environment() []*yaml.Node {
	var all []*yaml.Node
	first := map[string]*source{} // that have a variable
	for _, s := range g.sources {
		for _, e := range items(get(s.node, "env")) {
			name := text(get(e, "name"))
			switch {
			case first[name] == nil:
				first[name] = s
				all = append(all, e)
			case sameVariable(first[name], s, name):
			case s.references(name):
				s.differing[name] = text(get(e, "value"))
			default:
				g.changed("the variable %s of %s was dropped: another container has a different value", name, s.name)
			}
		}
	}
	return g.withPodName(all)
}

// variable returns the variable of s called name, nil for none.
func (s *source) variable(name string) *yaml.Node {
	for _, e := range items(get(s.node, "env")) {
		if text(get(e, "name")) == name {
			return e
		}
	}
	return nil
}

// sameVariable reports whether a variable has the same value in two sources that have it.
func sameVariable(a, b *source, name string) bool {
	x, y := a.variable(name), b.variable(name)
	if get(x, "valueFrom") == nil && get(y, "valueFrom") == nil {
		return a.env[name] == b.env[name]
	}
	return sameValue(x, y)
}

// variableConflict returns a variable whose value in b can neither be that of a nor be written into the arguments of b, or "".
func variableConflict(a, b *source) string {
	for _, e := range items(get(b.node, "env")) {
		name := text(get(e, "name"))
		read := slices.Contains(variablesRead, name)
		switch {
		case a.variable(name) == nil: // a reference to it may be to one of envFrom
			if !read && a.references(name) {
				return name
			}
		case !sameVariable(a, b, name) && (read || get(e, "valueFrom") != nil && b.references(name)):
			return name
		}
	}
	for _, e := range items(get(a.node, "env")) {
		name := text(get(e, "name"))
		if b.variable(name) == nil && !slices.Contains(variablesRead, name) && b.references(name) {
			return name
		}
	}
	return ""
}

// references reports whether an argument or a variable of s refers to a variable.
func (s *source) references(name string) bool {
	values := argumentsOf(s.node)
	for _, e := range items(get(s.node, "env")) {
		values = append(values, get(e, "value"))
	}
	return refers(values, name)
}

// refers reports whether one of values refers to a variable.
func refers(values []*yaml.Node, name string) bool {
	return slices.ContainsFunc(values, func(value *yaml.Node) bool { return strings.Contains(text(value), "$("+name+")") })
}

// withPodName adds POD_NAME, the holder identity of a Lease, if the host name does not
// distinguish the pods.
func (g *group) withPodName(env []*yaml.Node) []*yaml.Node {
	if text(get(g.object.pod, "hostNetwork")) != "true" || !g.elects() ||
		slices.ContainsFunc(env, func(e *yaml.Node) bool { return text(get(e, "name")) == "POD_NAME" }) {
		return env
	}
	g.info("POD_NAME was added: it distinguishes the replicas in the Lease, because pods with hostNetwork have the name of their host")
	field := mapping(scalar("fieldRef"), mapping(scalar("fieldPath"), scalar("metadata.name")))
	return append(env, mapping(scalar("name"), scalar("POD_NAME"), scalar("valueFrom"), field))
}

// elects reports whether the new container uses leader election.
func (g *group) elects() bool {
	return slices.ContainsFunc(g.sources, func(s *source) bool { return s.on("leader-election") })
}
