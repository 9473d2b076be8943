// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// group holds the sources that one new container replaces.
type group struct {
	sources []*source
	serves  bool   // the new container runs the command topolvm, which serves the driver
	name    string // of the new container
	object  workload
	m       *migration

	node     *yaml.Node // the new container
	comments []string   // above it
	known    []string   // its command line with expanded variables
}

// replaceContainers adds the replacements in one list of containers to e, and returns their groups.
func (m *migration) replaceContainers(w workload, e *edit, lines []string) []*group {
	groups := m.groups(w, e.list, m.sources(w, e.list))
	for _, g := range groups {
		g.node = g.container()
		at := g.sources[0].index
		for _, s := range g.sources {
			e.remove[s.index] = true
			if c := e.comment(lines, s.index); c != "" && (s.index != at || e.spans == nil) {
				g.comments = append(g.comments, c)
			}
		}
		for _, s := range g.sources {
			g.comments = append(g.comments, e.lostComments(lines, s, g.node)...)
		}
		e.insert[at] = append(e.insert[at], g.node)
	}
	return groups
}

// finish adds the notes about the object as a whole, and writes the notes that matter as comments of the new
// containers. Those of the object are at the first one.
func (m *migration) finish(w workload, groups []*group) {
	if len(groups) == 0 {
		return
	}
	m.notePermissions(w, groups)
	m.noteOwner(w)
	m.noteGracePeriod(w, groups)
	for i, g := range groups {
		for _, level := range []Level{Required, Changed} {
			for _, n := range m.notes {
				if n.Level == level && n.Object == w.name && (n.Container == g.name || n.Container == "" && i == 0) {
					g.comments = append(g.comments, commented(headings[level]+": "+n.Text))
				}
			}
		}
		g.node.HeadComment = strings.Join(g.comments, "\n")
	}
}

// noteOwner notes that a controller reverts changes of the object.
func (m *migration) noteOwner(w workload) {
	for _, owner := range items(get(w.node, "metadata", "ownerReferences")) {
		m.note(Required, w.name, "", "%s %s creates this object and reverts changes. Make the change there",
			text(get(owner, "kind")), text(get(owner, "name")))
	}
}

// noteGracePeriod notes that the kubelet may kill the processes while they finish their calls.
func (m *migration) noteGracePeriod(w workload, groups []*group) {
	seconds := 30
	if n := text(get(w.pod, "terminationGracePeriodSeconds")); n != "" {
		var err error
		if seconds, err = strconv.Atoi(n); err != nil {
			return
		}
	}
	longest, flag := time.Duration(0), ""
	for _, g := range groups {
		for _, s := range g.sources {
			for _, name := range []string{"timeout", "resize-timeout", "modify-timeout"} {
				f, _ := s.lookup(name)
				if d, err := time.ParseDuration(f.expanded); err == nil && g.elects() && d > longest {
					longest, flag = d, name
				}
			}
		}
	}
	if needed := int((longest + 10*time.Second).Seconds()); longest > 0 && seconds < needed {
		m.note(Information, w.name, "", "the pod is killed %d s after SIGTERM, and a call may last %v (--%s). If one is running "+
			"then, the Lease is not released, and the next replica waits until it expires, as with the sidecars. "+
			"terminationGracePeriodSeconds: %d would avoid that", seconds, longest, flag, needed)
	}
}

// sources returns the containers of a list that can be replaced.
func (m *migration) sources(w workload, list *yaml.Node) []*source {
	var sources []*source
	for i, item := range items(list) {
		c := resolved(item)
		name := text(get(c, "name"))
		if program, wrapper := wrapped(c); program != "" {
			m.note(Required, w.name, "", "container %s was kept: %s starts %s and may do more than that. "+
				"Call %s without %s and migrate again", name, wrapper, program, program, wrapper)
			continue
		}
		s := &source{kind: kindOf(c), index: i, name: name, node: c, env: environment(c), differing: map[string]string{}}
		if s.kind == "" {
			if looksLikeSidecar(c) {
				m.note(Information, w.name, "", "container %s was kept: the name of its image is not that of a known sidecar. "+
					"If it is one, give the container the name of the sidecar, such as csi-attacher, and migrate again", name)
			}
			continue
		}
		unknown := s.readFlags(m.Tables)
		s.mount = mountOf(c, s.address())
		if why := m.whyPatched(s, unknown); why != "" {
			m.note(Required, w.name, "", "container %s was kept: %s", name, why)
			continue
		}
		sources = append(sources, s)
	}
	return sources
}

