// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// calls calls the driver for snapshots or for groups. Contexts have a deadline.
type calls interface {
	create(ctx context.Context, c *content, r *createRequest, secrets map[string]string) (*answer, error)
	check(ctx context.Context, c *content, secrets map[string]string) (*answer, error)
	// members returns the snapshots of a group; none if it does not exist.
	members(ctx context.Context, handle string, secrets map[string]string) ([]string, error)
	delete(ctx context.Context, s snapshot, secrets map[string]string) error
}

// snapshotCalls calls the driver for a VolumeSnapshotContent.
type snapshotCalls struct{ c *Controller }

func (s snapshotCalls) create(ctx context.Context, c *content, r *createRequest, secrets map[string]string) (*answer, error) {
	response, err := s.c.deps.CSI.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		SourceVolumeId: c.volumes[0], Name: r.Name, Parameters: r.Parameters, Secrets: secrets,
	})
	if err != nil {
		return nil, err
	}
	return snapshotAnswer(response.GetSnapshot())
}

// check reads the state of a snapshot with GetSnapshot, else with ListSnapshots.
func (s snapshotCalls) check(ctx context.Context, c *content, secrets map[string]string) (*answer, error) {
	id := c.namedHandle()
	if s.c.driver.getSnapshot {
		response, err := s.c.deps.CSI.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id, Secrets: secrets})
		switch {
		case err == nil:
			return snapshotAnswer(response.GetSnapshot())
		case status.Code(err) != codes.Unimplemented || !s.c.driver.listSnapshots:
			return nil, err
		}
	}
	response, err := s.c.deps.CSI.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: id, Secrets: secrets})
	if err != nil {
		return nil, err
	}
	snapshot := find(ctx, response.GetEntries(), id)
	if snapshot == nil {
		return nil, absent(id)
	}
	return snapshotAnswer(snapshot)
}

// absent is the error for a snapshot that the driver does not list, in the words of csi-snapshotter.
type absent string

func (id absent) Error() string { return "can not find snapshot for snapshotID " + string(id) }

// isAbsent reports whether err of a check means that the driver does not know the snapshot.
func isAbsent(err error) bool {
	_, notListed := errors.AsType[absent](err)
	return notListed || status.Code(err) == codes.NotFound
}

// find returns the snapshot with that ID. Some drivers report a single snapshot under another ID.
func find(ctx context.Context, entries []*csi.ListSnapshotsResponse_Entry, id string) *csi.Snapshot {
	for _, e := range entries {
		if e.GetSnapshot().GetSnapshotId() == id {
			return e.GetSnapshot()
		}
	}
	if len(entries) == 1 && entries[0].GetSnapshot().GetSnapshotId() != "" {
		snapshot := entries[0].GetSnapshot()
		klog.FromContext(ctx).Info("ListSnapshots returned one snapshot with another ID", "requested", id, "returned",
			snapshot.GetSnapshotId())
		snapshot.SnapshotId, snapshot.GroupSnapshotId = id, "" // a member is never deleted at the driver
		return snapshot
	}
	return nil
}

func (s snapshotCalls) members(context.Context, string, map[string]string) ([]string, error) {
	return nil, nil
}

func (s snapshotCalls) delete(ctx context.Context, o snapshot, secrets map[string]string) error {
	_, err := s.c.deps.CSI.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: o.handle, Secrets: secrets})
	return err
}

// groupCalls calls the driver for a VolumeGroupSnapshotContent.
type groupCalls struct{ c *Controller }

func (g groupCalls) create(ctx context.Context, c *content, r *createRequest, secrets map[string]string) (*answer, error) {
	response, err := g.c.deps.GroupCSI.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{
		SourceVolumeIds: c.volumes, Name: r.Name, Parameters: r.Parameters, Secrets: secrets,
	})
	if err != nil {
		return nil, err
	}
	return groupAnswer(response.GetGroupSnapshot(), true)
}

func (g groupCalls) check(ctx context.Context, c *content, secrets map[string]string) (*answer, error) {
	response, err := g.c.deps.GroupCSI.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{
		GroupSnapshotId: c.namedHandle(), SnapshotIds: c.members, Secrets: secrets,
	})
	if err != nil {
		return nil, err
	}
	return groupAnswer(response.GetGroupSnapshot(), false)
}

func (g groupCalls) members(ctx context.Context, handle string, secrets map[string]string) (ids []string, err error) {
	response, err := g.c.deps.GroupCSI.GetVolumeGroupSnapshot(ctx,
		&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: handle, Secrets: secrets})
	if err != nil && status.Code(err) != codes.NotFound {
		return nil, err
	}
	for _, s := range response.GetGroupSnapshot().GetSnapshots() {
		ids = append(ids, s.GetSnapshotId())
	}
	return ids, nil
}

func (g groupCalls) delete(ctx context.Context, o snapshot, secrets map[string]string) error {
	_, err := g.c.deps.GroupCSI.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: o.handle, SnapshotIds: o.members, Secrets: secrets,
	})
	return err
}

// shareVolumes waits until no other call uses the source volumes of o exclusively. Call release after the call.
func (c *Controller) shareVolumes(ctx context.Context, o *content) (release func(), err error) {
	var all []func()
	release = func() {
		for _, one := range all {
			one()
		}
	}
	for _, volume := range o.volumes {
		one, err := c.deps.Locks.Share(ctx, volume)
		if err != nil {
			release()
			return nil, err
		}
		all = append(all, one)
	}
	return release, nil
}

// creationError returns the error of a failed create call for c, in the words of csi-snapshotter.
func creationError(c *content, err error) error {
	if c.group {
		return fmt.Errorf("failed to take group snapshot of the volumes [%s]: %q", strings.Join(c.volumes, " "), err.Error())
	}
	return fmt.Errorf("failed to take snapshot of the volume %s: %q", strings.Join(c.volumes, " "), err.Error())
}

// deletionError returns the error of a deletion of c, in the words of csi-snapshotter.
func deletionError(c *content, err error) error {
	//lint:ignore ST1005 a sentence of csi-snapshotter
	return fmt.Errorf("Failed to delete %s: %w", c.noun, err)
}

// checkError returns the error of a failed check of c, in the words of csi-snapshotter.
func checkError(c *content, err error) error {
	if c.group {
		return fmt.Errorf("failed to list group snapshot for group snapshot content %s: %q", c.Name, err.Error())
	}
	return fmt.Errorf("failed to list snapshot for content %s: %q", c.Name, err.Error())
}

// inputsError returns the error of a create call for c that cannot be prepared, in the words of csi-snapshotter.
func inputsError(c *content, cause string) error {
	return fmt.Errorf("failed to get input parameters to create %s for %s %s: %q", c.noun, c.object, c.Name, cause)
}
