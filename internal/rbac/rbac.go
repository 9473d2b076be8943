// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package rbac has the permissions of the roles as in deploy/rbac, and checks and prints them.
package rbac

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-helpers/auth/rbac/validation"
	"sigs.k8s.io/yaml"
)

// Grant is a directory of deploy/rbac whose permissions a process uses.
type Grant struct {
	File string // the name of the directory
	// Namespace is the namespace of the Role.
	Namespace string
	Rules     Rules
	// Or is the directory that a driver with another capability needs instead; "" for none. If the capabilities are unknown, one of
	// the two is enough.
	Or string
	// Without describes the consequence of missing permissions; "" if the role does not work at all.
	Without string
}

// Accesses returns every verb on every resource that g grants.
func (g Grant) Accesses() []Access {
	return append(accesses(g.Rules.Cluster, ""), accesses(g.Rules.Namespaced, g.Namespace)...)
}

// Access is a verb on a resource, or on a subresource ("pods/status"). Without a Namespace it is in all of them, without a Name
// on all objects.
type Access struct{ Verb, Group, Resource, Namespace, Name string }

// accesses returns every verb on every resource of rules.
func accesses(rules []rbacv1.PolicyRule, namespace string) []Access {
	var all []Access
	for _, rule := range rules {
		for _, r := range validation.BreakdownRule(rule) {
			a := Access{Verb: r.Verbs[0], Group: r.APIGroups[0], Resource: r.Resources[0], Namespace: namespace}
			if len(r.ResourceNames) > 0 {
				a.Name = r.ResourceNames[0]
			}
			all = append(all, a)
		}
	}
	return all
}

// Rule returns the rule that grants a.
func (a Access) Rule() rbacv1.PolicyRule { return RulesFor([]Access{a})[0] }

// Substitute returns the update in whose place a is a patch: the controllers use it without the permission to patch, as
// csi-provisioner does.
func (a Access) Substitute() (Access, bool) {
	ok := a.Verb == "patch" && (a.Resource == "persistentvolumeclaims" || a.Resource == "volumesnapshots")
	a.Verb = "update"
	return a, ok
}

func (a Access) String() string {
	text := a.Verb + " " + a.Resource
	if a.Group != "" {
		text += "." + a.Group
	}
	if a.Name != "" {
		text += " " + a.Name
	}
	if a.Namespace != "" {
		text += " in " + a.Namespace
	}
	return text
}

// object is an access without a verb, with all verbs on it.
type object struct {
	Access
	verbs []string
}

// byObject joins the verbs on each object, in the order of all.
func byObject(all []Access) []object {
	var objects []object
	for _, a := range all {
		verb := a.Verb
		a.Verb = ""
		i := slices.IndexFunc(objects, func(o object) bool { return o.Access == a })
		if i < 0 {
			i, objects = len(objects), append(objects, object{Access: a})
		}
		objects[i].verbs = append(objects[i].verbs, verb)
	}
	return objects
}

// Summary lists all, with one entry for all verbs on an object.
func Summary(all []Access) string {
	var texts []string
	for _, o := range byObject(all) {
		texts = append(texts, strings.Join(o.verbs, ",")+o.String())
	}
	return strings.Join(texts, "; ")
}

// RulesFor returns the rules that grant all, which are in one namespace.
func RulesFor(all []Access) []rbacv1.PolicyRule {
	var list []rbacv1.PolicyRule
	for _, o := range byObject(all) {
		rule := rbacv1.PolicyRule{APIGroups: []string{o.Group}, Resources: []string{o.Resource}, Verbs: o.verbs}
		if o.Name != "" {
			rule.ResourceNames = []string{o.Name}
		}
		list = append(list, rule)
	}
	return list
}

// maxReviews bounds the access reviews that run at the same time.
const maxReviews = 8

// ErrDenied means that the API server does not grant an access.
var ErrDenied = errors.New("not granted")

// Review asks the API server whether it grants all to the user of client, each of them once. The result of an access is nil,
// [ErrDenied] or the error of the request.
func Review(ctx context.Context, client kubernetes.Interface, all []Access) map[Access]error {
	results := map[Access]*error{}
	var group errgroup.Group
	group.SetLimit(maxReviews)
	for _, a := range all {
		if results[a] == nil {
			result := new(error)
			results[a] = result
			group.Go(func() error {
				*result = review(ctx, client, a)
				if substitute, ok := a.Substitute(); ok && *result != nil {
					*result = review(ctx, client, substitute)
				}
				return nil
			})
		}
	}
	_ = group.Wait() // each access has its own error
	answers := map[Access]error{}
	for a, result := range results {
		answers[a] = *result
	}
	return answers
}

func review(ctx context.Context, client kubernetes.Interface, a Access) error {
	resource, subresource, _ := strings.Cut(a.Resource, "/")
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: a.Verb, Group: a.Group, Resource: resource, Subresource: subresource, Namespace: a.Namespace, Name: a.Name,
		}},
	}, metav1.CreateOptions{})
	if err == nil && (answer.Status.Denied || !answer.Status.Allowed) {
		return ErrDenied
	}
	return err
}

// Manifests returns a Role with rules in namespace, or a ClusterRole without one, and its binding to account. Without rules, it
// returns "".
func Manifests(account types.NamespacedName, name, namespace string, rules []rbacv1.PolicyRule) string {
	if len(rules) == 0 {
		return ""
	}
	kind, meta := "ClusterRole", "metadata:\n  name: "+scalar(name)+"\n"
	if namespace != "" {
		kind, meta = "Role", meta+"  namespace: "+scalar(namespace)+"\n"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: rbac.authorization.k8s.io/v1\nkind: %s\n%srules:\n", kind, meta)
	for _, r := range rules {
		fmt.Fprintf(&b, "- {apiGroups: %s, resources: %s, ", quoted(r.APIGroups), quoted(r.Resources))
		if len(r.ResourceNames) > 0 {
			fmt.Fprintf(&b, "resourceNames: %s, ", quoted(r.ResourceNames))
		}
		fmt.Fprintf(&b, "verbs: [%s]}\n", strings.Join(r.Verbs, ", "))
	}
	fmt.Fprintf(&b, "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: %sBinding\n%s", kind, meta)
	fmt.Fprintf(&b, "roleRef: {apiGroup: rbac.authorization.k8s.io, kind: %s, name: %s}\n", kind, scalar(name))
	fmt.Fprintf(&b, "subjects:\n- {kind: ServiceAccount, name: %s, namespace: %s}\n", scalar(account.Name), scalar(account.Namespace))
	return b.String()
}

// quoted returns a list of YAML.
func quoted(list []string) string {
	var texts []string
	for _, s := range list {
		texts = append(texts, strconv.Quote(s))
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

// scalar returns s as YAML, quoted unless it means itself: names are from manifests and objects that others write.
func scalar(s string) string {
	var list []any
	if err := yaml.Unmarshal([]byte("["+s+"]"), &list); err == nil && len(list) == 1 && list[0] == s {
		return s
	}
	return strconv.Quote(s)
}
