package migrate

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// group is the sources that one new container replaces.
type group struct {
	sources []*source
	command string // its subcommand
	name    string // of the new container
	object  workload
	others  []*yaml.Node // containers of the list that stay
	m       *migration
}

func (g *group) note(format string, args ...any) {
	g.m.note(g.object.name, g.name, format, args...)
}

// containers exchanges what can be of one list of containers.
func (m *migration) containers(w workload, e *edit, lines []string) {
	sources := m.sources(w, e.list)
	for _, g := range m.groups(w, e.list, sources) {
		node, comments := g.container(), []string{}
		at := g.sources[0].index
		for i, s := range g.sources {
			if s.kind == topolvm { // which stays
				if i == 0 {
					at++
				}
				continue
			}
			e.remove[s.index] = true
			if c := e.comment(lines, s.index); c != "" && (s.index != at || e.spans == nil) {
				comments = append(comments, c)
			}
		}
		for _, s := range g.replaced() {
			comments = append(comments, e.lost(lines, s, node)...)
		}
		for _, n := range m.notes {
			if n.Object == w.name && n.Container == g.name {
				comments = append(comments, commented(n.Text))
			}
		}
		node.HeadComment = strings.Join(comments, "\n")
		e.insert[at] = append(e.insert[at], node)
		m.hints(g)
	}
}

// sources are the containers of a list that can be replaced.
func (m *migration) sources(w workload, list *yaml.Node) []*source {
	var sources []*source
	for i, item := range items(list) {
		c := resolved(item)
		name := text(get(c, "name"))
		if program := wrapper(c); program != "" {
			m.note(w.name, "", "container %s stays as it is: a shell starts %s there, and what else its script does cannot be told. Call %s without a shell and migrate again", name, program, program)
			continue
		}
		s := &source{kind: kindOf(c), index: i, name: name, node: c, env: environment(c)}
		if s.kind == "" {
			continue
		}
		rest := s.read(m.Tables)
		if why := m.stays(s, list); why != "" {
			m.note(w.name, "", "container %s stays as it is: %s", name, why)
			continue
		} else if s.kind == topolvm && runsNodecontroller(items(list)) {
			continue
		}
		for _, arg := range rest {
			m.note(w.name, "", "the argument %q of %s was dropped: it is no flag", arg, name)
		}
		sources = append(sources, s)
	}
	return sources
}

// stays is why a container cannot be replaced, "" if it can.
func (m *migration) stays(s *source, list *yaml.Node) string {
	switch {
	case m.Tables.Commands[commands[s.kind]] == nil:
		return "this version of storage-controller has nothing that replaces " + string(s.kind)
	case s.kind == topolvm && !s.on(m.Tables, "leader-election") && !runsNodecontroller(items(list)):
		return "without leader election it always works, so that nothing else may do the same beside it"
	}
	return ""
}

// groups puts together what one container can do, each with the others that it agrees with.
func (m *migration) groups(w workload, list *yaml.Node, sources []*source) []*group {
	var groups []*group
	taken := slices.Clone(m.named[w.pod])
	for _, key := range []string{"initContainers", "containers"} {
		if other := get(w.pod, key); other != list {
			for _, item := range items(other) {
				taken = append(taken, text(get(resolved(item), "name")))
			}
		}
	}
	for i, item := range items(list) {
		if !slices.ContainsFunc(sources, func(s *source) bool { return s.index == i && s.kind != topolvm }) {
			taken = append(taken, text(get(resolved(item), "name")))
		}
	}
	for _, s := range sources {
		var reasons []string
		joined := false
		for _, g := range groups {
			reason := g.conflict(s)
			if joined = reason == "" && !m.PerRole; joined {
				g.sources = append(g.sources, s)
				break
			}
			reasons = append(reasons, reason)
		}
		if joined {
			continue
		}
		g := &group{sources: []*source{s}, command: "all", object: w, m: m}
		g.name = m.containerName(s, taken)
		taken = append(taken, g.name)
		m.named[w.pod] = append(m.named[w.pod], g.name)
		if m.PerRole {
			g.command = commands[s.kind]
		} else if len(reasons) > 0 {
			g.note("%s has a container of its own: %s", s.name, strings.Join(slices.Compact(reasons), "; "))
		}
		groups = append(groups, g)
	}
	for _, g := range groups {
		// What is merged follows the first, and topolvm-controller stays.
		slices.SortStableFunc(g.sources, func(a, b *source) int {
			switch {
			case a.kind != topolvm && b.kind == topolvm:
				return -1
			case a.kind == topolvm && b.kind != topolvm:
				return 1
			}
			return 0
		})
		for i, item := range items(list) {
			if !slices.ContainsFunc(sources, func(s *source) bool { return s.index == i && s.kind != topolvm }) {
				g.others = append(g.others, resolved(item))
			}
		}
	}
	return groups
}

