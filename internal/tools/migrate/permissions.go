// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Driver holds the capabilities of a driver on which permissions depend.
type Driver struct{ Attach, Expand, Snapshot, Modify, Topology bool }

// Grant is the set of rules that a role or feature needs.
type Grant struct {
	Name  string // of its directory in deploy/rbac
	Rules []Rule
	// Namespace is the one of the Role; "" means that of the pod.
	Namespace string
}

// Rule is an RBAC rule of a Role (Namespaced) or a ClusterRole.
type Rule struct {
	Namespaced bool     `yaml:"-"`
	Groups     []string `yaml:"apiGroups"`
	Resources  []string `yaml:"resources"`
	Names      []string `yaml:"resourceNames"`
	Verbs      []string `yaml:"verbs"`
}

// access is a verb on a resource, in one namespace if it is not "".
type access struct{ namespace, group, resource, verb string }

// accesses returns every verb on every resource of the grants, each once. podNamespace is that of the pod.
func accesses(grants []Grant, podNamespace string) []access {
	var all []access
	for _, g := range grants {
		for _, r := range g.Rules {
			namespace := ""
			if r.Namespaced {
				namespace = cmp.Or(g.Namespace, podNamespace)
			}
			for _, group := range r.Groups {
				for _, resource := range r.Resources {
					for _, verb := range r.Verbs {
						if a := (access{namespace, group, resource, verb}); !slices.Contains(all, a) {
							all = append(all, a)
						}
					}
				}
			}
		}
	}
	return all
}

// account is a ServiceAccount with what the input grants to it.
type account struct {
	name, namespace string
	grants          []Grant  // Namespace "" for a ClusterRoleBinding
	bound           bool     // a binding of the input names it
	unknown         []string // bound roles whose rules are not all in the input
}

// rbacObject is a Role, a binding or one for the cluster.
type rbacObject struct {
	Kind     string
	Metadata struct {
		Name, Namespace string
		Labels          map[string]string
	}
	Rules           []Rule
	AggregationRule *aggregation                `yaml:"aggregationRule"`
	RoleRef         struct{ Kind, Name string } `yaml:"roleRef"`
	Subjects        []struct{ Kind, Name, Namespace string }
}

// aggregation selects the ClusterRoles whose rules a controller writes into another one.
type aggregation struct {
	Selectors []struct {
		Labels      map[string]string `yaml:"matchLabels"`
		Expressions []any             `yaml:"matchExpressions"`
	} `yaml:"clusterRoleSelectors"`
}

// selects reports whether role has the labels of a selector. Selectors with expressions select nothing here.
func (r aggregation) selects(role rbacObject) bool {
	for _, s := range r.Selectors {
		matches := role.Kind == "ClusterRole" && len(s.Labels) > 0 && len(s.Expressions) == 0
		for key, value := range s.Labels {
			has, found := role.Metadata.Labels[key]
			matches = matches && found && has == value
		}
		if matches {
			return true
		}
	}
	return false
}

// accountOf returns the ServiceAccount of the pods of w with its permissions.
func (m *migration) accountOf(w workload) account {
	a := account{
		name:      cmp.Or(text(get(w.pod, "serviceAccountName")), text(get(w.pod, "serviceAccount")), "default"),
		namespace: text(get(w.node, "metadata", "namespace")),
	}
	decode := func(kinds ...string) (all []rbacObject) {
		for _, kind := range kinds {
			for _, n := range m.objects[kind] {
				var o rbacObject
				if n.Decode(&o) == nil {
					all = append(all, o)
				}
			}
		}
		return all
	}
	roles := decode("Role", "ClusterRole")
	for _, b := range decode("RoleBinding", "ClusterRoleBinding") {
		for _, s := range b.Subjects {
			if s.Kind == "ServiceAccount" && s.Name == a.name && (a.namespace == "" || s.Namespace == "" || s.Namespace == a.namespace) {
				a.namespace = cmp.Or(a.namespace, s.Namespace)
				a.bind(b, roles)
			}
		}
	}
	a.namespace = cmp.Or(a.namespace, "default")
	return a
}

