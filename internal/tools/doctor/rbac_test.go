// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/internal/rbac"
)

// TestLostNodesHaveAName: the ConfigMap of lost nodes is checked by its name, and not without it.
func TestLostNodesHaveAName(t *testing.T) {
	t.Parallel()
	for driver, want := range map[string]string{
		"":                "create configmaps in ns",
		"Drv.example.com": "get,list,watch,update configmaps lost-nodes.drv.example.com in ns; create configmaps in ns",
	} {
		all := ofDriver(rbac.Of("nodecontroller", "ns"), driver)
		if got := rbac.Summary(all); !strings.HasSuffix(got, "events; "+want) {
			t.Errorf("driver %q: got %q, want %q", driver, got, want)
		}
	}
}
