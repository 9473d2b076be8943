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
		s.prepare(g)
	}
	env := g.environment()
	args, known := g.arguments()
	g.known = known
	g.m.commands = append(g.m.commands, known)
	g.m.replacements = append(g.m.replacements, replacementOf(g, g.after))
	if accept := g.m.Tables.Accept; accept != nil {
		if err := accept(slices.DeleteFunc(slices.Clone(known), hasReference), variablesOf(g, env)); err != nil {
			g.must("storage-controller does not accept these arguments: %s. Correct them", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	c := mapping(scalar("name"), scalar(g.name), scalar("image"), scalar(g.m.Image))
	for _, key := range g.keys() {
		var v *yaml.Node
		switch key.Value {
		case "args":
			v = sequence(args...)
		case "env":
			v = list(env)
		default:
			v = g.value(key.Value)
		}
		if v != nil {
			c.Content = append(c.Content, key, v)
		}
	}
	addRunAsUser(g, c)
	ports{g}.noteMoved()
	remarks{g}.add(env)
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
		return list(ports{g}.list())
	case "resources":
		return g.resources()
	case "securityContext":
		return g.securityContext()
	case "livenessProbe", "readinessProbe", "startupProbe":
		return ports{g}.probe(key)
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

// mounts returns the mounts of all sources; the volume of the socket is mounted once.
func (g *group) mounts() []*yaml.Node {
	var all []*yaml.Node
	for i, s := range g.sources {
		for _, m := range items(get(s.node, "volumeMounts")) {
			path := text(get(m, "mountPath"))
			if i > 0 && m == s.socketMount() && !s.refersTo(path) {
				continue // --csi-address has the path of the first container
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

// environment returns the variables of all sources. If two sources have different values for a
// variable, it renames the variable of the second one, and the references in its flags.
func (g *group) environment() []*yaml.Node {
	var all []*yaml.Node
	for i, s := range g.sources {
		for _, e := range items(get(s.node, "env")) {
			name := text(get(e, "name"))
			if s.kind == livenessprobe && !s.references(name, false) {
				continue
			}
			same := slices.IndexFunc(all, func(have *yaml.Node) bool { return text(get(have, "name")) == name })
			switch {
			case same < 0:
				all = append(all, e)
			case sameValue(all[same], e):
			case slices.Contains(variablesRead, name), !s.references(name, true):
				g.changed("the variable %s of %s was dropped: another container has a different value", name, s.name)
			case s.references(name, i == 0):
				own := strings.ToUpper(s.roles[0]) + "_" + name
				e = resolved(e)
				set(e, "name", scalar(own))
				all = append(all, e)
				s.renameVariable(name, own)
			}
		}
	}
	return g.withPodName(all)
}

// references reports whether a flag refers to a variable. --csi-address counts only for the
// first source, because its path is used for all.
func (s *source) references(name string, first bool) bool {
	return slices.ContainsFunc(s.flags, func(f setting) bool {
		return (first || f.name != "csi-address") && strings.Contains(f.value, "$("+name+")")
	})
}

func (s *source) renameVariable(from, to string) {
	for i := range s.flags {
		f := &s.flags[i]
		f.value = strings.ReplaceAll(f.value, "$("+from+")", "$("+to+")")
		f.expanded = strings.ReplaceAll(f.expanded, "$("+from+")", "$("+to+")")
	}
	for _, e := range items(get(s.node, "env")) {
		if v := get(e, "value"); v != nil {
			v.Value = strings.ReplaceAll(v.Value, "$("+from+")", "$("+to+")")
		}
	}
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
	return slices.ContainsFunc(g.sources, func(s *source) bool { return s.on(g.m.Tables, "leader-election") })
}
