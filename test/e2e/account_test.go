// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// shippedAccount is the ServiceAccount as which the tests run the roles. It may do what all
// directories of deploy/rbac grant, and nothing else; what each of them is for is in the
// tests about permissions, which use others.
const shippedAccount = "shipped"

// roleCommands run as that account. The others are for administrators.
var roleCommands = []string{"all", "provision", "attach", "resize", "snapshot", "capacity", "nodecontroller"}

// grants is what deploy/rbac grants in the cluster and in the namespace of the pod. Names of
// objects are left out: the tests, which share a cluster, have their own.
var grants = sync.OnceValues(func() (map[string][]rbacv1.PolicyRule, error) {
	files, err := filepath.Glob("../../deploy/rbac/*/rbac.yaml")
	if err != nil || len(files) == 0 {
		return nil, errors.Join(err, errors.New("deploy/rbac has no files"))
	}
	rules := map[string][]rbacv1.PolicyRule{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			var role rbacv1.ClusterRole
			if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
				return nil, err
			}
			for _, r := range role.Rules {
				r.ResourceNames = nil
				rules[role.Kind] = append(rules[role.Kind], r)
			}
		}
	}
	return rules, nil
})

// makeAccount grants the ServiceAccount of a namespace the shipped permissions.
func makeAccount(t *testing.T, client kubernetes.Interface, ns string) {
	t.Helper()
	rules, err := grants()
	if err != nil {
		t.Fatal(err)
	}
	ctx, rbac := t.Context(), client.RbacV1()
	for kind, r := range rules {
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: shippedAccount + "-" + strings.ToLower(kind)}, Rules: r}
		if _, err := rbac.ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: shippedAccount}}
	of := func(kind string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: shippedAccount + "-" + strings.ToLower(kind)}
	}
	cluster := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: shippedAccount + "-" + ns}, Subjects: subjects,
		RoleRef: of("ClusterRole")}
	own := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: shippedAccount}, Subjects: subjects, RoleRef: of("Role")}
	_, err = rbac.ClusterRoleBindings().Create(ctx, cluster, metav1.CreateOptions{})
	if err == nil {
		_, err = rbac.RoleBindings(ns).Create(ctx, own, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []authorizationv1.ResourceAttributes{{Verb: "get", Resource: "secrets"},
		{Verb: "create", Group: "coordination.k8s.io", Resource: "leases", Namespace: ns}} {
		kubetest.Eventually(t, "its permissions are in force", func(ctx context.Context) error {
			review, err := client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: accountOf(ns), ResourceAttributes: &a},
			}, metav1.CreateOptions{})
			if err == nil && !review.Status.Allowed {
				err = errors.New("they are not")
			}
			return err
		})
	}
}

// refusal is what the API server says when that account lacks something.
var refusal = regexp.MustCompile(`[^\n]*:` + shippedAccount + `\\*" cannot[^\n]*`)

func accountOf(ns string) string { return "system:serviceaccount:" + ns + ":" + shippedAccount }

// account is the configuration of the ServiceAccount as which the roles run here.
func (e *env) account() *rest.Config {
	return e.cp.UserConfig(e.t, accountOf(e.ns), "system:serviceaccounts")
}

// kubeconfig is that of a command: of the ServiceAccount for the roles.
func (e *env) kubeconfig(subcommand string) string {
	e.t.Helper()
	if !slices.Contains(roleCommands, subcommand) {
		return e.cp.Kubeconfig()
	}
	config, err := clientcmd.LoadFromFile(e.cp.Kubeconfig())
	if err != nil {
		e.t.Fatal(err)
	}
	user := config.AuthInfos[config.Contexts[config.CurrentContext].AuthInfo]
	user.Impersonate, user.ImpersonateGroups = accountOf(e.ns), []string{"system:serviceaccounts", "system:authenticated"}
	path := filepath.Join(e.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		e.t.Fatal(err)
	}
	return path
}
