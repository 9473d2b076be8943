// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"encoding/json"
	"reflect"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const generateName = "csisc-"

// template holds the metadata of the objects of one controller.
type template struct {
	labels map[string]string
	owner  *metav1.OwnerReference // nil: none
}

// newObject returns the object to create for p.
func (t template) newObject(p pair, v values) *storagev1.CSIStorageCapacity {
	o := &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{GenerateName: generateName, Labels: t.labels},
		StorageClassName: p.Class, NodeTopology: p.Segment.selector(), Capacity: &v.capacity, MaximumVolumeSize: v.maximum,
	}
	if t.owner != nil {
		o.OwnerReferences = []metav1.OwnerReference{*t.owner}
	}
	return o
}

// updated returns a copy of obj with values and owner updated, or false if obj is up to
// date.
func (t template) updated(obj *storagev1.CSIStorageCapacity, v values) (*storagev1.CSIStorageCapacity, bool) {
	refs, newOwner := withOwner(obj.OwnerReferences, t.owner)
	if sameQuantity(obj.Capacity, &v.capacity) && sameQuantity(obj.MaximumVolumeSize, v.maximum) && !newOwner {
		return obj, false
	}
	want := obj.DeepCopy()
	want.Capacity, want.MaximumVolumeSize, want.OwnerReferences = &v.capacity, v.maximum, refs
	return want, true
}

func sameQuantity(a, b *resource.Quantity) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Cmp(*b) == 0
}

// withOwner returns refs with owner as the controlling owner, or false if it is that
// already. It replaces another controlling owner, because only one is allowed, and keeps
// the others. A nil owner changes nothing.
func withOwner(refs []metav1.OwnerReference, owner *metav1.OwnerReference) ([]metav1.OwnerReference, bool) {
	if owner == nil {
		return refs, false
	}
	var others []metav1.OwnerReference
	for _, o := range refs {
		controls := ptr.Deref(o.Controller, false)
		if controls && o.UID == owner.UID {
			return refs, false
		}
		if !controls && o.UID != owner.UID {
			others = append(others, o)
		}
	}
	return append(others, *owner), true
}

// updatePatch returns a merge patch that changes have to want, as [template.updated] returned
// it. The patch applies only to the resourceVersion of have.
func updatePatch(have, want *storagev1.CSIStorageCapacity) ([]byte, error) {
	metadata := map[string]any{"uid": have.UID, "resourceVersion": have.ResourceVersion}
	if !reflect.DeepEqual(have.OwnerReferences, want.OwnerReferences) {
		metadata["ownerReferences"] = want.OwnerReferences
	}
	return json.Marshal(map[string]any{"metadata": metadata, "capacity": want.Capacity, "maximumVolumeSize": want.MaximumVolumeSize})
}
