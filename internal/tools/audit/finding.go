// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/storage-controller/storage-controller/internal/finalizers"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// The kinds of findings: their topics, and the values of the label kind of the metric.
const (
	VolumeWithoutPV        = "volume_without_pv"        // listed by the driver, or a LogicalVolume, without a PersistentVolume
	PVWithoutVolume        = "pv_without_volume"        // a PersistentVolume whose volume the driver does not list
	VolumeTooSmall         = "volume_too_small"         // listed by the driver with less than the size of its PersistentVolume
	AttachedNotPublished   = "attached_not_published"   // status.attached is true, but the driver has not published the volume
	PublishedNotAttached   = "published_not_attached"   // published by the driver, without a VolumeAttachment
	SnapshotWithoutContent = "snapshot_without_content" // listed by the driver, without a VolumeSnapshotContent
	ContentWithoutSnapshot = "content_without_snapshot" // a VolumeSnapshotContent whose snapshot the driver does not list
	Stuck                  = "stuck"                    // deleted longer than Config.StuckAfter ago
)

// Kinds returns all kinds in the order of reports.
func Kinds() []string {
	return []string{VolumeWithoutPV, PVWithoutVolume, VolumeTooSmall, AttachedNotPublished, PublishedNotAttached,
		SnapshotWithoutContent, ContentWithoutSnapshot, Stuck}
}

// nextSteps holds the next steps of the kinds. That of a stuck object depends on its finalizers.
var nextSteps = map[string]string{
	VolumeWithoutPV: "find out whether the data is still needed, then delete the volume in the storage system or create a " +
		"PersistentVolume for it",
	PVWithoutVolume: "find out whether the volume was deleted, or the driver does not list every volume",
	VolumeTooSmall: "find out whether an expansion did not take effect at the driver, or the volume was shrunk outside of " +
		"Kubernetes",
	AttachedNotPublished: "an attacher with --reconcile-sync publishes the volume again; otherwise delete the VolumeAttachment",
	PublishedNotAttached: "find out whether the volume is still in use on that node, perhaps of another cluster, then unpublish it " +
		"in the storage system",
	SnapshotWithoutContent: "find out whether the data is still needed, then delete the snapshot in the storage system or create a " +
		"VolumeSnapshotContent for it",
	ContentWithoutSnapshot: "find out whether the snapshot was deleted, or the driver does not list every snapshot. It cannot be " +
		"restored",
}

// Finding is one difference or one stuck object. Its topic is a kind; the object is "" if there is none. One of severity unknown is
// what was not compared.
type Finding struct {
	finding.Finding
	UID            string                 `json:"uid,omitempty"`
	VolumeHandle   string                 `json:"volumeHandle,omitempty"`
	SnapshotHandle string                 `json:"snapshotHandle,omitempty"`
	Node           string                 `json:"node,omitempty"`       // the driver's ID of the node; of a LogicalVolume its spec.nodeName
	Finalizers     []finalizers.Finalizer `json:"finalizers,omitempty"` // of a [Stuck] object
}

// of returns f as a finding of a kind about object.
func (f Finding) of(kind, object, format string, args ...any) Finding {
	f.Finding = finding.Finding{
		Severity: finding.Warning, Topic: kind, Object: object, Message: fmt.Sprintf(format, args...), Next: nextSteps[kind],
	}
	return f
}

// identity identifies a finding in several scans.
type identity struct {
	kind, object, uid, handle, snapshot, node string
}

func (f Finding) identity() identity {
	return identity{f.Topic, f.Object, f.UID, f.VolumeHandle, f.SnapshotHandle, f.Node}
}

// persistent returns the findings of now that were also found before. An operation in
// progress differs between two scans: a volume that was just created has no
// PersistentVolume yet. Stuck objects need no second scan.
func persistent(before, now []Finding) []Finding {
	seen := map[identity]bool{}
	for _, f := range before {
		seen[f.identity()] = true
	}
	return slices.DeleteFunc(slices.Clone(now), func(f Finding) bool { return f.Topic != Stuck && !seen[f.identity()] })
}

// sorted sorts findings by kind and object, so that reports do not depend on the order of maps.
func sorted(findings []Finding) []Finding {
	slices.SortFunc(findings, func(a, b Finding) int {
		return cmp.Or(
			cmp.Compare(slices.Index(Kinds(), a.Topic), slices.Index(Kinds(), b.Topic)), cmp.Compare(a.Object, b.Object),
			cmp.Compare(a.VolumeHandle, b.VolumeHandle), cmp.Compare(a.SnapshotHandle, b.SnapshotHandle), cmp.Compare(a.Node, b.Node),
		)
	})
	return findings
}
