// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// TestRawReturnsTheMessage: the error of a request without a type has the message of the API server.
func TestRawReturnsTheMessage(t *testing.T) {
	refused := apierrors.NewForbidden(schema.GroupResource{Resource: "referencegrants"}, "", nil).Status()
	refused.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/apis/refused" {
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(refused)
			return
		}
		_, _ = w.Write([]byte(`{"items":[]}`))
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	get := func(path string) ([]byte, error) {
		return Raw(client.Discovery().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").Do(t.Context()))
	}
	if _, err := get("/apis/refused"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "referencegrants is forbidden") {
		t.Errorf("refused: %v", err)
	}
	if body, err := get("/apis/x"); err != nil || string(body) != `{"items":[]}` {
		t.Errorf("%s, %v", body, err)
	}
}
