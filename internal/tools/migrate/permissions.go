// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/auth/rbac/validation"

	"github.com/storage-controller/storage-controller/internal/rbac"
)

// Driver holds the capabilities of a driver on which permissions depend.
type Driver struct{ Attach, Expand, Snapshot, Groups, Modify, Topology bool }

// account is a ServiceAccount with what the input grants to it.
type account struct {
	types.NamespacedName
	rules   map[string][]rbacv1.PolicyRule // by namespace; "" of ClusterRoleBindings
	bound   bool                           // a binding of the input names it
	unknown []string                       // bound roles whose rules are not all in the input
}

// rbacObject is a Role, a binding or one for the cluster.
type rbacObject struct {
	rbacv1.ClusterRole
	RoleRef  rbacv1.RoleRef   `json:"roleRef"`
	Subjects []rbacv1.Subject `json:"subjects"`
}

// rbacObjects returns the objects of the input that are of kinds.
func (m *migration) rbacObjects(kinds ...string) []rbacObject {
	var all []rbacObject
	for _, kind := range kinds {
		for _, n := range m.objects[kind] {
			var fields any
			var o rbacObject
			if n.Decode(&fields) != nil {
				continue
			}
			if text, err := json.Marshal(fields); err == nil && json.Unmarshal(text, &o) == nil {
				all = append(all, o)
			}
		}
	}
	return all
}

// aggregates reports whether a controller adds the rules of role to the ClusterRole with the aggregation rule r.
func aggregates(r rbacv1.AggregationRule, role rbacObject) bool {
	return role.Kind == "ClusterRole" && slices.ContainsFunc(r.ClusterRoleSelectors, func(s metav1.LabelSelector) bool {
		selector, err := metav1.LabelSelectorAsSelector(&s)
		return err == nil && selector.Matches(labels.Set(role.Labels))
	})
}

// accountOf returns the ServiceAccount of the pods of w with its permissions.
func (m *migration) accountOf(w workload) account {
	a := account{rules: map[string][]rbacv1.PolicyRule{}}
	a.Name = cmp.Or(text(get(w.pod, "serviceAccountName")), text(get(w.pod, "serviceAccount")), "default")
	a.Namespace = text(get(w.node, "metadata", "namespace"))
	roles := m.rbacObjects("Role", "ClusterRole")
	for _, b := range m.rbacObjects("RoleBinding", "ClusterRoleBinding") {
		for _, s := range b.Subjects {
			if s.Kind == "ServiceAccount" && s.Name == a.Name && (a.Namespace == "" || s.Namespace == "" || s.Namespace == a.Namespace) {
				a.Namespace = cmp.Or(a.Namespace, s.Namespace)
				a.bind(b, roles)
			}
		}
	}
	a.Namespace = cmp.Or(a.Namespace, "default")
	return a
}

// bind adds the permissions of a binding.
func (a *account) bind(b rbacObject, roles []rbacObject) {
	a.bound = true
	namespace := ""
	if b.Kind == "RoleBinding" {
		namespace = cmp.Or(b.Namespace, a.Namespace)
	}
	i := slices.IndexFunc(roles, func(r rbacObject) bool {
		return r.Kind == b.RoleRef.Kind && r.Name == b.RoleRef.Name &&
			(r.Kind == "ClusterRole" || cmp.Or(r.Namespace, a.Namespace) == namespace)
	})
	if i < 0 {
		a.unknown = append(a.unknown, b.RoleRef.Kind+" "+b.RoleRef.Name)
		return
	}
	rules := roles[i].Rules
	if aggregated := roles[i].AggregationRule; aggregated != nil && len(rules) == 0 { // as read from a cluster it has its rules
		for _, r := range roles {
			if aggregates(*aggregated, r) {
				rules = append(rules, r.Rules...)
			}
		}
		a.unknown = append(a.unknown, b.RoleRef.Kind+" "+b.RoleRef.Name+", with the rules of others (aggregationRule)")
	}
	a.rules[namespace] = append(a.rules[namespace], rules...)
}

// may reports whether the account has a permission, as far as the input shows.
func (a account) may(need rbac.Access) bool {
	rules := slices.Concat(a.rules[""], a.rules[need.Namespace])
	// Leases and ConfigMaps may be restricted by name, because their names are those of the sidecars.
	if need.Resource == "leases" || need.Resource == "configmaps" {
		for i := range rules {
			rules[i].ResourceNames = nil
		}
	}
	covers, _ := validation.Covers(rules, []rbacv1.PolicyRule{need.Rule()})
	return covers
}

