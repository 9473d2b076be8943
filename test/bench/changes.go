// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

var contents = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}

// validatePhases returns an error for a phase that does not exist.
func (o options) validatePhases() error {
	for _, p := range o.phases {
		if !slices.Contains([]string{"provision", "attach", "expand", "modify", "snapshot", "delete-snapshot", "detach", "delete"}, p) {
			return fmt.Errorf("unknown phase %q", p)
		}
	}
	return nil
}

func (b *bench) has(phase string) bool { return slices.Contains(b.o.phases, phase) }

// prepareChanges creates the objects that the phases expand, modify and snapshot need.
func (b *bench) prepareChanges(ctx context.Context) error {
	if b.has("modify") {
		class := &storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "gold"}, DriverName: b.driver,
			Parameters: map[string]string{"iops": "1000"}}
		if _, err := b.client.StorageV1().VolumeAttributesClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	if err := b.cp.InstallCRDs(ctx); err != nil { // csi-snapshotter exits without them
		return err
	}
	if !b.has("snapshot") {
		return nil
	}
	_, err := b.dynamic().Resource(schema.GroupVersionResource{Group: contents.Group, Version: "v1", Resource: "volumesnapshotclasses"}).
		Create(ctx, &unstructured.Unstructured{Object: map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1",
			"kind": "VolumeSnapshotClass", "metadata": map[string]any{"name": "bench"}, "driver": b.driver, "deletionPolicy": "Delete",
		}}, metav1.CreateOptions{})
	return err
}

func (b *bench) dynamic() dynamic.Interface {
	cfg := b.cp.Config()
	cfg.UserAgent = userAgent
	return dynamic.NewForConfigOrDie(cfg) // the configuration of a control plane that runs
}

// changes returns the actions on volumes that exist. The bench writes the VolumeSnapshotContents as the
// snapshot-controller would.
func (b *bench) changes(done *times, name func(int) string) []action {
	claims := b.client.CoreV1().PersistentVolumeClaims(namespace)
	patch := func(spec string) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			_, err := claims.Patch(ctx, name(i), types.MergePatchType, []byte(`{"spec":`+spec+`}`), metav1.PatchOptions{})
			return err
		}
	}
	snapshots := b.dynamic().Resource(contents)
	return []action{
		{"expand", patch(`{"resources":{"requests":{"storage":"2Gi"}}}`)},
		{"modify", patch(`{"volumeAttributesClassName":"gold"}`)},
		{"snapshot", func(ctx context.Context, i int) error {
			pv, err := b.client.CoreV1().PersistentVolumes().Get(ctx, done.volume(name(i)), metav1.GetOptions{})
			if err != nil {
				return err
			}
			_, err = snapshots.Create(ctx, content(b.driver, name(i), pv), metav1.CreateOptions{})
			return err
		}},
		{"delete-snapshot", func(ctx context.Context, i int) error {
			_, err := snapshots.Patch(ctx, name(i), types.MergePatchType,
				[]byte(`{"metadata":{"annotations":{"snapshot.storage.kubernetes.io/volumesnapshot-being-deleted":"yes"}}}`),
				metav1.PatchOptions{})
			if err != nil {
				return err
			}
			return snapshots.Delete(ctx, name(i), metav1.DeleteOptions{})
		}},
	}
}

// content returns the VolumeSnapshotContent of a volume, as the snapshot-controller creates it.
func content(driver, name string, pv *corev1.PersistentVolume) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent", "metadata": map[string]any{"name": name,
			"finalizers": []any{"snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"}},
		"spec": map[string]any{
			"driver": driver, "deletionPolicy": "Delete", "volumeSnapshotClassName": "bench",
			"source":            map[string]any{"volumeHandle": pv.Spec.CSI.VolumeHandle},
			"volumeSnapshotRef": map[string]any{"namespace": namespace, "name": name, "uid": string(pv.UID)},
		},
	}}
}

// noteChanges notes when a claim has its new size or its VolumeAttributesClass.
func noteChanges(done *times, pvc *corev1.PersistentVolumeClaim) {
	if size := pvc.Status.Capacity[corev1.ResourceStorage]; size.Cmp(resource.MustParse("2Gi")) >= 0 {
		done.note("expand " + pvc.Name)
	}
	if ptr.Deref(pvc.Status.CurrentVolumeAttributesClassName, "") == "gold" {
		done.note("modify " + pvc.Name)
	}
}

// watchSnapshots notes when snapshots are ready, and deleted.
func (b *bench) watchSnapshots(ctx context.Context, done *times) {
	if !b.has("snapshot") {
		return
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(b.dynamic(), 10*time.Hour)
	ready := func(obj any) {
		u := obj.(*unstructured.Unstructured)
		if is, _, _ := unstructured.NestedBool(u.Object, "status", "readyToUse"); is {
			done.note("snapshot " + u.GetName())
		}
	}
	_, err := factory.ForResource(contents).Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: ready, UpdateFunc: func(_, obj any) { ready(obj) },
		DeleteFunc: func(obj any) {
			if missed, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = missed.Obj
			}
			done.note("delete-snapshot " + obj.(*unstructured.Unstructured).GetName())
		},
	})
	if err != nil {
		panic(err) // a new informer cannot refuse
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
}
