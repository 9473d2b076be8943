// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"slices"
)

// Kind classifies findings. It is also the value of the label kind of the metric.
type Kind string

// The kinds of findings.
const (
	VolumeWithoutPV        Kind = "volume_without_pv"        // listed by the driver, or a LogicalVolume, without a PersistentVolume
	PVWithoutVolume        Kind = "pv_without_volume"        // a PersistentVolume whose volume the driver does not list
	VolumeTooSmall         Kind = "volume_too_small"         // listed by the driver with less than the size of its PersistentVolume
	AttachedNotPublished   Kind = "attached_not_published"   // status.attached is true, but the driver has not published the volume
	PublishedNotAttached   Kind = "published_not_attached"   // published by the driver, without a VolumeAttachment
	SnapshotWithoutContent Kind = "snapshot_without_content" // listed by the driver, without a VolumeSnapshotContent
	ContentWithoutSnapshot Kind = "content_without_snapshot" // a VolumeSnapshotContent whose snapshot the driver does not list
	Stuck                  Kind = "stuck"                    // deleted longer than Config.StuckAfter ago
)

// Kinds returns all kinds in the order of reports.
func Kinds() []Kind {
	return []Kind{VolumeWithoutPV, PVWithoutVolume, VolumeTooSmall, AttachedNotPublished, PublishedNotAttached,
		SnapshotWithoutContent, ContentWithoutSnapshot, Stuck}
}

// Finding is one difference or one stuck object.
type Finding struct {
	Kind           Kind        `json:"kind"`
	Object         string      `json:"object,omitempty"` // kind and name; "" if there is no object
	UID            string      `json:"uid,omitempty"`
	VolumeHandle   string      `json:"volumeHandle,omitempty"`
	SnapshotHandle string      `json:"snapshotHandle,omitempty"`
	Node           string      `json:"node,omitempty"` // the driver's ID of the node; of a LogicalVolume its spec.nodeName
	Message        string      `json:"message"`
	Finalizers     []Finalizer `json:"finalizers,omitempty"` // of a [Stuck] object
}

// Finalizer is a finalizer of a stuck object and the component that removes it.
type Finalizer struct {
	Name    string `json:"name"`
	Remover string `json:"remover"`
}

// identity identifies a finding in several scans.
type identity struct {
	kind                                Kind
	object, uid, handle, snapshot, node string
}

func (f Finding) identity() identity {
	return identity{f.Kind, f.Object, f.UID, f.VolumeHandle, f.SnapshotHandle, f.Node}
}

// persistent returns the findings of now that were also found before. An operation in
// progress differs between two scans: a volume that was just created has no
// PersistentVolume yet. Stuck objects need no second scan.
func persistent(before, now []Finding) []Finding {
	seen := map[identity]bool{}
	for _, f := range before {
		seen[f.identity()] = true
	}
	return slices.DeleteFunc(slices.Clone(now), func(f Finding) bool { return f.Kind != Stuck && !seen[f.identity()] })
}

// sorted sorts findings by kind and object, so that reports do not depend on the order of maps.
func sorted(findings []Finding) []Finding {
	slices.SortFunc(findings, func(a, b Finding) int {
		return cmp.Or(
			cmp.Compare(slices.Index(Kinds(), a.Kind), slices.Index(Kinds(), b.Kind)), cmp.Compare(a.Object, b.Object),
			cmp.Compare(a.VolumeHandle, b.VolumeHandle), cmp.Compare(a.SnapshotHandle, b.SnapshotHandle), cmp.Compare(a.Node, b.Node),
		)
	})
	return findings
}
