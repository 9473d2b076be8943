// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"
)

const (
	// alone is the number of claims without a pod.
	alone = 2

	snapshotName    = "backup"
	snapshotClass   = "snapshots"
	snapshotGroup   = "snapshot.storage.k8s.io"
	volumeSnapshots = "volumesnapshots"
)

// expand raises the request of the claim and waits until its volume has grown.
func (d *demo) expand(ctx context.Context) error {
	begin := time.Now()
	claims := d.client.CoreV1().PersistentVolumeClaims(namespace)
	if _, err := claims.Patch(ctx, "alone", types.MergePatchType, []byte(`{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`),
		metav1.PatchOptions{}); err != nil {
		return err
	}
	err := d.watch(ctx, begin, func(state) error {
		claim, err := claims.Get(ctx, "alone", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if size := claim.Status.Capacity[corev1.ResourceStorage]; size.Cmp(resource.MustParse("2Gi")) < 0 {
			return fmt.Errorf("claim alone has %s, wanted 2Gi", size.String())
		}
		return nil
	})
	if err == nil {
		d.numbers = append(d.numbers, fmt.Sprintf("%4.0f ms to expand a volume, 50 ms of them the driver's",
			time.Since(begin).Seconds()*1000))
	}
	return err
}

// snapshotsOf returns a client of a kind of snapshots; classes have no namespace.
func (d *demo) snapshotsOf(kind string) dynamic.ResourceInterface {
	client := dynamic.NewForConfigOrDie(d.cp.Config()) // the configuration of a control plane that runs
	resources := client.Resource(schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: kind})
	if kind == volumeSnapshots {
		return resources.Namespace(namespace)
	}
	return resources
}

// snapshot creates a snapshot of the claim and restores it.
func (d *demo) snapshot(ctx context.Context) error {
	begin := time.Now()
	object := func(kind, name string, fields map[string]any) *unstructured.Unstructured {
		o := map[string]any{"apiVersion": snapshotGroup + "/v1", "kind": kind, "metadata": map[string]any{"name": name}}
		for k, v := range fields {
			o[k] = v
		}
		return &unstructured.Unstructured{Object: o}
	}
	class := object("VolumeSnapshotClass", snapshotClass, map[string]any{"driver": driverName, "deletionPolicy": "Delete"})
	if _, err := d.snapshotsOf("volumesnapshotclasses").Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return err
	}
	snapshot := object("VolumeSnapshot", snapshotName, map[string]any{"spec": map[string]any{
		"volumeSnapshotClassName": snapshotClass, "source": map[string]any{"persistentVolumeClaimName": "alone"}}})
	if _, err := d.snapshotsOf(volumeSnapshots).Create(ctx, snapshot, metav1.CreateOptions{}); err != nil {
		return err
	}
	restored := claim("restored", immediate)
	restored.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("2Gi")
	restored.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To(snapshotGroup), Kind: "VolumeSnapshot",
		Name: snapshotName}
	if _, err := d.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, &restored, metav1.CreateOptions{}); err != nil {
		return err
	}
	err := d.watch(ctx, begin, func(s state) error { return s.want(alone, 0, 0) })
	if err == nil {
		d.numbers = append(d.numbers, fmt.Sprintf("%4.0f ms to create a snapshot and restore it", time.Since(begin).Seconds()*1000))
	}
	return err
}
