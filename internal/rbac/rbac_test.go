// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// TestEveryDirectoryHasRules reads each manifest of deploy/rbac.
func TestEveryDirectoryHasRules(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../deploy/rbac/*/rbac.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		directory := filepath.Base(filepath.Dir(file))
		all := Of(directory, "ns")
		if len(all) == 0 {
			t.Errorf("%s has no rules", directory)
		}
		for _, a := range all {
			if a.Verb == "*" || a.Group == "*" || strings.Contains(a.Resource, "*") || a.Name != "" {
				t.Errorf("%s: %s: a wildcard, or a name that is only an example", directory, a)
			}
		}
	}
}

func TestAccesses(t *testing.T) {
	t.Parallel()
	rules := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"b", "c"}, Verbs: []string{"get"}},
		{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments/status"}, Verbs: []string{"patch", "update"}},
	}
	var have []string
	for _, a := range append(accesses(rules[:1], "ns"), accesses(rules[1:], "")...) {
		have = append(have, a.String())
	}
	want := []string{
		"get secrets b in ns", "get secrets c in ns",
		"patch volumeattachments/status.storage.k8s.io", "update volumeattachments/status.storage.k8s.io",
	}
	if !slices.Equal(have, want) {
		t.Errorf("got %q, want %q", have, want)
	}
}

// TestManifests: names that are no plain text of YAML keep their meaning, so that they cannot add objects.
func TestManifests(t *testing.T) {
	t.Parallel()
	rule := func(name, group, resource string, verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, ResourceNames: []string{name}, Verbs: verbs}
	}
	rules := []rbacv1.PolicyRule{rule("a\"b", "", "secrets", "get"), rule("c", "apps", "replicasets", "list", "watch")}
	for _, name := range []string{"csi", "a:b:c", "null", "12", "a: b", "a, b", "a\n---\nkind: Role", "x]\n---\n[y", "", "*", "#"} {
		for _, namespace := range []string{"", "ns"} {
			account := types.NamespacedName{Namespace: "of", Name: name}
			text := Manifests(account, name, name, accesses(rules, namespace))
			first, second, _ := strings.Cut(text, "\n---\napiVersion")
			var role rbacv1.Role
			var binding rbacv1.RoleBinding
			err := errors.Join(yaml.UnmarshalStrict([]byte(first), &role), yaml.UnmarshalStrict([]byte("apiVersion"+second), &binding))
			kind := "Role"
			if namespace == "" {
				kind = "ClusterRole"
			}
			meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
			typed := func(kind string) metav1.TypeMeta {
				return metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: kind}
			}
			wantRole := rbacv1.Role{TypeMeta: typed(kind), ObjectMeta: meta, Rules: rules}
			wantBinding := rbacv1.RoleBinding{TypeMeta: typed(kind + "Binding"), ObjectMeta: meta,
				RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name},
				Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: "of"}}}
			if diff := cmp.Diff(wantRole, role) + cmp.Diff(wantBinding, binding); err != nil || diff != "" {
				t.Errorf("%q: %v\n%s\n%s", name, err, diff, text)
			}
		}
	}
	if text := Manifests(types.NamespacedName{Name: "a"}, "n", "n", nil); text != "" {
		t.Errorf("without accesses: %s", text)
	}
}
