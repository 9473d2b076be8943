// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// getCapacity calls the driver for p.
func (t *term) getCapacity(ctx context.Context, p pair, class *storagev1.StorageClass) (values, error) {
	call, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	response, err := t.c.deps.CSI.GetCapacity(call, request(class, p.Segment))
	if err != nil {
		return values{}, fmt.Errorf("calling GetCapacity for StorageClass %q in segment %q: %w", p.Class, p.Segment, err)
	}
	v, err := parseResponse(response)
	if err != nil {
		return values{}, fmt.Errorf("GetCapacity response for StorageClass %q in segment %q: %w", p.Class, p.Segment, err)
	}
	return v, nil
}

// publish creates or updates the object of p and returns its UID, or none if p needs no object. It gathers and decides again, because the
// call may have taken long: another client may have created an object, the class or
// the last node was deleted, or the process was suspended and another replica leads.
func (t *term) publish(ctx context.Context, p pair, v values) (types.UID, error) {
	if err := election.MayCall(ctx); err != nil {
		return "", err
	}
	t.dropMissing(p)
	s := t.gather(p)
	obj := decide(s).keep
	switch {
	case obj != nil:
		return obj.UID, t.updateObject(ctx, obj, v)
	case s.class == nil || !s.hasNodes:
		return "", nil // the event has enqueued p
	case v.capacity.IsZero():
		return "", nil // schedulers treat a missing object as zero capacity
	}
	return t.createObject(ctx, p, v)
}

func (t *term) createObject(ctx context.Context, p pair, v values) (types.UID, error) {
	obj, err := t.c.client.Create(ctx, t.c.template.newObject(p, v), metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("creating CSIStorageCapacity for StorageClass %q in segment %q: %w", p.Class, p.Segment, err)
	}
	t.published.Observe(obj)
	t.state.objectAdded(obj)
	klog.FromContext(ctx).Info("CSIStorageCapacity created", "csiStorageCapacity", klog.KObj(obj), "capacity", obj.Capacity)
	return obj.UID, nil
}

// updateObject patches obj unless it is up to date.
func (t *term) updateObject(ctx context.Context, obj *storagev1.CSIStorageCapacity, v values) error {
	want, differs := t.c.template.updated(obj, v)
	if !differs {
		return nil
	}
	data, err := updatePatch(obj, want)
	if err != nil {
		return err
	}
	updated, err := t.c.client.Patch(ctx, obj.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if apierrors.IsForbidden(err) {
		// The cached object is trimmed, so that the update starts from a live read.
		updated, err = t.published.UpdateInstead(ctx, t.c.client, obj,
			func(live *storagev1.CSIStorageCapacity) *storagev1.CSIStorageCapacity {
				want, _ := t.c.template.updated(live, v)
				return want
			}, err)
	}
	if err != nil {
		if kube.IsNotFound(err) {
			t.published.MarkDeleted(obj) // the next attempt creates one
		}
		return fmt.Errorf("updating CSIStorageCapacity %q: %w", obj.Name, err)
	}
	t.published.Observe(updated)
	klog.FromContext(ctx).V(1).Info("CSIStorageCapacity updated", "csiStorageCapacity", klog.KObj(obj), "capacity", want.Capacity)
	return nil
}

// deleteObject deletes obj. The preconditions make a changed object fail: its next sync
// decides again.
func (t *term) deleteObject(ctx context.Context, obj *storagev1.CSIStorageCapacity) error {
	if err := election.MayCall(ctx); err != nil {
		return err
	}
	known := metav1.Preconditions{UID: &obj.UID, ResourceVersion: &obj.ResourceVersion}
	err := t.c.client.Delete(ctx, obj.Name, metav1.DeleteOptions{Preconditions: &known})
	if err != nil && !kube.IsNotFound(err) {
		return fmt.Errorf("deleting CSIStorageCapacity %q: %w", obj.Name, err)
	}
	t.published.MarkDeleted(obj)
	t.state.forgetObject(pairOf(obj), obj.Name, obj.UID)
	klog.FromContext(ctx).Info("CSIStorageCapacity deleted", "csiStorageCapacity", klog.KObj(obj))
	return nil
}
