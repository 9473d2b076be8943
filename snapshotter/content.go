// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"cmp"
	"encoding/json"
	"errors"
	"slices"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// content holds what decisions read of a VolumeSnapshotContent or a VolumeGroupSnapshotContent.
type content struct {
	*kind
	*metav1.ObjectMeta
	raw    object // the API object, for an update; nil: from a watch
	driver string
	policy snapshotv1.DeletionPolicy
	class  string                 // empty: none is named
	ref    corev1.ObjectReference // of the VolumeSnapshot or VolumeGroupSnapshot
	// volumes are the handles of the source volumes of a dynamic content. A content without them is pre-provisioned.
	volumes []string
	// handle and members are the source of a pre-provisioned content. Only groups have members.
	handle  string
	members []string
	status  *contentStatus // nil: none
}

// contentStatus holds the status of a content.
type contentStatus struct {
	handle    string
	ready     bool
	hasReady  bool
	created   bool   // creationTime is set
	size      *int64 // restoreSize
	group     string // handle of the group of a member
	err       string // message of the error
	hasErr    bool
	snapshots []groupv1.VolumeSnapshotInfo // of a group
}

// contentOf returns the content of an object, or nil for an object of another type.
func contentOf(obj any) *content {
	switch o := obj.(type) {
	case *snapshotv1.VolumeSnapshotContent:
		return snapshotContent(o)
	case *groupv1.VolumeGroupSnapshotContent:
		return groupContent(o)
	}
	return nil
}

// snapshotContent returns the content of a VolumeSnapshotContent.
func snapshotContent(o *snapshotv1.VolumeSnapshotContent) *content {
	c := &content{
		kind: snapshotKind, ObjectMeta: &o.ObjectMeta, raw: o, driver: o.Spec.Driver, policy: o.Spec.DeletionPolicy,
		class: ptr.Deref(o.Spec.VolumeSnapshotClassName, ""), ref: o.Spec.VolumeSnapshotRef,
		handle: ptr.Deref(o.Spec.Source.SnapshotHandle, ""),
	}
	if v := ptr.Deref(o.Spec.Source.VolumeHandle, ""); v != "" {
		c.volumes = []string{v}
	}
	if s := o.Status; s != nil {
		c.status = &contentStatus{
			handle: ptr.Deref(s.SnapshotHandle, ""), ready: ptr.Deref(s.ReadyToUse, false), hasReady: s.ReadyToUse != nil,
			created: s.CreationTime != nil, size: s.RestoreSize, group: ptr.Deref(s.VolumeGroupSnapshotHandle, ""),
			hasErr: s.Error != nil, err: messageOf(s.Error),
		}
	}
	return c
}

// groupContent returns the content of a VolumeGroupSnapshotContent.
func groupContent(o *groupv1.VolumeGroupSnapshotContent) *content {
	c := &content{
		kind: groupKind, ObjectMeta: &o.ObjectMeta, raw: o, driver: o.Spec.Driver, policy: o.Spec.DeletionPolicy,
		class: ptr.Deref(o.Spec.VolumeGroupSnapshotClassName, ""), ref: o.Spec.VolumeGroupSnapshotRef, volumes: o.Spec.Source.VolumeHandles,
	}
	if h := o.Spec.Source.GroupSnapshotHandles; h != nil {
		c.handle, c.members = h.VolumeGroupSnapshotHandle, h.VolumeSnapshotHandles
	}
	if s := o.Status; s != nil {
		c.status = &contentStatus{
			handle: ptr.Deref(s.VolumeGroupSnapshotHandle, ""), ready: ptr.Deref(s.ReadyToUse, false), hasReady: s.ReadyToUse != nil,
			created: s.CreationTime != nil, snapshots: s.VolumeSnapshotInfoList, hasErr: s.Error != nil, err: messageOf(s.Error),
		}
	}
	return c
}

// MarshalJSON returns the encoding of the API object, which tests of a [kube.MetadataPatch] read.
func (c *content) MarshalJSON() ([]byte, error) {
	if c.raw == nil {
		return nil, errors.New("a content from a watch has no encoding")
	}
	return json.Marshal(c.raw)
}

