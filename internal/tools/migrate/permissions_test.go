// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate_test

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// boundRole returns a role with a rule and a binding to the ServiceAccount default/default.
func boundRole(prefix, namespace, roleNamespace, rule string) string {
	in := func(namespace string) string {
		if namespace == "" {
			return ""
		}
		return ", namespace: " + namespace
	}
	role := "---\nkind: " + prefix + "Role\nmetadata: {name: r" + in(roleNamespace) + "}\nrules: [" + rule + "]\n"
	if prefix == "-" { // a ClusterRole in one namespace
		role, prefix = strings.Replace(role, "-Role", "ClusterRole", 1), ""
		return role + "---\nkind: RoleBinding\nmetadata: {name: b" + in(namespace) + "}\nroleRef: {kind: ClusterRole, name: r}\n" +
			"subjects: [{kind: ServiceAccount, name: default, namespace: default}]\n"
	}
	return role + "---\nkind: " + prefix + "RoleBinding\nmetadata: {name: b" + in(namespace) + "}\nroleRef: {kind: " + prefix +
		"Role, name: r}\nsubjects: [{kind: ServiceAccount, name: default, namespace: default}]\n"
}

// TestPermissions compares what the input grants with what the new container needs.
func TestPermissions(t *testing.T) {
	t.Parallel()
	const claims, leases = `{apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get, patch]}`,
		`{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get]}`
	cluster := func(rules string) string { return boundRole("Cluster", "", "", rules) }
	aggregated := func(labels string) string {
		rule := "aggregationRule: {clusterRoleSelectors: [{matchLabels: " + labels + "}]}\n"
		return strings.Replace(cluster(""), "rules: []", rule+"rules: []", 1)
	}
	labelled := func(rules string) string {
		return "---\nkind: ClusterRole\nmetadata: {name: other, labels: {a: b}}\nrules: [" + rules + "]\n"
	}
	for name, tt := range map[string]struct {
		input, flag, note, yaml string
		level                   migrate.Level
	}{
		"not in the input":               {"", "", "are not in the input", "verbs: [get, patch]", migrate.Required},
		"not in the input, of a feature": {"", "", "are not in the input", "volumesnapshots", migrate.Required},
		"a role is not": {strings.Replace(cluster(claims), "{name: r}\nrules", "{name: x}\nrules", 1), "",
			"not all in the input: ClusterRole r. Append", "patch", migrate.Required},
		"aggregated": {aggregated(`{a: b}`) + labelled(claims), "", "", "", migrate.Required},
		"aggregated by an expression": {strings.Replace(aggregated(`{a: b}`), "matchLabels: {a: b}",
			"matchExpressions: [{key: a, operator: Exists}]", 1) + labelled(claims), "", "", "", migrate.Required},
		"aggregated of another label": {aggregated(`{a: c}`) + labelled(claims), "",
			"not all in the input: ClusterRole r, with the rules of others (aggregationRule). Append", "patch", migrate.Required},
		"aggregated, from a cluster": {strings.Replace(aggregated(`{a: c}`), "rules: []", "rules: ["+claims+"]", 1), "", "", "",
			migrate.Required},
		"everything": {cluster(claims), "", "", "", migrate.Required},
		"wildcards": {cluster(`{apiGroups: ["*"], resources: ["*"], verbs: ["*"]}`), "--leader-election", "", "",
			migrate.Required},
		"a verb is missing": {cluster(`{apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get]}`), "",
			"lacks permissions: patch persistentvolumeclaims. ", "verbs: [patch]", migrate.Required},
		"update in its place": {cluster(`{apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get, update]}`), "", "",
			"", migrate.Required},
		"another group": {cluster(`{apiGroups: [apps], resources: [persistentvolumeclaims], verbs: [get, patch]}`), "",
			"get,patch persistentvolumeclaims", "patch", migrate.Required},
		"only one object": {cluster(`{apiGroups: [""], resources: [persistentvolumeclaims], resourceNames: [a], verbs: [get, patch]}`), "",
			"get,patch", "patch", migrate.Required},
		"only in one namespace": {boundRole("", "default", "default", claims), "",
			"get,patch persistentvolumeclaims", "kind: ClusterRole\n", migrate.Required},
		"the Lease, too": {cluster(claims), "--leader-election",
			"get leases.coordination.k8s.io",
			"kind: Role\nmetadata:\n  name: default-storage-controller\n  namespace: default\n", migrate.Required},
		"a Role for the Lease": {cluster(claims + ", " + leases), "--leader-election", "", "", migrate.Required},
		"the Lease of elsewhere": {boundRole("", "other", "other", leases), "--leader-election", "get leases", "leases",
			migrate.Required},
		"a ClusterRole bound in the namespace": {boundRole("-", "default", "", claims+", "+leases), "--leader-election",
			"lacks permissions: get,patch persistentvolumeclaims. ", "patch", migrate.Required},
		"of a feature gate": {cluster(claims), "--feature-gates=Topology=true", "lacks permissions: watch nodes", "nodes",
			migrate.Required},
		"of a feature": {cluster(claims), "",
			"only if the driver creates snapshots (CREATE_DELETE_SNAPSHOT): watch volumesnapshots", "", migrate.Information},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, deployment(sidecar("csi-provisioner", strings.Fields(tt.flag)...))+tt.input, false)
			var notes []string
			for _, n := range r.Notes {
				if n.Level == tt.level && n.Container == "" {
					notes = append(notes, n.Text)
				}
			}
			have := strings.Join(notes, "\n")
			if tt.note == "" && have != "" || !strings.Contains(have, tt.note) {
				t.Errorf("notes %q, want %q", have, tt.note)
			}
			if yaml := string(r.Permissions); (tt.yaml == "") != (yaml == "") || !strings.Contains(yaml, tt.yaml) {
				t.Errorf("want %q:\n%s", tt.yaml, yaml)
			}
		})
	}
}

