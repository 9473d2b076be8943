// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// ofDriver limits the accesses to the ConfigMap of lost nodes to that of driver, as in the chart, and returns those to check:
// without the name of the driver, all others.
func ofDriver(all []rbac.Access, driver string) []rbac.Access {
	var checked []rbac.Access
	for i, a := range all {
		if a.Resource == "configmaps" && a.Verb != "create" {
			if driver == "" {
				continue
			}
			all[i].Name = nodecleanup.ConfigMapName(driver)
		}
		checked = append(checked, all[i])
	}
	return checked
}

// checkGrants checks the permissions of the plan, each of them once.
func (e *examination) checkGrants(ctx context.Context) {
	client, err := e.reviewClient()
	if err != nil {
		e.skip("rbac", "creating the client for access reviews: %v", err)
		return
	}
	var all []rbac.Access
	for _, g := range e.plan.Grants {
		all = append(all, ofDriver(g.Accesses, e.driver.Name)...)
	}
	answers := rbac.Review(ctx, client, all)
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
				e.skip("rbac "+g.File, "not granted, but %s, which the driver may need instead", g.Or)
				continue
			}
		}
		if missing != nil {
			e.Missing = append(e.Missing, Missing{g, rbac.Summary(missing)})
		}
		e.Checks = append(e.Checks, grantCheck(g, missing, failed))
	}
}

// grantCheck returns the check of g with its missing permissions.
func grantCheck(g rbac.Grant, missing []rbac.Access, failed error) Check {
	c := Check{Name: "rbac " + g.File, Status: OK, Message: "granted"}
	switch {
	case len(missing) > 0:
		c.Status, c.Message = Failure, "not granted: "+rbac.Summary(missing)
		c.Hint = "run doctor again with --print-rbac, and apply its output: kubectl apply -f -"
		if g.Without != "" {
			c.Status, c.Message = Warning, c.Message+"; without it "+g.Without
		}
	case failed != nil:
		c.Status, c.Message = Skipped, failed.Error()
	}
	return c
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
