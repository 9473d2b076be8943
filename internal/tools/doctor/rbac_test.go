// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/rbac"
)

// TestLostNodesHaveAName: the ConfigMap of lost nodes is checked by its name, and not without it.
func TestLostNodesHaveAName(t *testing.T) {
	t.Parallel()
	for driver, want := range map[string]string{
		"":                "create configmaps in ns",
		"Drv.example.com": "get,list,watch,update configmaps lost-nodes.drv.example.com in ns; create configmaps in ns",
	} {
		plan := Plan{Grants: []rbac.Grant{{Accesses: OfDriver(rbac.Of("nodecontroller", "ns"), driver)}}}
		if got := rbac.Summary(plan.accesses()); !strings.HasSuffix(got, "events; "+want) {
			t.Errorf("driver %q: got %q, want %q", driver, got, want)
		}
	}
}

// TestWriteRBACWithLines: the name of a secret in a StorageClass adds no objects to the manifests.
func TestWriteRBACWithLines(t *testing.T) {
	t.Parallel()
	for _, separator := range []string{"\n", "\r", "\u0085", "\u2028"} {
		secret := "a" + separator + "kind: Other" + separator + "#"
		missing := rbac.Access{Verb: "get", Resource: "secrets", Namespace: "ns", Name: secret}
		grant := rbac.Grant{File: "provisioner-secrets:" + secret, Without: secret, Accesses: []rbac.Access{missing}}
		r := Report{User: serviceAccounts + "ns:csi", Missing: []Missing{{grant, rbac.Summary(grant.Accesses)}}}
		var b strings.Builder
		if err := r.WriteRBAC(&b); err != nil {
			t.Fatal(err)
		}
		var kinds []string
		for doc := range strings.SplitSeq(strings.TrimSuffix(b.String(), "---\n"), "---\n") {
			object := map[string]any{}
			if err := yaml.UnmarshalStrict([]byte(doc), &object); err != nil { // such as a second kind
				t.Errorf("%q: %v\n%s", separator, err, doc)
			}
			kinds = append(kinds, fmt.Sprint(object["kind"]))
		}
		if !slices.Equal(kinds, []string{"Role", "RoleBinding"}) {
			t.Errorf("%q: objects %q:\n%s", separator, kinds, b.String())
		}
	}
}