// missing returns what a does not have.
func (a account) missing(grants []rbac.Grant) []rbac.Access {
	var lacks []rbac.Access
	for _, g := range grants {
		for _, need := range g.Accesses {
			substitute, ok := need.Substitute()
			if !slices.Contains(lacks, need) && !a.may(need) && !(ok && a.may(substitute)) {
				lacks = append(lacks, need)
			}
		}
	}
	return lacks
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
	required, optional := m.grants(w, groups, a.Namespace)
	if !a.bound { // so that the printed permissions are enough for every driver
		for _, o := range optional {
			required = append(required, o.grants...)
		}
	}
	lacks := a.missing(required)
	switch who := fmt.Sprintf("ServiceAccount %s in namespace %s", a.Name, a.Namespace); {
	case !a.bound:
		m.note(Required, w.name, "", "the permissions of %s are not in the input. Append its RBAC manifests to the input to see "+
			"which it lacks, or grant everything that the new containers need: --print-rbac prints it", who)
	case len(a.unknown) > 0 && len(lacks) > 0:
		m.note(Required, w.name, "", "%s is bound to roles whose rules are not all in the input: %s. Append them to the input to see "+
			"which permissions it lacks, or grant everything that they may lack: --print-rbac prints it", who, enumerate(a.unknown))
	case len(lacks) > 0:
		m.note(Required, w.name, "", "%s lacks permissions: %s. --print-rbac prints them as manifests", who, rbac.Summary(lacks))
	}
	if a.bound && len(a.unknown) == 0 {
		for _, o := range optional {
			if without := a.missing(o.grants); len(without) > 0 {
				m.note(Information, w.name, "", "ServiceAccount %s lacks permissions that are needed only if the driver %s: %s",
					a.Name, o.condition, rbac.Summary(without))
			}
		}
	}
	for _, l := range lacks {
		if !slices.Contains(m.lacks[a.NamespacedName], l) {
			m.lacks[a.NamespacedName] = append(m.lacks[a.NamespacedName], l)
		}
	}
}

// missingPermissions returns manifests with what all accounts lack.
func (m *migration) missingPermissions() string {
	var docs []string
	byName := func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }
	for _, account := range slices.SortedFunc(maps.Keys(m.lacks), byName) {
		name := account.Name + "-storage-controller"
		docs = append(docs, rbac.Manifests(account, account.Namespace+"-"+name, name, m.lacks[account]))
	}
	return strings.Join(docs, "---\n")
}

// feature is a set of permissions that the containers need if the driver meets a condition.
type feature struct {
	condition string
	grants    []rbac.Grant
}

// grants returns the permissions that the new containers need in namespace. The sidecars show some capabilities of the driver;
// the features depend on the others.
func (m *migration) grants(w workload, groups []*group, namespace string) (required []rbac.Grant, features []feature) {
	// A feature gate that the input turns on shows what the driver supports, too.
	turnsOn := func(gate string) bool {
		return slices.ContainsFunc(groups, func(g *group) bool {
			return slices.ContainsFunc(g.sources, func(s *source) bool {
				value, _ := s.gate(gate)
				return isTrue(value)
			})
		})
	}
	d := Driver{Groups: turnsOn(groupGate), Modify: turnsOn(attributesClass), Topology: turnsOn("Topology")}
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
	needed := func(d Driver) (all []rbac.Grant) {
		for _, g := range groups {
			args := slices.DeleteFunc(slices.Clone(g.known), hasReference)
			if g.legacy() && g.serves {
				args = append(args, "--use-legacy")
			}
			all = append(all, m.Tables.Grants(args, d, namespace)...)
		}
		return all
	}
	required = needed(d)
	if served { // its capabilities are known
		return required, nil
	}
	add := func(condition string, more Driver) {
		grants := slices.DeleteFunc(needed(more), func(g rbac.Grant) bool {
			return slices.ContainsFunc(required, func(have rbac.Grant) bool { return have.File == g.File })
		})
		features = append(features, feature{condition, grants})
	}
	with := d
	with.Snapshot = true
	add("creates snapshots (CREATE_DELETE_SNAPSHOT)", with)
	with = d
	with.Groups = true
	add("creates group snapshots (CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT)", with)
	with = d
	with.Modify = true
	add("modifies volumes (MODIFY_VOLUME)", with)
	with = d
	with.Topology = true
	add("has topology (VOLUME_ACCESSIBILITY_CONSTRAINTS)", with)
	return required, features
}
