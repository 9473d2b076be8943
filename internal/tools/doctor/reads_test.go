// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net/http"
	"sync"
	"testing"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// TestReadsOnce: no object and no list is read twice, although roles share Leases.
func TestReadsOnce(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	requests := map[string]int{}
	cfg := kubetest.Proxy(t, kubetest.Get(t).Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodGet {
			mu.Lock()
			requests[r.URL.Path+"?"+r.URL.Query().Get("fieldSelector")]++
			mu.Unlock()
		}
		pass.ServeHTTP(w, r)
	})
	plan := Plan{PodNamespace: "default", Topology: true, Roles: []Role{
		{Name: "provisioner", Lease: "a", LeaseNamespace: "default", Others: []string{"b"}},
		{Name: "nodecontroller", Lease: "b", LeaseNamespace: "default", Others: []string{"a"}},
		{Name: "snapshotter", Lease: "c", LeaseNamespace: "default"},
	}}
	report := Run(t.Context(), Input{Config: cfg, DriverName: "d.example.com", Plan: func(csiclient.Driver, bool) Plan { return plan }})
	if !report.Reached || finding.Count(report.Findings, finding.Failing) > 0 || len(requests) < 8 {
		t.Errorf("%+v, requests %v", report, requests)
	}
	for request, n := range requests {
		if n > 1 {
			t.Errorf("%d times: GET %s", n, request)
		}
	}
}