// TestPermissionsOfSeveralWorkloads: one role has what all workloads of a ServiceAccount lack. The second of two roles
// with one name would replace the first.
func TestPermissionsOfSeveralWorkloads(t *testing.T) {
	t.Parallel()
	second := strings.Replace(deployment(sidecar("csi-snapshotter")), "name: d", "name: e", 1)
	have := string(migrated(t, deployment(sidecar("csi-provisioner"))+"---\n"+second, false).Permissions)
	for _, one := range []string{"kind: ClusterRole\n", "volumesnapshots", "persistentvolumeclaims\"]"} {
		if strings.Count(have, one) != 1 {
			t.Errorf("%q is %d times in, want once:\n%s", one, strings.Count(have, one), have)
		}
	}
}

// TestServerAcceptsPermissions submits the missing permissions to a real API server.
func TestServerAcceptsPermissions(t *testing.T) {
	t.Parallel()
	client := kubetest.Get(t, kubetest.Real()).Client().RbacV1()
	r := migrated(t, deployment(sidecar("csi-provisioner", "--leader-election")), false)
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}
	docs := documents(string(r.Permissions))
	for _, doc := range docs {
		var head metav1.TypeMeta
		var role rbacv1.Role
		var binding rbacv1.RoleBinding
		var err error
		decode := func(object any) {
			if err := k8syaml.UnmarshalStrict([]byte(doc), object); err != nil {
				t.Fatalf("%v\n%s", err, doc)
			}
		}
		if err := k8syaml.Unmarshal([]byte(doc), &head); err != nil {
			t.Fatal(err)
		}
		switch head.Kind {
		case "ClusterRole":
			decode(&role)
			_, err = client.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: role.ObjectMeta, Rules: role.Rules}, dry)
		case "Role":
			decode(&role)
			_, err = client.Roles(role.Namespace).Create(t.Context(), &role, dry)
		case "ClusterRoleBinding":
			decode(&binding)
			_, err = client.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
				ObjectMeta: binding.ObjectMeta, RoleRef: binding.RoleRef, Subjects: binding.Subjects,
			}, dry)
		case "RoleBinding":
			decode(&binding)
			_, err = client.RoleBindings(binding.Namespace).Create(t.Context(), &binding, dry)
		}
		if err != nil {
			t.Errorf("%v\n%s", err, doc)
		}
	}
	if len(docs) != 4 {
		t.Errorf("%d objects, want 4:\n%s", len(docs), r.Permissions)
	}
}