// bind adds the permissions of a binding.
func (a *account) bind(b rbacObject, roles []rbacObject) {
	a.bound = true
	namespace := ""
	if b.Kind == "RoleBinding" {
		namespace = cmp.Or(b.Metadata.Namespace, a.namespace)
	}
	i := slices.IndexFunc(roles, func(r rbacObject) bool {
		return r.Kind == b.RoleRef.Kind && r.Metadata.Name == b.RoleRef.Name &&
			(r.Kind == "ClusterRole" || cmp.Or(r.Metadata.Namespace, a.namespace) == namespace)
	})
	if i < 0 {
		a.unknown = append(a.unknown, b.RoleRef.Kind+" "+b.RoleRef.Name)
		return
	}
	rules := roles[i].Rules
	if aggregated := roles[i].AggregationRule; aggregated != nil && len(rules) == 0 { // as read from a cluster it has its rules
		for _, r := range roles {
			if aggregated.selects(r) {
				rules = append(rules, r.Rules...)
			}
		}
		a.unknown = append(a.unknown, b.RoleRef.Kind+" "+b.RoleRef.Name+", with the rules of others (aggregationRule)")
	}
	a.grants = append(a.grants, Grant{Rules: rules, Namespace: namespace})
}

// may reports whether the account has a permission, as far as the input shows. Leases may be restricted by name,
// because their names are those of the sidecars.
func (a account) may(need access) bool {
	has := func(list []string, want string) bool {
		return slices.Contains(list, want) || slices.Contains(list, "*")
	}
	for _, g := range a.grants {
		if g.Namespace != "" && g.Namespace != need.namespace {
			continue
		}
		for _, r := range g.Rules {
			if has(r.Groups, need.group) && has(r.Resources, need.resource) && has(r.Verbs, need.verb) &&
				(len(r.Names) == 0 || need.resource == "leases" || need.resource == "configmaps") {
				return true
			}
		}
	}
	return false
}

// updates reports whether need is a patch in whose place the controllers use update, and a has that permission.
func (a account) updates(need access) bool {
	update := need
	update.verb = "update"
	return need.verb == "patch" && (need.resource == "persistentvolumeclaims" || need.resource == "volumesnapshots") && a.may(update)
}

// missing returns what a does not have.
func (a account) missing(grants []Grant) []access {
	return slices.DeleteFunc(accesses(grants, a.namespace), a.may)
}

// notePermissions notes the permissions that the new containers of w need and its ServiceAccount does not have.
func (m *migration) notePermissions(w workload, groups []*group) {
	for _, g := range groups {
		for _, s := range g.sources {
			if s.kind != livenessprobe {
				m.workloads[s.kind] = append(m.workloads[s.kind], w.name)
			}
		}
	}
	if m.Tables.Grants == nil {
		return
	}
	a := m.accountOf(w)
	required, optional := m.grants(w, groups)
	lacks := a.missing(required)
	if a.bound {
		lacks = slices.DeleteFunc(lacks, a.updates)
	}
	switch who := fmt.Sprintf("ServiceAccount %s in namespace %s", a.name, a.namespace); {
	case !a.bound:
		m.note(Required, w.name, "", "the permissions of %s are not in the input. Append its RBAC manifests to the input to see "+
			"which it lacks, or grant everything that the new containers need: --print-rbac prints it", who)
	case len(a.unknown) > 0 && len(lacks) > 0:
		m.note(Required, w.name, "", "%s is bound to roles whose rules are not all in the input: %s. Append them to the input to see "+
			"which permissions it lacks, or grant everything that they may lack: --print-rbac prints it", who, enumerate(a.unknown))
	case len(lacks) > 0:
		m.note(Required, w.name, "", "%s lacks permissions: %s. --print-rbac prints them as manifests", who, summary(lacks))
	}
	if a.bound && len(a.unknown) == 0 {
		for _, o := range optional {
			if without := a.missing(o.grants); len(without) > 0 {
				m.note(Information, w.name, "", "ServiceAccount %s lacks permissions that are needed only if the driver %s: %s",
					a.name, o.condition, summary(without))
			}
		}
	}
	m.addShortage(a, lacks)
}

// shortage is what an account lacks for all workloads that run as it.
type shortage struct {
	account
	lacks []access
}

// addShortage adds what a lacks for one more workload.
func (m *migration) addShortage(a account, lacks []access) {
	i := slices.IndexFunc(m.shortages, func(s shortage) bool { return s.name == a.name && s.namespace == a.namespace })
	if i < 0 {
		i, m.shortages = len(m.shortages), append(m.shortages, shortage{account: a})
	}
	for _, l := range lacks {
		if !slices.Contains(m.shortages[i].lacks, l) {
			m.shortages[i].lacks = append(m.shortages[i].lacks, l)
		}
	}
}

