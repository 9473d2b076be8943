// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// Rule is an RBAC rule of a Role (Namespaced) or a ClusterRole.
type Rule struct {
	Namespaced bool
	Groups     []string
	Resources  []string
	Names      []string
	Verbs      []string
}

// Files returns the names of the directories of deploy/rbac, sorted.
func Files() []string { return slices.Sorted(maps.Keys(rules)) }

// Rules returns the rules of a directory of deploy/rbac.
func Rules(file string) []Rule { return rules[file] }

// access is a verb on a resource.
type access struct {
	verb, group, resource, subresource, namespace, name string
}

// updatable reports whether a is a patch in whose place the controllers use update, as csi-provisioner does.
func (a access) updatable() bool {
	return a.verb == "patch" && a.subresource == "" && (a.resource == "persistentvolumeclaims" || a.resource == "volumesnapshots")
}

func (a access) String() string {
	text := a.verb + " " + a.resource
	if a.subresource != "" {
		text += "/" + a.subresource
	}
	if a.group != "" {
		text += "." + a.group
	}
	if a.name != "" {
		text += " " + a.name
	}
	if a.namespace != "" {
		text += " in " + a.namespace
	}
	return text
}

// rules returns the rules of g.
func (g Grant) rules() []Rule {
	if g.Rules != nil {
		return g.Rules
	}
	return rules[g.File]
}

// ofDriver returns g with the rule for the ConfigMap of lost nodes limited to its name, as in the chart. Without the
// name of the driver, the rule is not checked.
func (g Grant) ofDriver(driver string) Grant {
	limited := slices.Clone(g.rules())
	for i, r := range limited {
		if slices.Contains(r.Resources, "configmaps") && !slices.Contains(r.Verbs, "create") {
			limited[i].Names = []string{}
			if driver != "" {
				limited[i].Names = []string{nodecleanup.ConfigMapName(driver)}
			}
		}
	}
	g.Rules = limited
	return g
}

// accesses returns every verb on every resource that g grants.
func (g Grant) accesses() []access {
	var all []access
	for _, r := range g.rules() {
		objects := r.Names
		if objects == nil {
			objects = []string{""}
		}
		for _, group := range r.Groups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					for _, name := range objects {
						a := access{verb: verb, group: group, name: name}
						a.resource, a.subresource, _ = strings.Cut(resource, "/")
						if changed, ok := g.Names[name]; ok {
							a.name = changed
						}
						if r.Namespaced {
							a.namespace = g.Namespace
						}
						all = append(all, a)
					}
				}
			}
		}
	}
	return all
}

// maxReviews bounds the access reviews that run at the same time.
const maxReviews = 8

// answer is the result of an access review.
type answer struct {
	allowed bool
	err     error
}

// checkGrants checks the permissions of the plan, each of them once.
func (e *examination) checkGrants(ctx context.Context) {
	client, err := e.reviewClient()
	if err != nil {
		e.skip("rbac", "creating the client for access reviews: %v", err)
		return
	}
	for i, g := range e.plan.Grants {
		e.plan.Grants[i] = g.ofDriver(e.driver.Name)
	}
	answers := map[access]*answer{}
	var group errgroup.Group
	group.SetLimit(maxReviews)
	for _, g := range e.plan.Grants {
		for _, a := range g.accesses() {
			if answers[a] == nil {
				result := &answer{}
				answers[a] = result
				group.Go(func() error {
					result.allowed, result.err = allowed(ctx, client, a)
					if update := a; a.updatable() && !result.allowed {
						update.verb = "update"
						result.allowed, result.err = allowed(ctx, client, update)
					}
					return nil
				})
			}
		}
	}
	_ = group.Wait() // each answer has its own error
	missingOf := func(g Grant) (missing []access, failed error) {
		for _, a := range g.accesses() {
			switch result := answers[a]; {
			case result.err != nil:
				failed = fmt.Errorf("checking permission to %s: %w", a, result.err)
			case !result.allowed:
				missing = append(missing, a)
			}
		}
		return missing, failed
	}
	for _, g := range e.plan.Grants {
		missing, failed := missingOf(g)
		isOther := func(other Grant) bool { return other.File == g.Or }
		if i := slices.IndexFunc(e.plan.Grants, isOther); i >= 0 && missing != nil {
			if ofOther, err := missingOf(e.plan.Grants[i]); ofOther == nil && err == nil {
				e.skip("rbac "+g.File, "not granted, but %s, which the driver may need instead", g.Or)
				continue
			}
		}
		if missing != nil {
			e.Missing = append(e.Missing, Missing{g, summary(missing)})
		}
		e.Checks = append(e.Checks, g.check(missing, failed))
	}
}

// check returns the check of g with its missing permissions.
func (g Grant) check(missing []access, failed error) Check {
	c := Check{Name: "rbac " + g.File, Status: OK, Message: "granted"}
	switch {
	case len(missing) > 0:
		c.Status, c.Message = Failure, "not granted: "+summary(missing)
		c.Hint = "run doctor again with --print-rbac, and apply its output: kubectl apply -f -"
		if g.Without != "" {
			c.Status, c.Message = Warning, c.Message+"; without it "+g.Without
		}
	case failed != nil:
		c.Status, c.Message = Skipped, failed.Error()
	}
	return c
}

// summary lists all, with one entry for all verbs on a resource.
func summary(all []access) string {
	verbs := map[access][]string{}
	var objects []access // in the order of all
	for _, a := range all {
		object := a
		object.verb = ""
		if verbs[object] == nil {
			objects = append(objects, object)
		}
		verbs[object] = append(verbs[object], a.verb)
	}
	var texts []string
	for _, object := range objects {
		texts = append(texts, strings.Join(verbs[object], ",")+object.String())
	}
	return strings.Join(texts, "; ")
}

// reviewClient returns a client of the user whose permissions are checked.
func (e *examination) reviewClient() (kubernetes.Interface, error) {
	user := e.in.Impersonate
	if user == "" {
		return e.client, nil
	}
	cfg := rest.CopyConfig(e.in.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user}
	if account, ok := strings.CutPrefix(user, serviceAccounts); ok { // impersonation does not add the groups of a user
		namespace, _, _ := strings.Cut(account, ":")
		cfg.Impersonate.Groups = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
	}
	return kubernetes.NewForConfig(cfg)
}

func allowed(ctx context.Context, client kubernetes.Interface, a access) (bool, error) {
	review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: a.verb, Group: a.group, Resource: a.resource, Subresource: a.subresource, Namespace: a.namespace, Name: a.name,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed && !review.Status.Denied, nil
}