// groups assigns each source to the first group without a conflict, or to one of its own with PerRole. A livenessprobe is replaced
// beside a sidecar with the same socket.
func (m *migration) groups(w workload, list *yaml.Node, sources []*source) []*group {
	isProbe := func(s *source) bool { return s.kind == livenessprobe }
	sidecars := slices.DeleteFunc(slices.Clone(sources), isProbe)
	kept := keptContainers(list, sidecars)
	taken := m.takenNames(w, list, kept)
	several := slices.ContainsFunc(sidecars, func(s *source) bool { return s.socket() != sidecars[0].socket() })
	var groups []*group
	add := func(s *source, reasons []string) {
		g := &group{object: w, m: m, name: m.containerName(s, driverOf(s, kept, several), taken)}
		g.add(s)
		taken = append(taken, g.name)
		m.named[w.pod] = append(m.named[w.pod], g.name)
		if len(reasons) > 0 && !m.PerRole {
			g.info("%s has its own container: %s", s.name, strings.Join(slices.Compact(reasons), "; "))
		}
		groups = append(groups, g)
	}
	for _, s := range sidecars {
		if g, reasons := m.groupFor(s, groups); g != nil {
			g.add(s)
		} else {
			add(s, reasons)
		}
	}
	for _, s := range sources {
		besideOne := slices.ContainsFunc(groups, func(g *group) bool { return g.sources[0].socket() == s.socket() })
		if !isProbe(s) || !besideOne {
			continue
		}
		if g, _ := m.groupFor(s, groups); g != nil {
			g.add(s)
		} else if m.PerRole {
			add(s, nil)
		}
	}
	return groups
}

// groupFor returns the first of groups that s can join. If it is nil, reasons has the conflicts.
func (m *migration) groupFor(s *source, groups []*group) (_ *group, reasons []string) {
	if m.PerRole {
		return nil, nil
	}
	for _, g := range groups {
		reason := g.conflict(s)
		if reason == "" {
			return g, nil
		}
		reasons = append(reasons, reason)
	}
	return nil, reasons
}

// takenNames returns the names of the containers of w that are not replaced, and of the new ones. kept are those of list.
func (m *migration) takenNames(w workload, list *yaml.Node, kept []*yaml.Node) []string {
	taken := slices.Clone(m.named[w.pod])
	for _, key := range []string{"initContainers", "containers"} {
		containers := kept
		if other := get(w.pod, key); other != list {
			containers = keptContainers(other, nil)
		}
		for _, c := range containers {
			taken = append(taken, text(get(c, "name")))
		}
	}
	return taken
}

// keptContainers returns the containers of a list that are not replaced.
func keptContainers(list *yaml.Node, sources []*source) []*yaml.Node {
	var kept []*yaml.Node
	for i, item := range items(list) {
		if !slices.ContainsFunc(sources, func(s *source) bool { return s.index == i }) {
			kept = append(kept, resolved(item))
		}
	}
	return kept
}