// missingPermissions returns manifests with what all accounts lack.
func (m *migration) missingPermissions() string {
	var docs []string
	for _, s := range m.shortages {
		if len(s.lacks) > 0 {
			docs = append(docs, s.manifests(s.lacks))
		}
	}
	return strings.Join(docs, "---\n")
}

// feature is a set of permissions that the containers need if the driver meets a condition.
type feature struct {
	condition string
	grants    []Grant
}

// grants returns the permissions that the new containers need. The sidecars show some capabilities of the driver;
// the features depend on the others.
func (m *migration) grants(w workload, groups []*group) (required []Grant, features []feature) {
	var d Driver
	served := false
	for _, c := range slices.Concat(items(get(w.pod, "initContainers")), items(get(w.pod, "containers"))) {
		switch kindOf(resolved(c)) {
		case csiAttacher:
			d.Attach = true
		case csiResizer:
			d.Expand = true
		case csiSnapshotter:
			d.Snapshot = true
		case topolvm:
			d.Expand, d.Snapshot, d.Topology, served = true, true, true, true
		}
	}
	needed := func(d Driver) (all []Grant) {
		for _, g := range groups {
			args := slices.DeleteFunc(slices.Clone(g.known), hasReference)
			if g.legacy() && g.serves() {
				args = append(args, "--use-legacy")
			}
			all = append(all, m.Tables.Grants(args, d)...)
		}
		return all
	}
	required = needed(d)
	if served { // its capabilities are known
		return required, nil
	}
	add := func(condition string, more Driver) {
		grants := slices.DeleteFunc(needed(more), func(g Grant) bool {
			return slices.ContainsFunc(required, func(have Grant) bool { return have.Name == g.Name })
		})
		features = append(features, feature{condition, grants})
	}
	with := d
	with.Snapshot = true
	add("creates snapshots (CREATE_DELETE_SNAPSHOT)", with)
	with = d
	with.Modify = true
	add("modifies volumes (MODIFY_VOLUME)", with)
	with = d
	with.Topology = true
	add("has topology (VOLUME_ACCESSIBILITY_CONSTRAINTS)", with)
	return required, features
}

// object is a resource with the verbs on it.
type object struct {
	access
	verbs []string
}

// byObject groups accesses by resource, in their order.
func byObject(all []access) []object {
	var objects []object
	for _, a := range all {
		verb := a.verb
		a.verb = ""
		i := slices.IndexFunc(objects, func(o object) bool { return o.access == a })
		if i < 0 {
			i, objects = len(objects), append(objects, object{access: a})
		}
		objects[i].verbs = append(objects[i].verbs, verb)
	}
	return objects
}

// summary lists permissions as text.
func summary(all []access) string {
	var texts []string
	for _, o := range byObject(all) {
		t := strings.Join(o.verbs, ",") + " " + o.resource
		if o.group != "" {
			t += "." + o.group
		}
		texts = append(texts, t)
	}
	return strings.Join(texts, "; ")
}

// manifests returns roles with permissions, and bindings to the account, one pair for each namespace.
func (a account) manifests(lacks []access) string {
	var docs []string
	var namespaces []string
	for _, l := range lacks {
		if !slices.Contains(namespaces, l.namespace) {
			namespaces = append(namespaces, l.namespace)
		}
	}
	for _, namespace := range namespaces {
		var rules []string
		for _, o := range byObject(lacks) {
			if o.namespace == namespace {
				rules = append(rules, fmt.Sprintf("- {apiGroups: [%q], resources: [%q], verbs: [%s]}\n", o.group, o.resource,
					strings.Join(o.verbs, ", ")))
			}
		}
		name, prefix, in := a.namespace+"-"+a.name+"-storage-controller", "Cluster", ""
		if namespace != "" {
			name, prefix, in = a.name+"-storage-controller", "", "\n  namespace: "+namespace
		}
		head := "apiVersion: rbac.authorization.k8s.io/v1\nkind: " + prefix + "Role%s\nmetadata:\n  name: " + name + in + "\n"
		docs = append(docs, fmt.Sprintf(head, "")+"rules:\n"+strings.Join(rules, ""), fmt.Sprintf(head, "Binding")+
			"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: "+prefix+"Role, name: "+name+"}\n"+
			"subjects:\n- {kind: ServiceAccount, name: "+a.name+", namespace: "+a.namespace+"}\n")
	}
	return strings.Join(docs, "---\n")
}
