// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// TestServerThatIsNoAPIServer connects to other web servers, such as a proxy or a wrong path in the
// kubeconfig.
func TestServerThatIsNoAPIServer(t *testing.T) {
	t.Parallel()
	status := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_, _ = w.Write([]byte(body))
		}
	}
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		want    bool
	}{
		"nothing is found":      {http.NotFound, false},
		"a page for everything": {func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("<html>")) }, false},
		"JSON for everything":   {status(http.StatusOK, "{}"), false},
		"an API server that refuses": {
			status(http.StatusForbidden, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`), true,
		},
		"an API server before v1.28": {func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/version" {
				status(http.StatusOK, `{"gitVersion":"v1.27.1"}`)(w, r)
				return
			}
			http.NotFound(w, r)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(test.handler)
			defer server.Close()
			e := &examination{in: Input{Config: &rest.Config{Host: server.URL}}, Report: &Report{}}
			if got := e.connect(t.Context()); got != test.want || (finding.Count(e.Findings,
				finding.Failing) == 0) != test.want || e.Reached != test.want {
				t.Errorf("%t, %+v", got, e.Report)
			}
		})
	}
}
