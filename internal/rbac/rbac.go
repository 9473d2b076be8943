// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package rbac has the permissions of the roles as in deploy/rbac, and checks and prints them.
package rbac

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-helpers/auth/rbac/validation"
	"sigs.k8s.io/yaml"

	deploy "github.com/storage-controller/storage-controller/deploy/rbac"
)

// Grant is a directory of deploy/rbac whose permissions a process uses.
type Grant struct {
	File string `json:"file"` // the name of the directory
	// Namespace is the namespace of the Roles in the directory.
	Namespace string `json:"namespace,omitempty"`
	// Accesses are the permissions.
	Accesses []Access `json:"accesses"`
	// Or is the directory that a driver with another capability needs instead; "" for none. If the capabilities are unknown, one of
	// the two is enough.
	Or string `json:"or,omitempty"`
	// Without describes the consequence of missing permissions; "" if the role does not work at all.
	Without string `json:"without,omitempty"`
}

// Access is a verb on a resource, or on a subresource ("pods/status"). Without a Namespace it is in all of them, without a Name
// on all objects.
type Access struct {
	Verb      string `json:"verb"`
	Group     string `json:"group,omitempty"`
	Resource  string `json:"resource"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Of returns the permissions in a directory of deploy/rbac, those of Roles in namespace.
func Of(directory, namespace string) []Access {
	text, err := deploy.Manifests.ReadFile(directory + "/rbac.yaml")
	if err != nil {
		panic(err)
	}
	var all []Access
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same fields, and a binding has no rules
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			panic(fmt.Sprintf("deploy/rbac/%s: %v", directory, err))
		}
		in := ""
		if role.Kind == "Role" {
			in = namespace
		}
		all = append(all, accesses(role.Rules, in)...)
	}
	return all
}

// IsKnown reports whether the grant is a part of its directory of deploy/rbac, with the objects that name sets.
func (g Grant) IsKnown(name func([]Access) []Access) bool {
	if _, err := deploy.Manifests.ReadFile(g.File + "/rbac.yaml"); err != nil {
		return false
	}
	known := name(Of(g.File, g.Namespace))
	return !slices.ContainsFunc(g.Accesses, func(a Access) bool { return !slices.Contains(known, a) })
}

// accesses returns every verb on every resource of rules, which have no URLs.
func accesses(rules []rbacv1.PolicyRule, namespace string) []Access {
	var all []Access
	for _, rule := range rules {
		for _, r := range validation.BreakdownRule(rule) {
			all = append(all, Access{r.Verbs[0], r.APIGroups[0], r.Resources[0], namespace, strings.Join(r.ResourceNames, "")})
		}
	}
	return all
}

// Rule returns the rule that grants a.
func (a Access) Rule() rbacv1.PolicyRule {
	rule := rbacv1.PolicyRule{APIGroups: []string{a.Group}, Resources: []string{a.Resource}, Verbs: []string{a.Verb}}
	if a.Name != "" {
		rule.ResourceNames = []string{a.Name}
	}
	return rule
}

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

// Manifests returns what grants all to account, each with a binding: a ClusterRole, and a Role in each namespace.
func Manifests(account types.NamespacedName, clusterRole, role string, all []Access) string {
	rules := map[string]string{} // by namespace
	for _, o := range byObject(all) {
		name := ""
		if o.Name != "" {
			name = fmt.Sprintf("resourceNames: [%q], ", o.Name)
		}
		rules[o.Namespace] += fmt.Sprintf("- {apiGroups: [%q], resources: [%q], %sverbs: [%s]}\n", o.Group, o.Resource, name,
			strings.Join(o.verbs, ", "))
	}
	var docs []string
	for _, namespace := range slices.Sorted(maps.Keys(rules)) {
		kind, name, in := "ClusterRole", scalar(clusterRole), ""
		if namespace != "" {
			kind, name, in = "Role", scalar(role), "\n  namespace: "+scalar(namespace)
		}
		const head = "apiVersion: rbac.authorization.k8s.io/v1\nkind: %s\nmetadata:\n  name: %s\n"
		docs = append(docs, fmt.Sprintf(head+"rules:\n%s", kind, name+in, rules[namespace]))
		docs = append(docs, fmt.Sprintf(head+"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: %s, name: %s}\n"+
			"subjects:\n- {kind: ServiceAccount, name: %s, namespace: %s}\n",
			kind+"Binding", name+in, kind, name, scalar(account.Name), scalar(account.Namespace)))
	}
	return strings.Join(docs, "---\n")
}

// scalar returns s as YAML, quoted unless it means itself: names are from manifests and objects that others write.
func scalar(s string) string {
	var list []any
	if err := yaml.Unmarshal([]byte("["+s+"]"), &list); err == nil && len(list) == 1 && list[0] == s {
		return s
	}
	return strconv.Quote(s)
}

// maxReviews bounds the access reviews that run at the same time.
const maxReviews = 8

// ErrDenied means that the API server does not grant an access.
var ErrDenied = errors.New("not granted")

// Review asks the API server whether it grants all to the user of client, each of them once. The result of an access is nil,
// [ErrDenied] or the error of the request.
func Review(ctx context.Context, client kubernetes.Interface, all []Access) map[Access]error {
	asked, answers := map[Access]bool{}, map[Access]error{}
	var lock sync.Mutex
	var group errgroup.Group
	group.SetLimit(maxReviews)
	for _, a := range all {
		if asked[a] {
			continue
		}
		asked[a] = true
		group.Go(func() error {
			err := review(ctx, client, a)
			if substitute, ok := a.Substitute(); ok && err != nil {
				err = review(ctx, client, substitute)
			}
			lock.Lock()
			defer lock.Unlock()
			answers[a] = err
			return nil
		})
	}
	_ = group.Wait() // each access has its own error
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