func messageOf(e *snapshotv1.VolumeSnapshotError) string {
	return ptr.Deref(ptr.Deref(e, snapshotv1.VolumeSnapshotError{}).Message, "")
}

// known returns the status, empty if there is none.
func (c *content) known() contentStatus { return ptr.Deref(c.status, contentStatus{}) }

// cleared reports whether the result of a deleted snapshot was removed from the status. Every other status has readyToUse.
func (s *contentStatus) cleared() bool { return s != nil && !s.hasReady }

func (c *content) terminating() bool    { return c.DeletionTimestamp != nil }
func (c *content) protected() bool      { return slices.Contains(c.Finalizers, c.finalizer) }
func (c *content) has(name string) bool { _, ok := c.Annotations[name]; return ok }
func (c *content) dynamic() bool        { return len(c.volumes) > 0 }
func (c *content) preProvisioned() bool { return !c.dynamic() && c.handle != "" }
func (c *content) isNew() bool          { return c.dynamic() && c.known().handle == "" }
func (c *content) bound() bool          { return c.ref.UID != "" }
func (c *content) foreignFinalizer() bool {
	return slices.ContainsFunc(c.Finalizers, func(f string) bool { return f != c.finalizer })
}

// member reports whether c is a snapshot of a group, which is created and deleted with the group. Backup tools copy the annotation
// to pre-provisioned contents, whose status the snapshot-controller does not write.
func (c *content) member() bool {
	return !c.group && (c.dynamic() && c.has(AnnGroup) || c.known().group != "")
}

// groupHandle returns the handle of the group of a member.
func (c *content) groupHandle() string { return cmp.Or(c.known().group, c.Annotations[AnnGroup]) }

// leaving reports whether the deletion of c has begun.
func (c *content) leaving() bool { return c.terminating() && c.released() }

// driverHandle returns the handle of the snapshot at the driver, or "" if it is not known. The
// handle of an unbound pre-provisioned content counts once it was checked.
func (c *content) driverHandle() string {
	if c.preProvisioned() && c.bound() {
		return c.handle
	}
	return c.known().handle
}

// class holds what decisions read of a VolumeSnapshotClass or a VolumeGroupSnapshotClass.
type class struct {
	*metav1.ObjectMeta
	driver     string
	parameters map[string]string // from a watch: only those of this driver
}

// classOf returns the class of an object, or nil for an object of another type.
func classOf(obj any) *class {
	switch o := obj.(type) {
	case *snapshotv1.VolumeSnapshotClass:
		return &class{&o.ObjectMeta, o.Driver, o.Parameters}
	case *groupv1.VolumeGroupSnapshotClass:
		return &class{&o.ObjectMeta, o.Driver, o.Parameters}
	}
	return nil
}

// lastApplied is the annotation of kubectl apply, which the caches drop.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// watched returns what the caches retain of an object. It does not refer to the object, whose other fields are never read. The
// stub of a content of another driver has another type, so that it is in no result of an informer.
func (d driver) watched(obj any) (any, error) {
	if c := contentOf(obj); c != nil {
		if c.driver != d.name {
			return &metav1.PartialObjectMetadata{ObjectMeta: *stub(c)}, nil
		}
		metadata := *c.ObjectMeta
		metadata.ManagedFields = nil
		delete(metadata.Annotations, lastApplied)
		c.ObjectMeta, c.raw, c.driver = &metadata, nil, d.name // one string for all
		return c, nil
	}
	if c := classOf(obj); c != nil {
		c.ObjectMeta = stub(c)
		if c.driver != d.name {
			c.parameters = nil
		}
		return c, nil
	}
	return obj, nil
}

// stub returns the metadata that a cache needs.
func stub(o metav1.Object) *metav1.ObjectMeta {
	return &metav1.ObjectMeta{Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion()}
}

// namedHandle returns the handle of the snapshot that c names, in its source or status.
func (c *content) namedHandle() string {
	if c.preProvisioned() {
		return c.handle
	}
	return c.known().handle
}