// containerName returns the name of a new container, with that of its driver if the pod has several. With PerRole names do
// not change, so that references to them still work.
func (m *migration) containerName(s *source, driver string, taken []string) string {
	if m.PerRole {
		return s.name
	}
	candidates := []string{"storage-controller", "storage-controller-" + strings.TrimPrefix(s.kind.command(), "csi-")}
	if driver != "" {
		candidates[0] = "storage-controller-" + driver
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

// conflict returns the reason why s cannot share a container with the sources of g, "" if it can.
func (g *group) conflict(s *source) string {
	for _, have := range g.sources {
		if reason := g.conflictOf(have, s); reason != "" {
			return reason
		}
	}
	return ""
}

func (g *group) conflictOf(a, b *source) string {
	if a.socket() != b.socket() {
		return fmt.Sprintf("its socket (%s) differs from that of %s (%s)", b.address(), a.name, a.address())
	}
	switch {
	case a.kind == b.kind:
		return "there is another " + string(a.kind)
	case a.kind == topolvm && b.kind == csiAttacher, a.kind == csiAttacher && b.kind == topolvm:
		return "the command topolvm has no attacher"
	}
	if at := mountConflict(a, b); at != "" {
		return fmt.Sprintf("it mounts another volume at %s than %s", at, a.name)
	}
	if name := variableConflict(a, b); name != "" {
		return fmt.Sprintf("its variable %s differs from that of %s", name, a.name)
	}
	if x, y := get(a.node, "envFrom"), get(b.node, "envFrom"); x != nil && y != nil && !sameValue(x, y) {
		return fmt.Sprintf("its envFrom differs from that of %s", a.name)
	}
	for _, name := range ofProcess {
		x, inA := a.lookup(name)
		y, inB := b.lookup(name)
		if inA && inB && x.expanded != y.expanded {
			return fmt.Sprintf("its --%s differs from that of %s", name, a.name)
		}
	}
	if a.kind == livenessprobe || b.kind == livenessprobe {
		return ""
	}
	for _, name := range []string{"kubeconfig", "master"} {
		if a.get(name) != b.get(name) {
			return fmt.Sprintf("its --%s differs from that of %s", name, a.name)
		}
	}
	if a.on("node-deployment") != b.on("node-deployment") {
		return "only one of them is distributed (--node-deployment)"
	}
	return ""
}

// ofProcess are the options on which the sections that set them must agree.
var ofProcess = []string{"logging-format", "log-text-split-stream", "log-text-info-buffer-size", "log-json-split-stream",
	"log-json-info-buffer-size", "exit-on-connection-loss"}

// mountConflict returns a path at which a and b mount different volumes, or "".
func mountConflict(a, b *source) string {
	for _, m := range items(get(b.node, "volumeMounts")) {
		for _, n := range items(get(a.node, "volumeMounts")) {
			if text(get(m, "mountPath")) == text(get(n, "mountPath")) && !sameSource(m, n) {
				return text(get(m, "mountPath"))
			}
		}
	}
	return ""
}

func sameSource(a, b *yaml.Node) bool {
	return text(get(a, "name")) == text(get(b, "name")) && text(get(a, "subPath")) == text(get(b, "subPath"))
}

// address returns the path of the socket in the container.
func (s *source) address() string {
	name, byDefault := "csi-address", "/run/csi/socket"
	if s.kind == topolvm {
		name, byDefault = "csi-socket", "/run/topolvm/csi-topolvm.sock"
	}
	return path.Clean("/" + strings.TrimLeft(strings.TrimPrefix(cmp.Or(s.get(name), byDefault), "unix:"), "/"))
}

// socket identifies the socket by its volume, which containers may mount at different paths.
func (s *source) socket() string {
	return socketAt(s.node, s.address())
}

// socketAt identifies the socket that has an address in a container.
func socketAt(container *yaml.Node, address string) string {
	mount := mountOf(container, address)
	if mount == nil {
		return address
	}
	inVolume := strings.TrimPrefix(address, path.Clean(text(get(mount, "mountPath"))))
	return text(get(mount, "name")) + ":" + path.Join(text(get(mount, "subPath")), inVolume)
}

// mountOf returns the mount of a container that contains a path, nil for none.
func mountOf(container *yaml.Node, address string) *yaml.Node {
	var best *yaml.Node
	for _, m := range items(get(container, "volumeMounts")) {
		at := strings.TrimSuffix(path.Clean(text(get(m, "mountPath"))), "/")
		if strings.HasPrefix(address, at+"/") && (best == nil || len(at) >= len(text(get(best, "mountPath")))) {
			best = m
		}
	}
	return best
}

// invalidInName matches what the name of a container must not contain.
var invalidInName = regexp.MustCompile(`[^a-z0-9]+`)

// driverOf returns a name for the driver at the socket of s: that of the container which is called with the socket, else that
// of the socket. It returns "" unless there are several drivers.
func driverOf(s *source, containers []*yaml.Node, several bool) string {
	if !several {
		return ""
	}
	name := strings.TrimSuffix(path.Base(s.address()), path.Ext(s.address()))
	for _, c := range containers {
		argv := argumentsOf(c)
		if slices.ContainsFunc(argv, func(arg *yaml.Node) bool { return isCSIAddress(text(arg)) }) {
			continue // another client of the driver
		}
		for _, arg := range argv {
			_, address, found := strings.Cut(Expand(text(arg), environment(c)), "/")
			if found && socketAt(c, path.Clean("/"+address)) == s.socket() {
				name = text(get(c, "name"))
			}
		}
	}
	return strings.Trim(invalidInName.ReplaceAllString(strings.ToLower(name), "-"), "-")
}
