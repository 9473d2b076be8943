// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// TestRulesAreThoseThatAreShipped compares the table with deploy/rbac, or writes it when
// UPDATE is set (make generate).
func TestRulesAreThoseThatAreShipped(t *testing.T) {
	t.Parallel()
	const table = "rules.go"
	want := generateRules(t)
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(table, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(table)
	if err != nil || !bytes.Equal(have, want) {
		t.Errorf("%s differs from deploy/rbac, run make generate (%v)", table, err)
	}
	file, err := parser.ParseFile(token.NewFileSet(), table, have, parser.ParseComments)
	if err != nil || !ast.IsGenerated(file) {
		t.Errorf("%s is not marked as generated code (%v)", table, err)
	}
}

func generateRules(t *testing.T) []byte {
	t.Helper()
	files, err := filepath.Glob("../../../deploy/rbac/*/rbac.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	shipped := map[string][]Rule{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if of := rulesOf(t, string(text)); of != nil {
			shipped[filepath.Base(filepath.Dir(file))] = of
		}
	}
	var b strings.Builder
	b.WriteString("// Copyright The storage-controller Authors\n// SPDX-License-Identifier: Apache-2.0\n\n" +
		"// Code generated from deploy/rbac by make generate. DO NOT EDIT.\n\npackage doctor\n\n" +
		"// rules are the rules of deploy/rbac by the names of its directories.\nvar rules = map[string][]Rule{\n")
	for _, name := range slices.Sorted(maps.Keys(shipped)) {
		fmt.Fprintf(&b, "%q: {\n", name)
		for _, r := range shipped[name] {
			b.WriteString("{")
			if r.Namespaced {
				b.WriteString("Namespaced: true, ")
			}
			fmt.Fprintf(&b, "Groups: %#v, Resources: %#v, ", r.Groups, r.Resources)
			if r.Names != nil {
				fmt.Fprintf(&b, "Names: %#v, ", r.Names)
			}
			fmt.Fprintf(&b, "Verbs: %#v},\n", r.Verbs)
		}
		b.WriteString("},\n")
	}
	b.WriteString("}\n")
	out, err := format.Source([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func rulesOf(t *testing.T, manifest string) []Rule {
	t.Helper()
	var of []Rule
	for doc := range strings.SplitSeq(manifest, "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		if role.Kind != "Role" && role.Kind != "ClusterRole" {
			continue
		}
		for _, r := range role.Rules {
			of = append(of, Rule{Namespaced: role.Kind == "Role", Groups: r.APIGroups, Resources: r.Resources, Names: r.ResourceNames,
				Verbs: r.Verbs})
		}
	}
	return of
}

func TestAccesses(t *testing.T) {
	t.Parallel()
	g := Grant{File: "x", Namespace: "ns", Names: map[string]string{"a": "b"}, Rules: []Rule{
		{Namespaced: true, Groups: []string{""}, Resources: []string{"secrets"}, Names: []string{"a", "c"}, Verbs: []string{"get"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments/status"}, Verbs: []string{"patch", "update"}},
	}}
	var have []string
	for _, a := range g.accesses() {
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

// TestLostNodesHaveAName: the ConfigMap of lost nodes is checked by its name, and not without it.
func TestLostNodesHaveAName(t *testing.T) {
	t.Parallel()
	for driver, want := range map[string]string{
		"":                "create configmaps in ns",
		"Drv.example.com": "get,list,watch,update configmaps lost-nodes.drv.example.com in ns; create configmaps in ns",
	} {
		g := Grant{File: "nodecontroller", Namespace: "ns"}.ofDriver(driver)
		if got := summary(g.accesses()); !strings.HasSuffix(got, "events; "+want) {
			t.Errorf("driver %q: got %q, want %q", driver, got, want)
		}
	}
}
