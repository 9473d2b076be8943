package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// container is the new one. Its keys are in the order of the first source.
func (g *group) container() *yaml.Node {
	g.prepare()
	env := g.environment()
	args, known := g.arguments()
	g.m.commands = append(g.m.commands, known)
	if accept := g.m.Tables.Accept; accept != nil {
		if err := accept(slices.DeleteFunc(slices.Clone(known), isOpen)); err != nil {
			g.note("storage-controller does not accept these arguments, mend them: %v", err)
			g.m.rejected = true
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
	g.user(c)
	g.readers()
	g.overlap()
	return c
}

// replaced are the sources whose containers go.
func (g *group) replaced() []*source {
	return slices.DeleteFunc(slices.Clone(g.sources), func(s *source) bool { return s.kind == topolvm })
}

// isOpen tells whether the value of an argument is filled in later.
func isOpen(arg string) bool { return strings.Contains(arg, "$(") || strings.Contains(arg, "${") }

// keys are those of the new container after name and image, with their comments, in the
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
	for _, s := range g.replaced() {
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
		return list(g.together(key))
	case "lifecycle":
		g.note("the lifecycle hooks of %s were dropped: the image of storage-controller has no other programs, and SIGTERM lets running calls finish", enumerate(g.having(key)))
		return nil
	}
	return g.only(key)
}

func list(items []*yaml.Node) *yaml.Node {
	if len(items) == 0 {
		return nil
	}
	return sequence(items...)
}

// having names the sources with a key.
func (g *group) having(key string) []string {
	var names []string
	for _, s := range g.replaced() {
		if get(s.node, key) != nil {
			names = append(names, s.name)
		}
	}
	return names
}

// only is the value of the first source that has key, with a note if another differs.
func (g *group) only(key string) *yaml.Node {
	var first *yaml.Node
	for _, s := range g.replaced() {
		switch v := get(s.node, key); {
		case v == nil:
		case first == nil:
			first = v
		case !sameValue(first, v):
			g.note("%s of %s was dropped: another container has another one", key, s.name)
		}
	}
	return first
}

// together are the different items of all sources.
func (g *group) together(key string) []*yaml.Node {
	var all []*yaml.Node
	for _, s := range g.replaced() {
		for _, item := range items(get(s.node, key)) {
			if !slices.ContainsFunc(all, func(have *yaml.Node) bool { return sameValue(have, item) }) {
				all = append(all, item)
			}
		}
	}
	return all
}

// mounts are those of all sources; the socket is mounted once.
func (g *group) mounts() []*yaml.Node {
	if replaced := g.replaced(); len(replaced) == 0 {
		if m := g.sources[0].socketMount(); m != nil {
			return []*yaml.Node{m}
		}
		return nil
	}
	var all []*yaml.Node
	for i, s := range g.replaced() {
		for _, m := range items(get(s.node, "volumeMounts")) {
			if i > 0 && m == s.socketMount() && !s.refersTo(text(get(m, "mountPath"))) {
				continue // its path in the first container is the one that is called
			}
			if !slices.ContainsFunc(all, func(have *yaml.Node) bool {
				return text(get(have, "mountPath")) == text(get(m, "mountPath"))
			}) {
				all = append(all, m)
			}
		}
	}
	return all
}

// refersTo tells whether a flag that is carried over names a path below at.
func (s *source) refersTo(at string) bool {
	return slices.ContainsFunc(s.flags, func(f given) bool {
		return f.name != "csi-address" && f.name != "csi-socket" && strings.HasPrefix(f.known, at)
	})
}

// ofProgram are the variables that the program reads by itself.
var ofProgram = []string{"KUBECONFIG", "NAMESPACE", "NODE_NAME", "POD_NAME", "POD_NAMESPACE"}

// environment is the variables of all sources. Where two have one with different values,
// the later one gets a name of its own and the flags that refer to it follow.
func (g *group) environment() []*yaml.Node {
	var all []*yaml.Node
	for i, s := range g.sources {
		if s.kind == topolvm && len(g.replaced()) > 0 && i > 0 {
			s.qualifyAddress()
		}
		for _, e := range items(get(s.node, "env")) {
			name := text(get(e, "name"))
			if s.kind == topolvm && !s.uses(name, true) {
				continue
			}
			same := slices.IndexFunc(all, func(have *yaml.Node) bool { return text(get(have, "name")) == name })
			switch {
			case same < 0:
				all = append(all, e)
			case sameValue(all[same], e):
			case slices.Contains(ofProgram, name), !s.uses(name, true):
				g.note("the variable %s of %s was dropped: another container has another value, and storage-controller has one environment", name, s.name)
			case s.uses(name, i == 0):
				own := strings.ToUpper(s.roles[0]) + "_" + name
				e = resolved(e)
				set(e, "name", scalar(own))
				all = append(all, e)
				s.rename(name, own)
			}
		}
	}
	return g.identity(all)
}

// qualifyAddress keeps a socket that is called by the path of another container from
// being looked up here.
func (s *source) qualifyAddress() {
	s.flags = slices.DeleteFunc(s.flags, func(f given) bool { return f.name == "csi-address" })
}

// uses tells whether a flag refers to a variable. That of the socket counts for the first
// source alone: the others call it by the same path.
func (s *source) uses(name string, first bool) bool {
	return slices.ContainsFunc(s.flags, func(f given) bool {
		return (first || f.name != "csi-address") && strings.Contains(f.value, "$("+name+")")
	})
}

func (s *source) rename(from, to string) {
	for i := range s.flags {
		s.flags[i].value = strings.ReplaceAll(s.flags[i].value, "$("+from+")", "$("+to+")")
	}
	for _, e := range items(get(s.node, "env")) {
		if v := get(e, "value"); v != nil {
			v.Value = strings.ReplaceAll(v.Value, "$("+from+")", "$("+to+")")
		}
	}
}

// identity adds POD_NAME where pods share the name of their host: it names the holder of a Lease.
func (g *group) identity(env []*yaml.Node) []*yaml.Node {
	if text(get(g.object.pod, "hostNetwork")) != "true" || !g.elects() ||
		slices.ContainsFunc(env, func(e *yaml.Node) bool { return text(get(e, "name")) == "POD_NAME" }) {
		return env
	}
	g.note("POD_NAME was added: in the network of the host it tells the replicas apart when they compete for the Lease")
	field := mapping(scalar("fieldRef"), mapping(scalar("fieldPath"), scalar("metadata.name")))
	return append(env, mapping(scalar("name"), scalar("POD_NAME"), scalar("valueFrom"), field))
}

// elects tells whether the new container has leader election.
func (g *group) elects() bool {
	return slices.ContainsFunc(g.sources, func(s *source) bool { return s.on(g.m.Tables, "leader-election") })
}

// overlap warns of a rollout in which old and new pods work at the same time.
func (g *group) overlap() {
	strategy := text(get(g.object.node, "spec", "strategy", "type"))
	if !g.elects() && text(get(g.object.node, "kind")) == "Deployment" && strategy != "Recreate" && !g.sources[0].on(g.m.Tables, "node-deployment") {
		g.note("without --leader-election the old and the new pod work at the same time while a Deployment is rolled out: set strategy.type to Recreate, or --leader-election=true before and after")
	}
	g.annotations()
}

// annotations warns of those of the pod that name a container which is gone.
func (g *group) annotations() {
	annotations := get(g.object.node, "spec", "template", "metadata", "annotations")
	for i := 0; annotations != nil && i+1 < len(annotations.Content); i += 2 {
		key, value := annotations.Content[i].Value, annotations.Content[i+1].Value
		for _, s := range g.replaced() {
			switch {
			case s.name == g.name:
			case value == s.name && strings.HasPrefix(key, "kubectl.kubernetes.io/default-"):
				g.note("the annotation %s still names %s; it should name %s", key, s.name, g.name)
			case key == "container.apparmor.security.beta.kubernetes.io/"+s.name:
				g.note("the annotation %s names %s, which is gone: the API server refuses the pod until it ends with %s, or goes", key, s.name, g.name)
				g.m.rejected = true
			}
		}
	}
}
