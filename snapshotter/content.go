// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"cmp"
	"slices"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// content holds what decisions read of a VolumeSnapshotContent or a VolumeGroupSnapshotContent.
type content struct {
	*kind
	meta   *metav1.ObjectMeta
	driver string
	policy snapshotv1.DeletionPolicy
	class  string                 // empty: none is named
	ref    corev1.ObjectReference // of the VolumeSnapshot or VolumeGroupSnapshot
	// volumes are the handles of the source volumes of a dynamic content. A content without them is
	// pre-provisioned.
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

// snapshotContent returns the content of a VolumeSnapshotContent.
func snapshotContent(o *snapshotv1.VolumeSnapshotContent) *content {
	c := &content{
		kind: snapshotKind, meta: &o.ObjectMeta, driver: o.Spec.Driver, policy: o.Spec.DeletionPolicy,
		class: ptr.Deref(o.Spec.VolumeSnapshotClassName, ""), ref: o.Spec.VolumeSnapshotRef,
		handle: ptr.Deref(o.Spec.Source.SnapshotHandle, ""),
	}
	if v := ptr.Deref(o.Spec.Source.VolumeHandle, ""); v != "" {
		c.volumes = []string{v}
	}
	if s := o.Status; s != nil {
		c.status = &contentStatus{
			handle: ptr.Deref(s.SnapshotHandle, ""), ready: ptr.Deref(s.ReadyToUse, false), hasReady: s.ReadyToUse != nil,
			created: s.CreationTime != nil,
			size:    s.RestoreSize, group: ptr.Deref(s.VolumeGroupSnapshotHandle, ""),
		}
		c.status.setError(s.Error)
	}
	return c
}

// groupContent returns the content of a VolumeGroupSnapshotContent.
func groupContent(o *groupv1.VolumeGroupSnapshotContent) *content {
	c := &content{
		kind: groupKind, meta: &o.ObjectMeta, driver: o.Spec.Driver, policy: o.Spec.DeletionPolicy,
		class: ptr.Deref(o.Spec.VolumeGroupSnapshotClassName, ""), ref: o.Spec.VolumeGroupSnapshotRef, volumes: o.Spec.Source.VolumeHandles,
	}
	if h := o.Spec.Source.GroupSnapshotHandles; h != nil {
		c.handle, c.members = h.VolumeGroupSnapshotHandle, h.VolumeSnapshotHandles
	}
	if s := o.Status; s != nil {
		c.status = &contentStatus{
			handle: ptr.Deref(s.VolumeGroupSnapshotHandle, ""), ready: ptr.Deref(s.ReadyToUse, false), hasReady: s.ReadyToUse != nil,
			created:   s.CreationTime != nil,
			snapshots: s.VolumeSnapshotInfoList,
		}
		c.status.setError(s.Error)
	}
	return c
}

func (s *contentStatus) setError(e *snapshotv1.VolumeSnapshotError) {
	if e != nil {
		s.hasErr, s.err = true, ptr.Deref(e.Message, "")
	}
}

// known returns the status, empty if there is none.
func (c *content) known() contentStatus { return ptr.Deref(c.status, contentStatus{}) }

// cleared reports whether the result of a deleted snapshot was removed from the status. Every other status has readyToUse.
func (s *contentStatus) cleared() bool { return s != nil && !s.hasReady }

func (c *content) terminating() bool    { return c.meta.DeletionTimestamp != nil }
func (c *content) protected() bool      { return slices.Contains(c.meta.Finalizers, c.finalizer) }
func (c *content) has(name string) bool { _, ok := c.meta.Annotations[name]; return ok }
func (c *content) dynamic() bool        { return len(c.volumes) > 0 }
func (c *content) preProvisioned() bool { return !c.dynamic() && c.handle != "" }
func (c *content) bound() bool          { return c.ref.UID != "" }
func (c *content) uid() types.UID       { return c.meta.UID }
func (c *content) foreignFinalizer() bool {
	return slices.ContainsFunc(c.meta.Finalizers, func(f string) bool { return f != c.finalizer })
}

// member reports whether c is a snapshot of a group, which is created and deleted with the group. Backup tools copy the annotation
// to pre-provisioned contents, whose status the snapshot-controller does not write.
func (c *content) member() bool {
	return !c.group && (c.dynamic() && c.has(AnnGroup) || c.known().group != "")
}

// groupHandle returns the handle of the group of a member.
func (c *content) groupHandle() string { return cmp.Or(c.known().group, c.meta.Annotations[AnnGroup]) }

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

// snapshotHandles returns the handles of the snapshots of a group, also if they are not in the status yet. Nil:
// only the driver knows them.
func (c *content) snapshotHandles(m memory) []string {
	known, answered := handlesOf(c.known().snapshots), []string(nil)
	if m.answer != nil {
		answered = handlesOf(m.answer.snapshots)
	}
	switch {
	case !c.dynamic() && known == nil:
		return c.members
	case c.dynamic() && len(answered) >= len(c.volumes):
		return answered
	case c.dynamic() && (len(known) < len(c.volumes) || m.createdAgain(c)):
		return nil
	}
	return known
}

func handlesOf(snapshots []groupv1.VolumeSnapshotInfo) []string {
	var handles []string
	for _, s := range snapshots {
		if s.SnapshotHandle != "" {
			handles = append(handles, s.SnapshotHandle)
		}
	}
	return handles
}

// class holds what decisions read of a VolumeSnapshotClass or a VolumeGroupSnapshotClass.
type class struct {
	name, driver string
	parameters   map[string]string
}

func snapshotClass(o *snapshotv1.VolumeSnapshotClass) *class {
	return &class{o.Name, o.Driver, o.Parameters}
}

func groupClass(o *groupv1.VolumeGroupSnapshotClass) *class {
	return &class{o.Name, o.Driver, o.Parameters}
}
