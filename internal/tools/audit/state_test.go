// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
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
		_, err = (APIReader{Clients: apiread.Clients{Kubernetes: client}, Driver: "d"}).Read(t.Context())
		if err == nil || !strings.Contains(err.Error(), "listing PersistentVolumes") ||
			strings.Contains(err.Error(), "Grant list") != hint {
			t.Errorf("%s: %v", host, err)
		}
	}
}

// TestRead: kinds without permission are named. The finalizer of a VolumeSnapshot does not name its driver.
func TestRead(t *testing.T) {
	t.Parallel()
	const list = `{"kind":"List","apiVersion":"v1","metadata":{},"items":[%s]}`
	const snapshot = `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":%q,"namespace":"n","finalizers":[%q]}}`
	answers := map[string]string{
		"/api/v1/persistentvolumes": "", "/api/v1/nodes": "", "/apis/storage.k8s.io/v1/csinodes": "",
		"/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents": `{"apiVersion":"snapshot.storage.k8s.io/v1",` +
			`"kind":"VolumeSnapshotContent","metadata":{"name":"c"},"spec":{"driver":"other","volumeSnapshotRef":{"namespace":"n","name":"a"}}}`,
		"/apis/snapshot.storage.k8s.io/v1/volumesnapshots": fmt.Sprintf(snapshot, "a", kube.SnapshotProtection) + "," +
			fmt.Sprintf(snapshot, "b", kube.SnapshotProtection),
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		items, ok := answers[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
			return
		}
		fmt.Fprintf(w, list, items)
	}))
	defer server.Close()
	cfg := &rest.Config{Host: server.URL}
	clients, err := apiread.NewClients(cfg)
	if err != nil {
		t.Fatal(err)
	}
	state, err := (APIReader{Clients: clients, Driver: driver}).Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"VolumeAttachments", "PersistentVolumeClaims"}; !slices.Equal(state.Unread, want) {
		t.Errorf("not read: %q", state.Unread)
	}
	if _, ok := state.Others["VolumeSnapshot n/b"]; !ok || len(state.Others) != 1 {
		t.Errorf("others: %v", state.Others)
	}
}

func TestReadContents(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		driver, source, status string
		want                   []Content
	}{
		"created by the driver":               {driver, "", "s", []Content{{Name: "c", Handle: "s"}}},
		"pre-provisioned":                     {driver, "s", "s", []Content{{Name: "c", Handle: "s"}}},
		"pre-provisioned, without a status":   {driver, "s", "", []Content{{Name: "c", Handle: "s"}}},
		"being created":                       {driver, "", "", nil},
		"pre-provisioned, for another driver": {"other.example.com", "s", "", nil},
	} {
		content := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent", "metadata": map[string]any{"name": "c"},
			"spec":   map[string]any{"driver": test.driver, "source": map[string]any{"snapshotHandle": test.source}},
			"status": map[string]any{"snapshotHandle": test.status},
		}}
		client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
			map[schema.GroupVersionResource]string{apiread.SnapshotContents: "VolumeSnapshotContentList"}, content)
		r := newReading(APIReader{Clients: apiread.Clients{Dynamic: client}, Driver: driver})
		if err := r.contents(t.Context()); err != nil {
			t.Fatal(err)
		}
		state := r.state
		if !slices.Equal(state.Contents, test.want) {
			t.Errorf("%s: %+v, want %+v", name, state.Contents, test.want)
		}
		if _, ok := state.Others["VolumeSnapshotContent c"]; ok != (test.driver == driver) {
			t.Errorf("%s: others %v", name, state.Others)
		}
	}
}
