// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
)

// contentsCreated makes a VolumeSnapshotContent and a VolumeGroupSnapshotContent of a volume, as the
// snapshot-controller does, and waits until the snapshotter has created their snapshots and deleted them.
func (e *env) contentsCreated(volume string) {
	e.t.Helper()
	client, err := dynamic.NewForConfig(e.cp.Config())
	e.must(err)
	pv, err := e.client.CoreV1().PersistentVolumes().Get(e.t.Context(), volume, metav1.GetOptions{})
	e.must(err)
	handle := pv.Spec.CSI.VolumeHandle
	e.contentCreated(client, "snapshot.storage.k8s.io", "VolumeSnapshot", map[string]any{"volumeHandle": handle})
	e.contentCreated(client, "groupsnapshot.storage.k8s.io", "VolumeGroupSnapshot", map[string]any{"volumeHandles": []any{handle}})
}

// contentCreated does this for the content of one kind, and deletes another one, whose class does not exist.
func (e *env) contentCreated(client dynamic.Interface, group, kind string, source map[string]any) {
	e.t.Helper()
	ctx, name, lower := e.t.Context(), e.ns+"-proof", strings.ToLower(kind)
	create := func(kind, plural string, metadata, object map[string]any) dynamic.ResourceInterface {
		object["apiVersion"], object["kind"], object["metadata"] = group+"/v1", kind, metadata
		resource := client.Resource(schema.GroupVersionResource{Group: group, Version: "v1", Resource: plural})
		_, err := resource.Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
		e.must(err)
		return resource
	}
	field, prefix := "v"+kind[1:], strings.Replace(group, "k8s.io", "kubernetes.io", 1)+"/"+lower
	content := func(name, class string, finalizers ...any) dynamic.ResourceInterface {
		metadata := map[string]any{"name": name, "finalizers": finalizers}
		return create(kind+"Content", lower+"contents", metadata, map[string]any{"spec": map[string]any{
			"driver": e.plugin.Name(), "deletionPolicy": "Delete", "source": source, field + "ClassName": class,
			field + "Ref": map[string]any{"kind": kind, "namespace": e.ns, "name": "proof", "uid": name},
		}})
	}
	create(kind+"Class", lower+"classes", map[string]any{"name": name}, map[string]any{
		"driver": e.plugin.Name(), "deletionPolicy": "Delete"})
	contents := content(name, name)
	content(name+"-unclassed", "missing", prefix+"content-bound-protection")
	e.eventually(kind+"Content is ready", func(ctx context.Context) error {
		o, err := contents.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready, _, _ := unstructured.NestedBool(o.Object, "status", "readyToUse"); !ready {
			return fmt.Errorf("its status is %v", o.Object["status"])
		}
		return nil
	})
	for _, name := range []string{name, name + "-unclassed"} {
		deleted := fmt.Sprintf(`{"metadata":{"annotations":{"%s-being-deleted":"yes"}}}`, prefix)
		_, err := contents.Patch(ctx, name, types.MergePatchType, []byte(deleted), metav1.PatchOptions{})
		e.must(err)
		e.must(contents.Delete(ctx, name, metav1.DeleteOptions{}))
		e.eventually(kind+"Content is deleted", func(ctx context.Context) error {
			if _, err := contents.Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("it exists: %w", err)
			}
			return nil
		})
	}
}
