// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
)

// answer is a valid response of the driver about a snapshot or a group.
type answer struct {
	handle    string
	ready     bool
	created   time.Time // zero: not reported
	size      int64     // zero: not reported
	group     string    // handle of the group
	snapshots []groupv1.VolumeSnapshotInfo
	// problem is an error to report after the status was written.
	problem error
}

// invalidAnswer is the error for a response that violates the CSI spec. Without a gRPC status, it is
// indeterminate: the driver may have created the snapshot.
type invalidAnswer string

func (e invalidAnswer) Error() string { return "invalid response of the driver: " + string(e) }

// snapshotAnswer returns the answer for one snapshot.
func snapshotAnswer(s *csi.Snapshot) (*answer, error) {
	switch {
	case s == nil:
		return nil, invalidAnswer("no snapshot")
	case s.GetSnapshotId() == "":
		return nil, invalidAnswer("empty snapshot_id")
	case s.GetSizeBytes() < 0:
		return nil, invalidAnswer(fmt.Sprintf("negative size_bytes %d of snapshot %q", s.GetSizeBytes(), s.GetSnapshotId()))
	}
	err := errors.Join(csiclient.CheckID("snapshot_id", s.GetSnapshotId()), csiclient.CheckID("group_snapshot_id", s.GetGroupSnapshotId()),
		csiclient.CheckID("source_volume_id", s.GetSourceVolumeId()))
	if err != nil {
		return nil, invalidAnswer(err.Error())
	}
	return &answer{
		handle: s.GetSnapshotId(), ready: s.GetReadyToUse(), created: timeOf(s.GetCreationTime()), size: s.GetSizeBytes(),
		group: s.GetGroupSnapshotId(),
	}, nil
}

// groupAnswer returns the answer for a group. complete demands its snapshots.
func groupAnswer(g *csi.VolumeGroupSnapshot, complete bool) (*answer, error) {
	switch {
	case g == nil:
		return nil, invalidAnswer("no group snapshot")
	case g.GetGroupSnapshotId() == "":
		return nil, invalidAnswer("empty group_snapshot_id")
	}
	if err := csiclient.CheckID("group_snapshot_id", g.GetGroupSnapshotId()); err != nil {
		return nil, invalidAnswer(err.Error())
	}
	a := &answer{handle: g.GetGroupSnapshotId(), ready: g.GetReadyToUse(), created: timeOf(g.GetCreationTime())}
	if !complete {
		return a, nil
	}
	for _, s := range g.GetSnapshots() {
		one, err := snapshotAnswer(s)
		if err != nil {
			return nil, err
		}
		a.snapshots = append(a.snapshots, one.info(s.GetSourceVolumeId()))
	}
	if a.snapshots == nil {
		a.ready, a.problem = false, errors.New("the driver returned a group without snapshots")
	}
	return a, nil
}

// info returns the entry of a group's list for one snapshot.
func (a answer) info(volume string) groupv1.VolumeSnapshotInfo {
	info := groupv1.VolumeSnapshotInfo{VolumeHandle: volume, SnapshotHandle: a.handle, ReadyToUse: ptr.To(a.ready)}
	if !a.created.IsZero() {
		info.CreationTime = ptr.To(a.created.UnixNano())
	}
	if a.size > 0 {
		info.RestoreSize = ptr.To(a.size)
	}
	return info
}

// timeOf returns the time of t, or zero if the driver did not set it, or set one that a status cannot have: nanoseconds as
// seconds, for example.
func timeOf(t *timestamppb.Timestamp) time.Time {
	at := t.AsTime()
	if t.GetSeconds() == 0 && t.GetNanos() == 0 || !time.Unix(0, at.UnixNano()).Equal(at) {
		return time.Time{}
	}
	return at
}

// change returns the changes of the status of c after a. Handle, creation time and size are written
// once. readyToUse follows the driver until it is true. An answer with another handle is an error.
func (c *content) change(a answer, now time.Time) (statusChange, error) {
	s, change := c.known(), statusChange{}
	known := s.handle
	if c.preProvisioned() {
		known = c.handle
	}
	if known != "" && known != a.handle {
		return nil, fmt.Errorf("the driver returned %s handle %q, but the content has %q. Check both at the storage system",
			c.noun, a.handle, known)
	}
	if s.handle == "" {
		change[c.handleField] = a.handle
	}
	if c.status == nil || !s.ready && a.ready || s.handle == "" {
		change["readyToUse"] = a.ready
	}
	if !s.created {
		if a.created.IsZero() {
			a.created = now
		}
		change["creationTime"] = encodeTime(c.group, a.created)
	}
	if s.hasErr && a.problem == nil {
		change["error"] = nil
	}
	if c.group {
		if infos := c.infos(a.snapshots, now); c.dynamic() && !slices.EqualFunc(infos, s.snapshots, sameInfo) {
			change["volumeSnapshotInfoList"] = infos
		}
		return change, nil
	}
	if a.size > 0 && s.size == nil {
		change["restoreSize"] = a.size
	}
	// The snapshot-controller would search a group for a dynamic content with this field.
	if a.group != "" && s.group == "" && (c.preProvisioned() || c.member()) {
		change["volumeGroupSnapshotHandle"] = a.group
	}
	return change, nil
}

// encodeTime returns t as the status has it: nanoseconds, or a timestamp for groups.
func encodeTime(group bool, t time.Time) any {
	if group {
		return metav1.NewTime(t)
	}
	return t.UnixNano()
}

// infos returns the list of a group after an answer. Entries, creation times and sizes are kept,
// because the snapshots of a group are deleted by this list.
func (c *content) infos(answered []groupv1.VolumeSnapshotInfo, now time.Time) []groupv1.VolumeSnapshotInfo {
	infos := slices.Clone(c.known().snapshots)
	for _, one := range answered {
		i := indexOf(infos, one.SnapshotHandle)
		if i < 0 {
			i, infos = len(infos), append(infos, one)
		}
		info := &infos[i]
		info.VolumeHandle = one.VolumeHandle
		info.CreationTime = cmp.Or(info.CreationTime, one.CreationTime, ptr.To(now.UnixNano()))
		info.RestoreSize = cmp.Or(info.RestoreSize, one.RestoreSize)
		if !ptr.Deref(info.ReadyToUse, false) {
			info.ReadyToUse = one.ReadyToUse
		}
	}
	return infos
}

// indexOf returns the index of the snapshot with that handle, or -1.
func indexOf(infos []groupv1.VolumeSnapshotInfo, handle string) int {
	return slices.IndexFunc(infos, func(i groupv1.VolumeSnapshotInfo) bool { return i.SnapshotHandle == handle })
}

func sameInfo(a, b groupv1.VolumeSnapshotInfo) bool {
	return a.VolumeHandle == b.VolumeHandle && a.SnapshotHandle == b.SnapshotHandle && ptr.Equal(a.CreationTime, b.CreationTime) &&
		ptr.Equal(a.ReadyToUse, b.ReadyToUse) && ptr.Equal(a.RestoreSize, b.RestoreSize)
}
