// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// authorizer refuses requests that its rules do not grant, as RBAC does. It does not know namespaces and names.
type authorizer struct {
	lock    sync.Mutex
	granted map[string]bool // VERB RESOURCE[/SUBRESOURCE].GROUP
	denied  map[string]bool
}

// overlayAuthorizer has the rules of deploy/overlays/topolvm.
func overlayAuthorizer(t *testing.T) *authorizer {
	t.Helper()
	overlay, err := os.ReadFile("../../deploy/overlays/topolvm/kustomization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	directories := regexp.MustCompile(`(?m)^- \.\./\.\./rbac/([a-z-]+)`).FindAllStringSubmatch(string(overlay), -1)
	if len(directories) < 15 {
		t.Fatalf("the overlay has the permissions %q", directories)
	}
	a := &authorizer{granted: map[string]bool{}, denied: map[string]bool{}}
	for _, d := range directories {
		for _, access := range rbac.Of(d[1], "") {
			a.granted[access.Verb+" "+access.Resource+"."+access.Group] = true
		}
	}
	return a
}

// serve passes a request that is granted to the API server. Everyone may discover its resources.
func (a *authorizer) serve(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	if what := permissionOf(r); what != "" {
		a.lock.Lock()
		granted := a.granted[what]
		if !granted {
			a.denied[what] = true
		}
		a.lock.Unlock()
		if !granted {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"forbidden: %s"}`, what)
			return
		}
	}
	pass.ServeHTTP(w, r)
}

func (a *authorizer) refused() []string {
	a.lock.Lock()
	defer a.lock.Unlock()
	return slices.Sorted(maps.Keys(a.denied))
}

func (a *authorizer) revoke(permission string) {
	a.lock.Lock()
	defer a.lock.Unlock()
	delete(a.granted, permission)
}

// permissionOf returns the permission that a request needs, or "" if it is not for objects.
func permissionOf(r *http.Request) string {
	path, group := strings.Split(strings.Trim(r.URL.Path, "/"), "/"), ""
	switch {
	case path[0] == "api" && len(path) > 2:
		path = path[2:]
	case path[0] == "apis" && len(path) > 3:
		group, path = path[1], path[3:]
	default:
		return ""
	}
	if path[0] == "namespaces" && len(path) > 2 {
		path = path[2:]
	}
	resource := path[0]
	if len(path) > 2 {
		resource += "/" + path[2]
	}
	verb := map[string]string{http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch",
		http.MethodDelete: "delete"}[r.Method]
	switch watch := r.URL.Query().Get("watch"); {
	case watch == "true" || watch == "1":
		verb = "watch"
	case verb == "get" && len(path) == 1:
		verb = "list"
	}
	return verb + " " + resource + "." + group
}

// content creates the VolumeSnapshotContent of a volume, as the snapshot-controller does, and returns the client for it.
func (p *pod) content(handle string) dynamic.ResourceInterface {
	p.t.Helper()
	client, err := dynamic.NewForConfig(kubetest.Get(p.t).Config())
	if err != nil {
		p.t.Fatal(err)
	}
	create := func(kind, plural string, object map[string]any) dynamic.ResourceInterface {
		object["apiVersion"], object["kind"] = "snapshot.storage.k8s.io/v1", kind
		object["metadata"] = map[string]any{"name": p.ns + "-snapshot"}
		resource := client.Resource(schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: plural})
		if _, err := resource.Create(p.t.Context(), &unstructured.Unstructured{Object: object}, metav1.CreateOptions{}); err != nil {
			p.t.Fatal(err)
		}
		return resource
	}
	create("VolumeSnapshotClass", "volumesnapshotclasses", map[string]any{"driver": topolvm.Driver, "deletionPolicy": "Delete"})
	return create("VolumeSnapshotContent", "volumesnapshotcontents", map[string]any{"spec": map[string]any{
		"driver": topolvm.Driver, "deletionPolicy": "Delete", "volumeSnapshotClassName": p.ns + "-snapshot",
		"source":            map[string]any{"volumeHandle": handle},
		"volumeSnapshotRef": map[string]any{"kind": "VolumeSnapshot", "namespace": p.ns, "name": "snapshot", "uid": p.ns},
	}})
}

// snapshot does this, and waits for the snapshot.
func (p *pod) snapshot(pv *corev1.PersistentVolume) {
	p.t.Helper()
	contents := p.content(pv.Spec.CSI.VolumeHandle)
	kubetest.Eventually(p.t, "the snapshot is ready", func(ctx context.Context) error {
		o, err := contents.Get(ctx, p.ns+"-snapshot", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready, _, _ := unstructured.NestedBool(o.Object, "status", "readyToUse"); !ready {
			return fmt.Errorf("its status is %v", o.Object["status"])
		}
		return nil
	})
}

// clean deletes a node, and waits until it and its LogicalVolumes except for snapshots are deleted, and the deletion of its claim was
// requested.
func (p *pod) clean(node *topolvmtest.Node, claim *corev1.PersistentVolumeClaim) {
	p.t.Helper()
	names := func(keep func(topolvm.LogicalVolume) bool) (names []string) {
		lvs, err := p.lvs.List(p.t.Context(), metav1.ListOptions{})
		if err != nil {
			p.t.Fatal(err)
		}
		for _, lv := range lvs.Items {
			if lv.Spec.NodeName == node.Name() && keep(lv) {
				names = append(names, lv.Name)
			}
		}
		return names
	}
	kept := names(func(lv topolvm.LogicalVolume) bool { return lv.IsSnapshot() })
	if err := p.client.CoreV1().Nodes().Delete(p.t.Context(), node.Name(), metav1.DeleteOptions{}); err != nil {
		p.t.Fatal(err)
	}
	kubetest.Eventually(p.t, "the node is cleaned up", func(ctx context.Context) error {
		_, errNode := p.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
		claim, errClaim := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(ctx, claim.Name, metav1.GetOptions{})
		isDeleted := apierrors.IsNotFound(errClaim) || errClaim == nil && claim.DeletionTimestamp != nil
		if !apierrors.IsNotFound(errNode) || !isDeleted {
			return errors.Join(errNode, errClaim, errors.New("the node or the claim exists"))
		}
		if got := names(func(topolvm.LogicalVolume) bool { return true }); !slices.Equal(got, kept) {
			return fmt.Errorf("the node has the LogicalVolumes %q, want %q", got, kept)
		}
		return nil
	})
}
