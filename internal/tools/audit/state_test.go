// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// TestHintAtAPermission expects the hint for a missing permission, and not for a server that
// does not answer.
func TestHintAtAPermission(t *testing.T) {
	t.Parallel()
	forbids := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	}))
	defer forbids.Close()
	for host, hint := range map[string]bool{forbids.URL: true, "http://127.0.0.1:1": false} {
		client, err := kubernetes.NewForConfig(&rest.Config{Host: host})
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewAPIReader(client, nil, nil, "d").Read(t.Context())
		if err == nil || !strings.Contains(err.Error(), "listing PersistentVolumes") ||
			strings.Contains(err.Error(), "Grant list") != hint {
			t.Errorf("%s: %v", host, err)
		}
	}
}
