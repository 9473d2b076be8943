// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

//lint:file-ignore ST1005 the texts of csi-snapshotter are capitalized

// decideDelete handles a content whose snapshot is deleted at the driver.
func (d driver) decideDelete(s state) step {
	c := s.content
	if s.call.Payload.deleted {
		return s.decideDeleted()
	}
	secret, problem := d.deletionSecret(s)
	switch {
	case problem != nil:
		return *problem
	case secret != nil && !s.reads.secret:
		return step{action: doReadSecret, reason: "SecretNeeded", secret: secret, report: doReportDeletion}
	case s.read.IsZero(): // a policy that was changed recently may not be in the cache
		return step{action: doReadContent, reason: "Unconfirmed", report: doReportDeletion}
	}
	if s.other != nil && !s.other.leaving() {
		return s.decideShared()
	}
	if next, repeats := d.decideCheckReplay(s); repeats {
		return next
	}
	next := step{action: doDelete, reason: "Deleting", deleted: c.snapshots(s.call)[0]}
	switch {
	case c.group && len(next.deleted.members) == 0 && !s.listed:
		next.action, next.reason = doReadMembers, "UnknownMembers"
	case len(next.deleted.members) == 0:
		next.deleted.members = s.snapshots
	}
	return next
}

// snapshot is a snapshot of the driver, or a group.
type snapshot struct {
	handle  string
	members []string // handles of the snapshots of a group; nil: only the driver knows all of them
}

// snapshots returns the snapshots that are deleted with c, one after the other: that of the last response and that of the status. They
// differ if a repeated CreateSnapshot has returned another one, because an earlier leader had deleted that of the status.
func (c *content) snapshots(e entry) (all []snapshot) {
	add := func(handle string, infos []groupv1.VolumeSnapshotInfo) {
		members := handlesOf(infos)
		switch {
		case c.dynamic() && len(members) < len(c.volumes):
			members = nil
		case !c.dynamic() && members == nil:
			members = c.members
		}
		all = append(all, snapshot{handle, members})
	}
	handle, infos, last := c.driverHandle(), c.known().snapshots, e.Payload.answer
	switch {
	case last != nil && last.handle == handle && len(last.snapshots) > len(infos):
		infos = last.snapshots
	case last != nil && last.handle != handle && (handle == "" || e.State == intent.Answered):
		add(last.handle, last.snapshots)
	}
	if handle != "" {
		add(handle, infos)
	}
	return all
}

// deletedHandle returns the handle of the snapshot that is deleted next with c, or "" if there is none.
func (c *content) deletedHandle(e entry) string {
	if all := c.snapshots(e); len(all) > 0 {
		return all[0].handle
	}
	return ""
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

// decideShared handles a content that is being deleted while another one names its snapshot.
func (s state) decideShared() step {
	c, handle := s.content, s.content.deletedHandle(s.call)
	if c.namedHandle() == "" || s.orphan { // only a response of the driver did, or a content that users cannot change
		next := s.decideRelease()
		next.warning = fmt.Sprintf("%s returned the %s %q of %s %q, which is kept. Check both at the storage system",
			c.create, c.noun, handle, s.other.kind.name, s.other.Name)
		return next
	}
	return step{action: doReportDeletion, reason: "Shared", err: deletionError(c, fmt.Errorf("%s %q names the same %s %q. "+
		"Delete that object, or set spec.deletionPolicy of this one to Retain",
		s.other.kind.name, s.other.Name, c.noun, handle))}
}

// decideDeleted handles a content whose snapshot the driver has deleted.
func (s state) decideDeleted() step {
	c := s.content
	change := clearedStatus(c)
	switch {
	case s.orphan || !c.foreignFinalizer() || len(change) == 0:
		return step{action: doRemoveFinalizer, reason: "SnapshotDeleted", change: kube.MetadataPatch{Tests: recordTest(c)}}
	case c.has(c.creating) && c.known().handle != "": // after the status is cleared, the next process would repeat CreateSnapshot
		return step{action: doEndCreation, reason: "SnapshotDeleted"}
	}
	return step{action: doClearStatus, reason: "SnapshotDeleted", status: change}
}

// decideRelease handles a content that is being deleted and has no snapshot to delete.
func (s state) decideRelease() step {
	c, m, last := s.content, s.call.Payload, s.call.Payload.answer
	if m.deleted {
		return s.decideDeleted()
	}
	next := step{action: doRemoveFinalizer, reason: "NothingToDelete"}
	next.change.Tests = recordTest(c)
	next.change.Tests["/spec/deletionPolicy"] = c.policy // the cache may be outdated
	if !c.has(c.creating) {                              // another leader may call CreateSnapshot meanwhile
		next.change.Tests[kube.AnnotationPath(c.creating)] = nil
	}
	retained := c.policy == snapshotv1.VolumeSnapshotContentRetain
	switch {
	case last != nil && retained:
		next.warning = fmt.Sprintf("The %s %q of the driver is retained and has no %s. Delete it at the storage system if it is not needed",
			c.noun, last.handle, c.kind.name)
	case m.remains != "":
		next.warning = m.remains
	case m.absent:
		next.warning = fmt.Sprintf("The driver does not find the %s %q, and deletes nothing. Check the handle at the storage system",
			c.noun, c.handle)
	case c.member() && c.known().handle != "" && !(c.dynamic() && c.has(AnnGroup)) && !retained && !s.groupFound: // restored
		next.warning = fmt.Sprintf("The driver deletes the snapshot %q only with its group snapshot %q, which has no "+
			"VolumeGroupSnapshotContent. Delete the group snapshot at the storage system if it exists and is not needed",
			c.known().handle, c.groupHandle())
	}
	return next
}

// credentials returns the error for a secret that a deletion needs.
func credentials(c *content, err error) error {
	return fmt.Errorf("Failed to get %s credentials: %w", c.noun, err)
}
