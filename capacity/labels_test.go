// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func TestCapacityScenarioNames(t *testing.T) {
	t.Run("060_managed_by", func(t *testing.T) {
		for node, want := range map[string]string{
			"":                               "external-provisioner",
			"node01":                         "external-provisioner-node01",
			"node" + strings.Repeat("a", 38): "external-provisioner-node" + strings.Repeat("a", 38),
			"node" + strings.Repeat("a", 39): "external-p-53f40b57-node" + strings.Repeat("a", 39),
			"node" + strings.Repeat("a", 48): "e-53f40b57-node" + strings.Repeat("a", 48),
			"node" + strings.Repeat("a", 49): "external-provisioner-a3607ff1",
			"node" + strings.Repeat("a", 63): "external-provisioner-df38e37f",
		} {
			got := managedBy(node)
			if got != want {
				t.Errorf("for node %q it is %q instead of %q", node, got, want)
			}
			if problems := validation.IsValidLabelValue(got); problems != nil {
				t.Errorf("%q: %q", got, problems)
			}
		}
	})
}

func TestManagedByIsALabelWhateverTheNode(t *testing.T) {
	seen := map[string]int{}
	for n := range 254 {
		got := managedBy(strings.Repeat("n", n))
		if problems := validation.IsValidLabelValue(got); problems != nil {
			t.Errorf("with %d characters it is %q: %q", n, got, problems)
		}
		if other, twice := seen[got]; twice {
			t.Errorf("nodes of %d and %d characters have both %q", other, n, got)
		}
		seen[got] = n
	}
}

func TestLabels(t *testing.T) {
	got := labels("drv.example.com", "n1")
	if len(got) != 2 || got["csi.storage.k8s.io/drivername"] != "drv.example.com" ||
		got["csi.storage.k8s.io/managed-by"] != "external-provisioner-n1" {
		t.Errorf("got %v", got)
	}
}
