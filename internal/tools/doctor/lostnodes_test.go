// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

func TestLostNodes(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	const lately, missing = "2026-05-01T11:55:00Z", `{"node":"n1","since":"2026-05-01T11:00:00Z"}`
	for name, c := range map[string]struct {
		checked string
		records map[string]string
		want    []string // parts of the warnings and their hints
	}{
		"no record":       {"", nil, nil},
		"a missing node":  {lately, map[string]string{"n1": missing}, nil},
		"an old check":    {"2026-05-01T11:49:00Z", map[string]string{"n1": missing}, []string{"for 11m. Their grace"}},
		"no check":        {"", map[string]string{"n1": missing}, []string{"not an RFC 3339 time"}},
		"an unused check": {"2026-05-01T01:00:00Z", nil, nil},
		"a held node":     {lately, map[string]string{"v1": `{"node":"n1","held":"breaker"}`}, []string{"d.example.com --namespace=ns n1 --yes"}},
		"a held host":     {lately, map[string]string{"v1": `{"held":"breaker"}`}, []string{"--namespace=ns v1 --yes"}},
		"an opt-out":      {lately, map[string]string{"n1": `{"held":"breaker","optedOut":true}`}, nil},
		"a broken record": {lately, map[string]string{"n1": missing, "n2": "{"},
			[]string{"cannot be parsed, and count as held and opted out, so that further lost nodes are held: n2"}},
		"all of them": {"yesterday", map[string]string{"n1": `{"held":"breaker"}`, "n2": "{"},
			[]string{"too many nodes are lost: n1", "are held: n2", "yesterday"}},
	} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x", Namespace: "ns", Annotations: map[string]string{
			nodecleanup.AnnotationLastLook: c.checked}}, Data: c.records}
		checks := lostNodes(cm, "d.example.com", now)
		if len(checks) != 1+len(c.want) || checks[0].Severity != finding.OK {
			t.Errorf("%s: %+v", name, checks)
			continue
		}
		for i, part := range c.want {
			if got := checks[i+1]; got.Severity != finding.Warning || !strings.Contains(got.Message+got.Next, part) || got.Next == "" {
				t.Errorf("%s: %+v, want %q", name, got, part)
			}
		}
	}
}

// TestLostNodesOfAPlan reads the records of the driver in the namespace of the process.
func TestLostNodesOfAPlan(t *testing.T) {
	t.Parallel()
	c := kubetest.Get(t, kubetest.Real())
	ns := kubetest.Namespace(t, c)
	check := func(roles ...Role) []finding.Finding {
		e := newExamination(Input{Config: c.Config()})
		if !e.connect(t.Context()) {
			t.Fatalf("%+v", e.Findings)
		}
		e.Findings, e.plan = nil, Plan{Roles: roles, PodNamespace: ns}
		e.driver.Name = ns + ".example.com"
		e.checkLostNodes(t.Context())
		return e.Findings
	}
	nodecontroller := Role{Name: "nodecontroller"}
	if got := check(nodecontroller); len(got) != 1 || got[0].Severity != finding.OK ||
		!strings.Contains(got[0].Message, "no ConfigMap lost-nodes."+ns) {
		t.Errorf("without a ConfigMap: %+v", got)
	}
	if _, err := c.Client().CoreV1().ConfigMaps(ns).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: nodecleanup.ConfigMapName(ns + ".example.com"), Annotations: map[string]string{
			nodecleanup.AnnotationLastLook: time.Now().UTC().Format(time.RFC3339)}},
		Data: map[string]string{"n1": `{"held":"breaker"}`},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := check(nodecontroller); len(got) != 2 || got[1].Severity != finding.Warning || !strings.Contains(got[1].Message, ": n1") {
		t.Errorf("with a held node: %+v", got)
	}
	if got := check(Role{Name: "attacher"}); len(got) != 0 {
		t.Errorf("without the nodecontroller: %+v", got)
	}
}
