package migrate

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// arguments are those of the new container, and the same with the values of variables
// put in as far as they are known.
func (g *group) arguments() (args []*yaml.Node, known []string) {
	args, known = []*yaml.Node{scalar(g.command)}, []string{g.command}
	flags := g.flags()
	if g.command == "all" {
		flags = append([]given{made("controllers", strings.Join(g.roles(), ","))}, flags...)
	}
	for _, f := range flags {
		args = append(args, f.argument())
		known = append(known, f.String())
	}
	return args, known
}

// made is a flag that no source has.
func made(name, value string) given {
	return given{name: name, value: value, known: value, node: &yaml.Node{}}
}

// roles are those of the group in the order of the tables.
func (g *group) roles() []string {
	var roles []string
	for _, r := range g.m.Tables.Roles {
		for _, s := range g.sources {
			if slices.Contains(s.roles, r.Name) {
				roles = append(roles, r.Name)
			}
		}
	}
	return roles
}

// prepare leaves each source with the flags that are to be carried over.
func (g *group) prepare() {
	for _, s := range g.sources {
		switch s.kind {
		case topolvm:
			s.roles = []string{"nodecontroller"}
			g.prepareTopolvm(s)
		case csiAttacher:
			s.roles = []string{"attacher"}
			s.carry(g.m.Tables, g.note)
		case csiProvisioner:
			s.roles = []string{"provisioner"}
			s.carry(g.m.Tables, g.note)
			if s.on(g.m.Tables, "enable-capacity") {
				s.roles = append(s.roles, "capacity")
			}
		}
		s.dropUseless(g)
	}
}

// dropUseless drops what would keep the new container from starting.
func (s *source) dropUseless(g *group) {
	t := g.m.Tables
	drop := func(name string) {
		s.flags = slices.DeleteFunc(s.flags, func(f given) bool { return f.name == name })
	}
	if s.on(t, "node-deployment") && s.on(t, "leader-election") {
		drop("leader-election")
		g.note("--leader-election of %s was dropped: with --node-deployment the instance of each node works", s.name)
	}
	_, endpoint := s.lookup("http-endpoint")
	if f, both := s.lookup("metrics-address"); both && endpoint {
		drop("metrics-address")
		if f.value != "" {
			g.note("--metrics-address=%s of %s was dropped: only one of it and --http-endpoint may be set", f.value, s.name)
		}
	}
}

// prepareTopolvm leaves what concerns the work on nodes, claims and pods. The container
// stays, and with it the flags of what it goes on to do.
func (g *group) prepareTopolvm(s *source) {
	t := g.m.Tables
	profile := g.topolvmProfile(s)
	flags := []given{made("csi-address", s.address()), made("profile", profile)}
	election := false
	for _, f := range s.flags {
		switch {
		case strings.HasPrefix(f.name, "leader-election"), f.name == "skip-node-finalize":
			if _, ok := t.flag("nodecontroller", f.name); ok {
				flags = append(flags, f)
				election = election || f.name == "leader-election"
			}
		}
	}
	if !election {
		flags = append(flags, made("leader-election", "true"))
	}
	s.flags = append(flags, made("enable-webhooks", "false"))
	lease, byDefault := s.lookup("leader-election-id")
	if !byDefault {
		lease.value = "topolvm"
	}
	g.note("%s cannot be removed: the driver itself is in it and serves the socket that everything else in the pod calls. "+
		"It keeps its flags, ports and webhooks", s.name)
	g.note("nodes, claims and pods are looked after by whoever holds the Lease %s: the role nodecontroller here, with --profile=%s as its version suggests, or %s, never both. "+
		"To move the admission webhooks too, give %s --enable-webhooks=false, and the container here its port, its mount of the certificate and --enable-webhooks=true", lease.value, profile, s.name, s.name)
}

// classic are the releases of TopoLVM whose controller keeps claims by a finalizer.
var classic = regexp.MustCompile(`:v?0\.([0-3]?[0-9])\.`)

