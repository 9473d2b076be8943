// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"io"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Missing is a grant of which the user lacks permissions.
type Missing struct {
	Grant
	Permissions string // those that are missing
}

// serviceAccounts starts the user names of ServiceAccounts.
const serviceAccounts = "system:serviceaccount:"

// ErrNoServiceAccount means that the permissions of another user than a ServiceAccount were checked.
var ErrNoServiceAccount = errors.New("the user must be a ServiceAccount")

// WriteRBAC writes a ClusterRole or Role and its binding for each missing grant, as input of kubectl apply. Each
// has all rules of the grant under a name of its own: applying it never removes a permission.
func (r Report) WriteRBAC(w io.Writer) error {
	account, ok := strings.CutPrefix(r.User, serviceAccounts)
	namespace, name, _ := strings.Cut(account, ":")
	if !ok {
		return fmt.Errorf("%w, is %s", ErrNoServiceAccount, r.User)
	}
	subject := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}
	for _, m := range r.Missing {
		objects := m.objects("storage-controller:"+account+":"+m.File, subject)
		comment := fmt.Sprintf("# %s: not granted: %s\n", m.File, m.Permissions)
		if m.Without != "" {
			comment += fmt.Sprintf("# Optional: without it %s.\n", m.Without)
		}
		if _, err := io.WriteString(w, comment); err != nil {
			return err
		}
		for _, o := range objects {
			text, err := yaml.Marshal(o)
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintf(w, "%s---\n", text); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unreviewed returns an error that names the first permission that could not be checked, nil if there is none.
func (r Report) Unreviewed() error {
	var unchecked []Check
	for _, c := range r.Checks {
		skipped := c.Status == Skipped && strings.HasPrefix(c.Name, "rbac")
		if skipped || c.Status == Failure && c.Name == apiServerCheck { // no permission is checked after this failure
			unchecked = append(unchecked, c)
		}
	}
	if unchecked == nil {
		return nil
	}
	others := ""
	if len(unchecked) > 1 {
		others = fmt.Sprintf(" (and %s)", plural(len(unchecked)-1, "other check"))
	}
	return fmt.Errorf("permissions could not be checked: %s: %s%s. Fix the error, and run doctor again; "+
		"with --as or a workload, your user needs the verb impersonate", unchecked[0].Name, unchecked[0].Message, others)
}

// objects returns the roles of g called name, each with the binding of subject.
func (g Grant) objects(name string, subject rbacv1.Subject) []any {
	var objects []any
	subjects, meta := []rbacv1.Subject{subject}, metav1.ObjectMeta{Name: name}
	typed := func(kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: kind}
	}
	if rules := g.policyRules(false); rules != nil {
		objects = append(objects, rbacv1.ClusterRole{TypeMeta: typed("ClusterRole"), ObjectMeta: meta, Rules: rules},
			rbacv1.ClusterRoleBinding{TypeMeta: typed("ClusterRoleBinding"), ObjectMeta: meta, Subjects: subjects,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}})
	}
	if rules := g.policyRules(true); rules != nil {
		meta.Namespace = g.Namespace
		objects = append(objects, rbacv1.Role{TypeMeta: typed("Role"), ObjectMeta: meta, Rules: rules},
			rbacv1.RoleBinding{TypeMeta: typed("RoleBinding"), ObjectMeta: meta, Subjects: subjects,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}})
	}
	return objects
}

// policyRules returns the rules of g that belong in a Role, or those that belong in a ClusterRole.
func (g Grant) policyRules(namespaced bool) []rbacv1.PolicyRule {
	var list []rbacv1.PolicyRule
	for _, r := range g.rules() {
		if r.Namespaced != namespaced {
			continue
		}
		rule := rbacv1.PolicyRule{APIGroups: r.Groups, Resources: r.Resources, Verbs: r.Verbs}
		for _, name := range r.Names {
			if changed, ok := g.Names[name]; ok {
				name = changed
			}
			rule.ResourceNames = append(rule.ResourceNames, name)
		}
		list = append(list, rule)
	}
	return list
}
