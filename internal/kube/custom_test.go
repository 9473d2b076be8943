// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

const thingsDefinition = `{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
	"metadata": {"name": "things.example.com"}, "spec": {"group": "example.com", "scope": "Cluster",
	"names": {"kind": "Thing", "plural": "things"}, "versions": [{"name": "v1", "served": true, "storage": true}]}}`

// TestCustom installs a CustomResourceDefinition after the informers were started.
func TestCustom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := apiserver.New(apiserver.Hooks{})
		client, meta, err := NewClients(server.Config("test"))
		if err != nil {
			t.Fatal(err)
		}
		things := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "things"}
		source := Source[*metav1.PartialObjectMetadataList]{
			Resource: things, Object: &metav1.PartialObjectMetadata{}, List: meta.Resource(things).List, Watch: meta.Resource(things).Watch,
		}
		informers := NewInformers(client, meta, "drv.example.com")
		first := Custom[*metav1.PartialObjectMetadata](informers.For("a"), source)
		second := Custom[*metav1.PartialObjectMetadata](informers.For("b"), source)
		if first.informer != second.informer {
			t.Error("two informers for one resource")
		}
		for range 2 { // the second time, the index exists
			if err := first.AddIndex("owner", func(o *metav1.PartialObjectMetadata) string { return o.Labels["owner"] }); err != nil {
				t.Fatal(err)
			}
		}
		var lines atomic.Int32
		log := funcr.New(func(_, args string) {
			if strings.Contains(args, "CustomResourceDefinition") && strings.Contains(args, "things.example.com") {
				lines.Add(1)
			}
		}, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
		informers.Start(ctx)
		informers.StartLate() // starts nothing twice
		time.Sleep(5 * time.Minute)
		if err := informers.Synced("b"); err == nil || !strings.Contains(err.Error(), "things.example.com") || !IsListRefused(err) {
			t.Errorf("without the definition: %v", err)
		}
		create := func(resource schema.GroupVersionResource, object string) {
			obj := &unstructured.Unstructured{}
			err := obj.UnmarshalJSON([]byte(object))
			if err == nil {
				err = server.Create(resource, obj)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
		create(definitions, thingsDefinition)
		time.Sleep(time.Minute)
		create(things, `{"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x", "labels": {"owner": "me"}}}`)
		synctest.Wait()
		if err := informers.Synced(); err != nil {
			t.Errorf("with the definition: %v", err)
		}
		if _, ok := second.Get("x"); !ok || len(first.ByIndex("owner", "me")) != 1 || len(first.ByIndex("owner", "")) != 0 {
			t.Error("the object is not in the cache, or not in the index")
		}
		if lines.Load() != 1 {
			t.Errorf("%d log lines about the missing definition", lines.Load())
		}
		cancel()
		informers.Shutdown()
	})
}