func (g *group) topolvmProfile(s *source) string {
	switch {
	case s.env["USE_LEGACY"] != "":
		return "topolvm-legacy"
	case classic.MatchString(text(get(s.node, "image"))):
		return "topolvm-classic"
	}
	return "topolvm"
}

// flags are the merged ones, in the order in which the sources name them first.
func (g *group) flags() []given {
	if g.command != "all" {
		return g.sources[0].flags
	}
	var out []given
	done := map[string]bool{}
	for _, s := range g.sources {
		for _, f := range s.flags {
			if !done[f.name] {
				done[f.name] = true
				out = append(out, g.merged(f.name)...)
			}
		}
	}
	return g.limits(out)
}

// ofEndpoint is what belongs to the address of metrics and health, of which there is one.
func (g *group) ofEndpoint(name string, values []value) []given {
	chosen := g.endpoint()
	for _, v := range values {
		if v.source != chosen && name == "metrics-path" {
			g.note("--metrics-path=%s of %s was dropped: its metrics are with those of the other roles", v.value, v.source.name)
		}
	}
	for _, v := range values {
		if v.source == chosen {
			return []given{v.given}
		}
	}
	return nil
}

// value is a flag and who gave it.
type value struct {
	given
	source *source
}

func (g *group) values(name string) []value {
	var values []value
	for _, s := range g.sources {
		if f, ok := s.lookup(name); ok {
			values = append(values, value{f, s})
		}
	}
	return values
}

func allEqual(values []value) bool {
	return !slices.ContainsFunc(values, func(v value) bool { return v.known != values[0].known })
}

// merged is what becomes of one flag in "all".
func (g *group) merged(name string) []given {
	values := g.values(name)
	if len(g.m.Tables.rolesWith(name)) > 0 {
		return g.ofRoles(name, values)
	}
	switch name {
	case "csi-address": // the same socket for all, by any path
		return []given{values[0].given}
	case "leader-election":
		return g.election(values)
	case "leader-election-lease-duration", "leader-election-renew-deadline", "leader-election-retry-period":
		return g.lease(name, values)
	case "leader-election-labels", "feature-gates":
		return []given{g.union(name, values)}
	case "http-endpoint", "metrics-address", "metrics-path":
		return g.ofEndpoint(name, values)
	case "v", "kube-api-qps", "kube-api-burst":
		return []given{g.largest(name, values)}
	case "leader-election-namespace":
		return []given{g.first(name, slices.DeleteFunc(slices.Clone(values), func(v value) bool { return g.leaseNamespace(v.source) == "" }), values)}
	}
	return []given{g.first(name, values, values)}
}

// ofRoles is an option that each role may have for itself.
func (g *group) ofRoles(name string, values []value) []given {
	having := 0
	for _, s := range g.sources {
		for _, r := range s.roles {
			if slices.Contains(g.m.Tables.rolesWith(name), r) {
				having++
			}
		}
	}
	var out []given
	for _, v := range values {
		for _, r := range v.source.roles {
			if !slices.Contains(g.m.Tables.rolesWith(name), r) {
				continue
			}
			f := v.given
			if len(out) > 0 {
				f.node = &yaml.Node{} // its comment is there already
			}
			if _, prefixed := g.m.Tables.flag("all", r+"-"+name); prefixed {
				f.name = r + "-" + name
			}
			out = append(out, f)
		}
	}
	if len(out) == having && len(out) > 0 && allEqual(values) {
		f := values[0].given
		return []given{f}
	}
	if len(out) == 0 { // of a role that does not run
		v := values[0]
		g.note("--%s=%s of %s was dropped: it belongs to a role that did not run", name, v.value, v.source.name)
	}
	return out
}

// first is the first of some values, with a note if others differ.
func (g *group) first(name string, preferred, values []value) given {
	if len(preferred) == 0 {
		preferred = values
	}
	chosen := preferred[0]
	for _, v := range values {
		if v.known != chosen.known {
			g.note("--%s=%s of %s was dropped: %s has %s, and there is one for all roles", name, v.value, v.source.name, chosen.source.name, chosen.value)
		}
	}
	return chosen.given
}

