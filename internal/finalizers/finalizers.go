// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package finalizers knows which component removes a finalizer, and when. explain and audit
// report it for objects that are stuck in deletion.
//
// It removes none. The removals of this program are in
//
//   - attacher/unpublish.go (VolumeAttachments) and attacher/volume_finalizer.go (PersistentVolumes),
//   - provisioner: decideVolume (PersistentVolumes), unprotection (the record of an indeterminate
//     CreateVolume) and sourceProtector (clone sources and snapshots),
//   - nodecontroller: nodes, their claims, and claims that pods use.
//
// An object that is not found has no finalizer left: see [kube.IsNotFound].
package finalizers

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Removal names the component that removes a finalizer, and the condition. When is empty for a
// finalizer that is not known here.
type Removal struct {
	By   string `json:"removedBy"` // a component, or unknown
	When string `json:"when"`
}

// Finalizer is a finalizer of an object, and its removal.
type Finalizer struct {
	Name string `json:"name"`
	Removal
}

// Of returns the finalizers called names of an object of a kind. drivers are those that the object may belong to.
func Of(kind string, names []string, drivers ...string) []Finalizer {
	all := []Finalizer{}
	for _, name := range names {
		all = append(all, Finalizer{name, RemovalOf(kind, name, drivers...)})
	}
	return all
}

// Text returns the removal of each finalizer.
func Text(all []Finalizer) string {
	var parts []string
	for _, f := range all {
		part := f.Name + ": removed by " + f.By
		if f.When != "" {
			part += ", " + f.When
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

const (
	provisioner        = "the provisioner of the driver"
	snapshotController = "the snapshot controller"
	garbageCollector   = "the garbage collector of kube-controller-manager"
	ourOrTopoLVM       = "the nodecontroller of storage-controller, or topolvm-controller"

	lvmRemover = "topolvm-node on the node of the LogicalVolume, or the node cleanup"

	sourceUnused  = "after all claims with this data source are provisioned"
	nodeCleanedUp = "after the claims of the node are cleaned up, or the grace period passed"
	lvmRemoved    = "after the LVM volume was removed, or if the node does not return"
	podsDeleted   = "with --pvc-finalizer-mode=enforce after the pods that use the claim are deleted, with strip immediately"
)

// removals holds the finalizers whose names do not depend on the driver.
var removals = map[string]Removal{
	"kubernetes.io/pvc-protection": {
		"kube-controller-manager", "when the claim is being deleted and no pod on a node uses it",
	},
	"kubernetes.io/pv-protection": {
		"kube-controller-manager", "when the volume is being deleted and is not bound to a claim",
	},
	storagehelpers.PVDeletionProtectionFinalizer: {provisioner, "after DeleteVolume succeeded"},
	kube.ProvisioningFinalizer: {
		"the provisioner of storage-controller", "after CreateVolume returned a final response, and the PersistentVolume, if any, is " +
			"created",
	},
	kube.CloningProtection:  {provisioner, sourceUnused},
	kube.SnapshotProtection: {provisioner, sourceUnused},
	"snapshot.storage.kubernetes.io/pvc-as-source-protection": {
		snapshotController, "after all snapshots of the claim are created",
	},
	"snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection": {snapshotController, sourceUnused},
	"snapshot.storage.kubernetes.io/volumesnapshot-bound-protection": {
		snapshotController, "after the VolumeSnapshotContent is deleted",
	},
	"snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection": {
		"the snapshotter of the driver", "after DeleteSnapshot succeeded, or if the deletionPolicy is Retain",
	},
	"groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection": {
		"the snapshotter of the driver", "after DeleteVolumeGroupSnapshot succeeded, or if the deletionPolicy is Retain",
	},
	"storage.kubernetes.io/backup-protection": {"the backup software that added it", "after the backup"},
	"topolvm.io/node":                         {ourOrTopoLVM, nodeCleanedUp},
	"topolvm.cybozu.com/node":                 {ourOrTopoLVM, nodeCleanedUp},
	"topolvm.io/pvc":                          {ourOrTopoLVM, podsDeleted},
	"topolvm.cybozu.com/pvc":                  {ourOrTopoLVM, podsDeleted},
	"topolvm.io/logicalvolume":                {lvmRemover, lvmRemoved},
	"topolvm.cybozu.com/logicalvolume":        {lvmRemover, lvmRemoved},
	metav1.FinalizerDeleteDependents:          {garbageCollector, "after the dependents of the object are deleted"},
	metav1.FinalizerOrphanDependents:          {garbageCollector, "after the dependents of the object are orphaned"},
}

// RemovalOf returns who removes a finalizer of an object of a kind, and when. drivers are those that
// the object may belong to.
func RemovalOf(kind, finalizer string, drivers ...string) Removal {
	if r, ok := removals[finalizer]; ok {
		return r
	}
	for _, d := range drivers {
		switch finalizer {
		case kube.AttacherFinalizerPrefix + election.Sanitize(d):
			return byAttacher(kind, "the attacher of driver "+d)
		case strings.ToLower(d) + "/node":
			return Removal{"the nodecontroller for driver " + d, nodeCleanedUp}
		case strings.ToLower(d) + "/pvc":
			return Removal{"the nodecontroller for driver " + d, podsDeleted}
		}
	}
	if driver, ok := strings.CutPrefix(finalizer, kube.AttacherFinalizerPrefix); ok {
		return byAttacher(kind, "the attacher of the driver with the sanitized name "+driver)
	}
	owner, _, qualified := strings.Cut(finalizer, "/")
	if !qualified {
		return Removal{By: "unknown (not a finalizer of Kubernetes or this driver)"}
	}
	return Removal{By: "unknown (owner of " + owner + "; not a finalizer of Kubernetes or this driver)"}
}

func byAttacher(kind, by string) Removal {
	if kind == "VolumeAttachment" {
		return Removal{by, "after ControllerUnpublishVolume succeeded"}
	}
	return Removal{by, "when no VolumeAttachment references the volume"}
}
