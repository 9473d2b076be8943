// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
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

// TestForbiddenWatchIsLoggedOnce: roles of old manifests grant get and list, and not watch.
func TestForbiddenWatchIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var watches, lines atomic.Int32
		server := apiserver.New(apiserver.Hooks{Before: func(_ context.Context, r apiserver.Request) error {
			if r.Verb != "watch" {
				return nil
			}
			watches.Add(1)
			return apierrors.NewForbidden(r.Resource.GroupResource(), "", nil)
		}})
		client, err := metadata.NewForConfig(server.Config("test"))
		if err != nil {
			t.Fatal(err)
		}
		log := funcr.New(func(_, line string) {
			if strings.Contains(line, "forbidden") {
				lines.Add(1)
			}
		}, funcr.Options{})
		ctx, stop := context.WithCancel(klog.NewContext(t.Context(), log))
		done := make(chan struct{})
		go func() {
			defer close(done)
			new(OptionalInformer).Run(ctx, client, schema.GroupVersionResource{
				Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots",
			}, Handlers[*metav1.PartialObjectMetadata]{})
		}()
		time.Sleep(10 * time.Minute)
		stop()
		<-done
		if watches.Load() < 5 || lines.Load() != 1 {
			t.Errorf("%d lines after %d forbidden watches", lines.Load(), watches.Load())
		}
	})
}