// largest is the greatest number.
func (g *group) largest(name string, values []value) given {
	chosen := values[0]
	for _, v := range values[1:] {
		if amount(v.known) > amount(chosen.known) {
			chosen = v
		}
	}
	if !allEqual(values) {
		g.note("--%s=%s is the largest of those of %s: there is one for all roles", name, chosen.value, names(values))
	}
	return chosen.given
}

func amount(s string) (n float64) {
	_, _ = fmt.Sscan(s, &n)
	return n
}

func names(values []value) string {
	var all []string
	for _, v := range values {
		all = append(all, v.source.name)
	}
	return enumerate(all)
}

func enumerate(all []string) string {
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " and " + all[len(all)-1]
}

// election is on where one source had it on.
func (g *group) election(values []value) []given {
	chosen := values[0]
	for _, v := range values {
		if isTrue(v.known) {
			chosen = v
			break
		}
	}
	if isTrue(chosen.known) {
		for _, s := range g.sources {
			if !s.on(g.m.Tables, "leader-election") {
				g.note("%s had no leader election; here it has, as %s had. While an old replica of it runs, both work: scale the old ones to 0 before the first rollout", s.name, chosen.source.name)
			}
		}
	}
	return []given{chosen.given}
}

// lease takes the three times of leader election from one source: they have to fit together.
func (g *group) lease(name string, values []value) []given {
	t := g.m.Tables
	var chosen *source
	differ := false
	for _, s := range g.sources {
		if !s.on(t, "leader-election") {
			continue
		}
		if chosen != nil && g.times(s) != g.times(chosen) {
			differ = true
		}
		if chosen == nil || length(s.get(t, "leader-election-lease-duration")) > length(chosen.get(t, "leader-election-lease-duration")) {
			chosen = s
		}
	}
	if chosen == nil {
		return []given{values[0].given}
	}
	if differ {
		g.note("the times of leader election differ; those of %s, with the longest Lease, are kept (%s): a failover takes as long as they say", chosen.name, g.times(chosen))
	}
	if f, ok := chosen.lookup(name); ok {
		return []given{f}
	}
	return nil // its default
}

func (g *group) times(s *source) string {
	t := g.m.Tables
	return s.get(t, "leader-election-lease-duration") + ", " + s.get(t, "leader-election-renew-deadline") + ", " + s.get(t, "leader-election-retry-period")
}

func length(s string) time.Duration {
	d, _ := time.ParseDuration(s)
	return d
}

// union is a list of pairs that several sources add to.
func (g *group) union(name string, values []value) given {
	out := values[0].given
	have := map[string]string{}
	var all []string
	for _, v := range values {
		for item := range strings.SplitSeq(v.value, ",") {
			key, content, _ := strings.Cut(strings.Map(pairSeparator, item), "=")
			before, there := have[key]
			switch {
			case !there:
				have[key] = content
				all = append(all, item)
			case before != content:
				g.note("%s in --%s of %s was dropped: another container has %s", item, name, v.source.name, before)
			}
		}
	}
	out.value = strings.Join(all, ",")
	out.known = expand(out.value, values[0].source.env)
	return out
}

func pairSeparator(r rune) rune {
	if r == ':' {
		return '='
	}
	return r
}

// limits completes the limits of requests to the API server: in "all" there are none
// unless both numbers are set.
func (g *group) limits(flags []given) []given {
	for _, kind := range []string{"kube-api", "kube-api-capacity"} {
		i := slices.IndexFunc(flags, func(f given) bool { return f.name == kind+"-qps" })
		j := slices.IndexFunc(flags, func(f given) bool { return f.name == kind+"-burst" })
		switch {
		case i >= 0 && j < 0 && flags[i].known != "0":
			f, _ := g.m.Tables.flag("provision", kind+"-burst")
			flags = slices.Insert(flags, i+1, made(f.Name, f.Default))
		case i < 0 && j >= 0:
			g.note("--%s-burst=%s was dropped: without --%s-qps, which the old default set, \"all\" has no limit that may be exceeded", kind, flags[j].value, kind)
			flags = slices.Delete(flags, j, j+1)
		}
	}
	return flags
}
