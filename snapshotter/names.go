// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"slices"
	"strings"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/election"
)

const (
	// Finalizer keeps a VolumeSnapshotContent until its snapshot is deleted or released.
	Finalizer = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"
	// AnnBeingCreated is set before the first CreateSnapshot of a VolumeSnapshotContent, until the status has its result, and while
	// its deletion waits for the outcome. Removing it ends the wait.
	AnnBeingCreated = "snapshot.storage.kubernetes.io/volumesnapshot-being-created"
	// AnnBeingDeleted is set by the snapshot-controller, which thereby releases the deletion.
	AnnBeingDeleted = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted"
	// AnnSecretName is the name of the Secret for CreateSnapshot and DeleteSnapshot, which the snapshot-controller sets.
	AnnSecretName = "snapshot.storage.kubernetes.io/deletion-secret-name"
	// AnnSecretNamespace is the namespace of this Secret.
	AnnSecretNamespace = "snapshot.storage.kubernetes.io/deletion-secret-namespace"
	// AnnGroup is the handle of the group of a VolumeSnapshotContent, which is deleted with its group.
	AnnGroup = "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"
	// AnnRequest records the create request of a VolumeSnapshotContent or VolumeGroupSnapshotContent, which every repetition
	// uses: name, parameters, and UID of the object.
	AnnRequest = "storage-controller.io/create-snapshot"
	// LabelManagedBy is the node of a VolumeSnapshotContent in distributed snapshotting.
	LabelManagedBy = "snapshot.storage.kubernetes.io/managed-by"

	// GroupFinalizer keeps a VolumeGroupSnapshotContent until its snapshots are deleted or released.
	GroupFinalizer = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshotcontent-bound-protection"
	// AnnGroupBeingCreated is the same as volumesnapshot-being-created, on a VolumeGroupSnapshotContent.
	AnnGroupBeingCreated = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-created"
	// AnnGroupBeingDeleted is the same as volumesnapshot-being-deleted, on a VolumeGroupSnapshotContent.
	AnnGroupBeingDeleted = "groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted"
	// AnnGroupSecretName is the name of the Secret for CreateVolumeGroupSnapshot and DeleteVolumeGroupSnapshot.
	AnnGroupSecretName = "groupsnapshot.storage.kubernetes.io/deletion-secret-name"
	// AnnGroupSecretNamespace is the namespace of this Secret.
	AnnGroupSecretNamespace = "groupsnapshot.storage.kubernetes.io/deletion-secret-namespace"
)

// Reasons of events about failures. They are those of csi-snapshotter.
const (
	// Warning, VolumeSnapshotContent: the snapshot was not created; the message is also in the status
	reasonCreationFailed = "SnapshotCreationFailed"
	// Warning, VolumeSnapshotContent: the readiness of the snapshot is unknown; the message is also in the status
	reasonCheckFailed = "SnapshotContentCheckandUpdateFailed"
	// Warning, VolumeSnapshotContent: an attempt to delete the snapshot failed, and why
	reasonDeleteError = "SnapshotDeleteError"
	// Warning, VolumeGroupSnapshotContent: the group snapshot was not created; the message is also in the status
	reasonGroupCreationFailed = "GroupSnapshotCreationFailed"
	// Warning, VolumeGroupSnapshotContent: the readiness of the group snapshot is unknown; the message is also in the status
	reasonGroupCheckFailed = "GroupSnapshotContentCheckandUpdateFailed"
	// Warning, VolumeGroupSnapshotContent: an attempt to delete the group snapshot failed, and why
	reasonGroupDeleteError = "GroupSnapshotDeleteError"
)

// kind holds what differs between VolumeSnapshotContents and VolumeGroupSnapshotContents.
type kind struct {
	group                       bool
	versions                    []schema.GroupVersion // of the API, in the order of preference. They have one schema
	old                         []schema.GroupVersion // with another schema, which are only looked for
	name                        string
	queue, logKey               string
	finalizer                   string
	creating, deleting          string // annotations
	secretName, secretNamespace string // annotations
	readSecret                  string // class parameters of the secret of the call that reads the state
	handleField                 string // of the status
	class, classKind            string // resource, in messages, and kind
	noun, object                string // in messages: what the driver has, and the content
	parameter                   string // in class parameters and metadata: the VolumeSnapshot; with "content" its content
	create, remove              string // RPCs
	created, checked, deleted   string // reasons of events about failures
}

// reference returns the object of events about a content.
func (k *kind) reference(key contentKey) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: k.versions[0].String(), Kind: k.name, Name: key.Name, UID: key.UID}
}

func (k *kind) allVersions() []schema.GroupVersion { return slices.Concat(k.versions, k.old) }

var snapshotKind = &kind{
	versions: []schema.GroupVersion{snapshotv1.SchemeGroupVersion}, name: "VolumeSnapshotContent",
	queue: "csi-snapshotter-content", logKey: "volumeSnapshotContent", finalizer: Finalizer,
	creating: AnnBeingCreated, deleting: AnnBeingDeleted, secretName: AnnSecretName, secretNamespace: AnnSecretNamespace,
	readSecret: "snapshotter-list-secret-", handleField: "snapshotHandle", class: "volumesnapshotclass.snapshot.storage.k8s.io",
	classKind: "VolumeSnapshotClass", noun: "snapshot", object: "content", parameter: "volumesnapshot", create: "CreateSnapshot",
	remove: "DeleteSnapshot", created: reasonCreationFailed, checked: reasonCheckFailed, deleted: reasonDeleteError,
}

var groupKind = &kind{
	group: true, versions: []schema.GroupVersion{groupv1.SchemeGroupVersion, {Group: groupv1.GroupName, Version: "v1beta2"}},
	old: []schema.GroupVersion{{Group: groupv1.GroupName, Version: "v1beta1"}}, name: "VolumeGroupSnapshotContent",
	queue: "csi-snapshotter-groupsnapshotcontent", logKey: "volumeGroupSnapshotContent", finalizer: GroupFinalizer,
	creating: AnnGroupBeingCreated, deleting: AnnGroupBeingDeleted,
	secretName: AnnGroupSecretName, secretNamespace: AnnGroupSecretNamespace,
	readSecret: "group-snapshotter-get-secret-", handleField: "volumeGroupSnapshotHandle",
	class: "volumegroupsnapshotclass.groupsnapshot.storage.k8s.io", classKind: "VolumeGroupSnapshotClass", noun: "group snapshot",
	object: "group snapshot content", parameter: "volumegroupsnapshot",
	create: "CreateVolumeGroupSnapshot", remove: "DeleteVolumeGroupSnapshot", created: reasonGroupCreationFailed,
	checked: reasonGroupCheckFailed, deleted: reasonGroupDeleteError,
}

// LeaseName returns the name of the Lease of csi-snapshotter for driver.
func LeaseName(driver string) string {
	return election.LeaseName("external-snapshotter-leader-" + strings.ReplaceAll(driver, "/", "-"))
}

// snapshotName returns the name of a snapshot for the driver. It depends only on the UID of the
// VolumeSnapshot or VolumeGroupSnapshot, so that every attempt requests the same snapshot.
func snapshotName(prefix string, length int, uid types.UID) string {
	id := string(uid)
	if length >= 0 {
		id = strings.ReplaceAll(id, "-", "")
		id = id[:min(len(id), length)]
	}
	return prefix + "-" + id
}
