// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// OfDriver returns all with the accesses to the ConfigMap of lost nodes limited to that of driver, as in the chart.
func OfDriver(all []rbac.Access, driver string) []rbac.Access {
	for i, a := range all {
		if isConfigMap(a) && driver != "" {
			all[i].Name = nodecleanup.ConfigMapName(driver)
		}
	}
	return all
}

// isConfigMap reports whether a is limited to the ConfigMap of a driver.
func isConfigMap(a rbac.Access) bool { return a.Resource == "configmaps" && a.Verb != "create" }

// accesses returns the permissions to review: without the name of the driver, not those that are limited to its ConfigMap.
func (p Plan) accesses() []rbac.Access {
	var all []rbac.Access
	for _, g := range p.Grants {
		all = append(all, g.Accesses...)
	}
	return slices.DeleteFunc(all, func(a rbac.Access) bool { return isConfigMap(a) && a.Name == "" })
}

// Permissions are the results of the access reviews that a process has made for itself.
type Permissions struct {
	Time    time.Time     `json:"time"`
	User    string        `json:"user,omitempty"` // of the process; "" if unknown
	Missing []rbac.Access `json:"missing"`
	// Unknown are those whose review failed. All others of the plan are granted.
	Unknown []Unreviewed `json:"unknown,omitempty"`
}

// Unreviewed is a permission whose review failed.
type Unreviewed struct {
	Access rbac.Access `json:"access"`
	Error  string      `json:"error"`
}

// Review reviews the permissions of plan, each of them once, for the user of client.
func Review(ctx context.Context, client kubernetes.Interface, plan Plan) Permissions {
	p := Permissions{Missing: []rbac.Access{}}
	user, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err == nil { // not older than 1.28
		p.User = user.Status.UserInfo.Username
	}
	all := plan.accesses()
	answers := rbac.Review(ctx, client, all)
	for _, a := range all {
		err := answers[a]
		delete(answers, a) // it may be in several grants
		switch {
		case errors.Is(err, rbac.ErrDenied):
			p.Missing = append(p.Missing, a)
		case err != nil:
			p.Unknown = append(p.Unknown, Unreviewed{a, err.Error()})
		}
	}
	p.Time = time.Now().UTC()
	return p
}

// answers returns the results of p as those of [rbac.Review].
func (p Permissions) answers() map[rbac.Access]error {
	answers := map[rbac.Access]error{}
	for _, a := range p.Missing {
		answers[a] = rbac.ErrDenied
	}
	for _, u := range p.Unknown {
		answers[u.Access] = errors.New(u.Error)
	}
	return answers
}

// review returns the permissions of the plan: those of the process if it has reviewed them.
func (e *examination) review(ctx context.Context) (map[rbac.Access]error, error) {
	if p := e.in.Permissions; p != nil {
		e.ok("rbac", "reviewed by the process at %s, at most once a minute", p.Time.Format(time.RFC3339))
		return p.answers(), nil
	}
	client, err := e.reviewClient()
	if err != nil {
		return nil, err
	}
	return rbac.Review(ctx, client, e.plan.accesses()), nil
}

// checkGrants checks the permissions of the plan.
func (e *examination) checkGrants(ctx context.Context) {
	answers, err := e.review(ctx)
	if err != nil {
		e.unknown("rbac", "creating the client for access reviews: %v", err)
		return
	}
	missingOf := func(g rbac.Grant) (missing []rbac.Access, failed error) {
		for _, a := range g.Accesses {
			switch err := answers[a]; { // nil also for an access that is not checked
			case errors.Is(err, rbac.ErrDenied):
				missing = append(missing, a)
			case err != nil:
				failed = fmt.Errorf("checking permission to %s: %w", a, err)
			}
		}
		return missing, failed
	}
	for _, g := range e.plan.Grants {
		missing, failed := missingOf(g)
		isOther := func(other rbac.Grant) bool { return other.File == g.Or }
		if i := slices.IndexFunc(e.plan.Grants, isOther); i >= 0 && missing != nil {
			if ofOther, err := missingOf(e.plan.Grants[i]); ofOther == nil && err == nil {
				e.unknown("rbac "+g.File, "not granted, but %s, which the driver may need instead", g.Or)
				continue
			}
		}
		c := grantCheck(g, missing, failed)
		foreign := e.in.Process != nil && g.Namespace != "" && g.Namespace != e.in.Namespace
		switch {
		case missing != nil && foreign: // a process does not decide where its account gets permissions
			c.Next = fmt.Sprintf("if the process should use namespace %s, apply deploy/rbac/%s there", g.Namespace, g.File)
		case missing != nil:
			e.Missing = append(e.Missing, Missing{g, rbac.Summary(missing)})
		}
		e.Findings = append(e.Findings, c)
	}
}

// grantCheck returns the check of g with its missing permissions.
func grantCheck(g rbac.Grant, missing []rbac.Access, failed error) finding.Finding {
	c := finding.Finding{Topic: "rbac " + g.File, Severity: finding.OK, Message: "granted"}
	switch {
	case len(missing) > 0:
		c.Severity, c.Message = finding.Failing, "not granted: "+rbac.Summary(missing)
		c.Next = "run doctor again with --print-rbac, and apply its output: kubectl apply -f -"
		if g.Without != "" {
			c.Severity, c.Message = finding.Warning, c.Message+"; without it "+g.Without
		}
	case failed != nil:
		c.Severity, c.Message = finding.Unknown, failed.Error()
	}
	return c
}

// reviewClient returns a client of the user whose permissions are checked.
func (e *examination) reviewClient() (kubernetes.Interface, error) {
	user := e.in.Impersonate
	if e.in.Process != nil {
		user = e.User
	}
	switch {
	case user == "" && e.in.Process != nil:
		return nil, errors.New("the user of the process is unknown")
	case user == "":
		return e.Kubernetes, nil
	}
	cfg := rest.CopyConfig(e.in.Config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user}
	if account, ok := strings.CutPrefix(user, serviceAccounts); ok { // impersonation does not add the groups of a user
		namespace, _, _ := strings.Cut(account, ":")
		cfg.Impersonate.Groups = []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
	}
	return kubernetes.NewForConfig(cfg)
}