// containerName is that of the new container. With --per-role names stay, so that what
// refers to them still works.
func (m *migration) containerName(s *source, taken []string) string {
	candidates := []string{"storage-controller", "storage-controller-" + commands[s.kind]}
	if m.PerRole && s.kind != topolvm {
		candidates = []string{s.name}
	} else if m.PerRole {
		candidates = []string{"nodecontroller"}
	}
	for _, name := range candidates {
		if !slices.Contains(taken, name) {
			return name
		}
	}
	for i := 2; ; i++ {
		if name := fmt.Sprintf("%s-%d", candidates[len(candidates)-1], i); !slices.Contains(taken, name) {
			return name
		}
	}
}

// conflict is why s cannot be in one container with those of g, "" if it can.
func (g *group) conflict(s *source) string {
	for _, have := range g.sources {
		if reason := g.between(have, s); reason != "" {
			return reason
		}
	}
	return ""
}

func (g *group) between(a, b *source) string {
	t := g.m.Tables
	if a.socket() != b.socket() {
		return fmt.Sprintf("its socket (%s) is not that of %s (%s)", b.address(), a.name, a.address())
	}
	if a.kind == b.kind {
		return "there is another " + string(a.kind)
	}
	for _, name := range []string{"kubeconfig", "master"} {
		if a.get(t, name) != b.get(t, name) {
			return fmt.Sprintf("its --%s is not that of %s", name, a.name)
		}
	}
	if a.on(t, "node-deployment") || b.on(t, "node-deployment") {
		return "one works for its node only (--node-deployment), the other for the whole cluster"
	}
	if x, y := g.leaseNamespace(a), g.leaseNamespace(b); x != y && x != "" && y != "" {
		return fmt.Sprintf("its Lease is in another namespace than that of %s", a.name)
	}
	if b.kind == topolvm || a.kind == topolvm {
		return ""
	}
	for _, m := range items(get(b.node, "volumeMounts")) {
		for _, n := range items(get(a.node, "volumeMounts")) {
			if text(get(m, "mountPath")) == text(get(n, "mountPath")) && !sameSource(m, n) {
				return fmt.Sprintf("at %s it has another volume than %s", text(get(m, "mountPath")), a.name)
			}
		}
	}
	return ""
}

func sameSource(a, b *yaml.Node) bool {
	return text(get(a, "name")) == text(get(b, "name")) && text(get(a, "subPath")) == text(get(b, "subPath"))
}

// leaseNamespace is where the Lease of s is: "pod" for the namespace of its pod, "" if
// it needs none.
func (g *group) leaseNamespace(s *source) string {
	if !s.on(g.m.Tables, "leader-election") {
		return ""
	}
	ns := s.get(g.m.Tables, "leader-election-namespace")
	if ns == "" {
		ns = s.env["POD_NAMESPACE"]
	}
	if ns == "" || ns == "$(metadata.namespace)" || ns == text(get(g.object.node, "metadata", "namespace")) {
		return "pod"
	}
	return ns
}

// address is the path of the socket in the container.
func (s *source) address() string {
	address, byDefault := "", "/run/csi/socket"
	name := "csi-address"
	if s.kind == topolvm {
		name, byDefault = "csi-socket", "/run/topolvm/csi-topolvm.sock"
	}
	if g, ok := s.lookup(name); ok {
		address = g.known
	}
	if address == "" {
		address = byDefault
	}
	return path.Clean("/" + strings.TrimLeft(strings.TrimPrefix(address, "unix:"), "/"))
}

// socket tells sockets apart wherever their volume is mounted.
func (s *source) socket() string {
	address := s.address()
	mount := s.socketMount()
	if mount == nil {
		return address
	}
	return text(get(mount, "name")) + ":" + path.Join(text(get(mount, "subPath")), strings.TrimPrefix(address, path.Clean(text(get(mount, "mountPath")))))
}

// socketMount is the mount that the socket is in.
func (s *source) socketMount() *yaml.Node {
	var best *yaml.Node
	for _, m := range items(get(s.node, "volumeMounts")) {
		at := strings.TrimSuffix(path.Clean(text(get(m, "mountPath"))), "/")
		if strings.HasPrefix(s.address(), at+"/") && (best == nil || len(at) >= len(text(get(best, "mountPath")))) {
			best = m
		}
	}
	return best
}
