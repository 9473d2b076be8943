package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Rule is a rule of RBAC. Namespaced ones are of a Role, the others of a ClusterRole.
type Rule struct {
	Namespaced bool
	Groups     []string
	Resources  []string
	Names      []string
	Verbs      []string
}

// Files is the directories of deploy/rbac whose rules are known here.
func Files() []string {
	var files []string
	for name := range rules {
		files = append(files, name)
	}
	slices.Sort(files)
	return files
}

// access is one question to the API server.
type access struct {
	verb, group, resource, subresource, namespace, name string
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

// accesses is what g grants, one verb on one resource each.
func (g Grant) accesses() []access {
	of := g.Rules
	if of == nil {
		of = rules[g.File]
	}
	var all []access
	for _, r := range of {
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

// mostReviews is how many questions for permissions are asked at the same time.
const mostReviews = 8

// checkGrants asks for each permission once, whatever number of files has it.
func (e *examination) checkGrants(ctx context.Context) {
	client, err := e.reviewer()
	if err != nil {
		e.skip("rbac", "making the client that asks for permissions: %v", err)
		return
	}
	var questions []access
	seen := map[access]int{}
	for _, g := range e.plan.Grants {
		for _, a := range g.accesses() {
			if _, ok := seen[a]; !ok {
				seen[a] = len(questions)
				questions = append(questions, a)
			}
		}
	}
	type answer struct {
		allowed bool
		err     error
	}
	answers := make([]answer, len(questions))
	var group errgroup.Group
	group.SetLimit(mostReviews)
	for i, a := range questions {
		group.Go(func() error {
			answers[i].allowed, answers[i].err = allowed(ctx, client, a)
			return nil
		})
	}
	_ = group.Wait() // each answer has its own error
	for _, g := range e.plan.Grants {
		var lacking []access
		var failed error
		for _, a := range g.accesses() {
			switch answer := answers[seen[a]]; {
			case answer.err != nil:
				failed = fmt.Errorf("asking whether one may %s: %w", a, answer.err)
			case !answer.allowed:
				lacking = append(lacking, a)
			}
		}
		e.report.Checks = append(e.report.Checks, g.check(lacking, failed))
	}
}

// check is how g came out.
func (g Grant) check(lacking []access, failed error) Check {
	c := Check{Name: "rbac " + g.File, Status: OK, Message: "granted"}
	switch {
	case len(lacking) > 0:
		c.Message = "not granted: " + listed(lacking)
		c.Status, c.Hint = Failure, fmt.Sprintf("grant it the rules of deploy/rbac/%s/rbac.yaml; beside sidecars under other names, for applying the file replaces theirs (docs/migrate.md, Permissions)", g.File)
		if g.Without != "" {
			c.Status, c.Message = Warning, c.Message+"; without it "+g.Without
		}
	case failed != nil:
		c.Status, c.Message = Skipped, failed.Error()
	}
	return c
}

// listed is all, with the verbs on one object together.
func listed(all []access) string {
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

// reviewer asks as the user whose permissions matter.
func (e *examination) reviewer() (kubernetes.Interface, error) {
	if e.in.Impersonate == "" {
		return e.client, nil
	}
	cfg := rest.CopyConfig(e.in.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: e.in.Impersonate}
	if rest, ok := strings.CutPrefix(e.in.Impersonate, "system:serviceaccount:"); ok { // the API server adds no groups to a user that is impersonated
		namespace, _, _ := strings.Cut(rest, ":")
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

// Rules is what a file of deploy/rbac grants.
func Rules(file string) []Rule { return rules[file] }
