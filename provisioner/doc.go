// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package provisioner provisions and deletes volumes: it turns PersistentVolumeClaims into CreateVolume calls and PersistentVolumes, and
// released PersistentVolumes into DeleteVolume calls (CSI spec, "CreateVolume").
//
// It owns, on objects:
//
//   - the finalizer external-provisioner.volume.kubernetes.io/finalizer on a
//     PersistentVolume whose reclaim policy is Delete (KEP-2644);
//   - the finalizer of the attacher on a PersistentVolume that it creates, if both run in one
//     process, see Deps.VolumeFinalizers; the attacher owns it from then on;
//   - the finalizer storage-controller.io/provisioning and an annotation beside it on
//     a claim while the outcome of CreateVolume is unknown or the PersistentVolume cannot be created, see
//     --provisioning-protection;
//   - the finalizers of [kube.CloningProtection] and [kube.SnapshotProtection] on the source
//     of a clone or a restored snapshot while it is copied;
//   - the annotation volume.kubernetes.io/selected-node on a claim, in distributed provisioning;
//   - the removal of volume.kubernetes.io/selected-node from a claim that cannot be
//     provisioned on that node.
//
// # Claims
//
// CreateVolume follows the rules of package intent, which decide.go asks. The record is the finalizer and the annotation, which has an ID,
// a hash of the request and its topology. Until it has been written again, the record of an earlier process has another ID.
//
//   - record.go: the record on the claim, when it is written (--provisioning-protection; clones on nodes), and what follows if it fails;
//   - resume.go: what follows from the record of an earlier process or of another driver, and whether the StorageClass was recreated;
//   - ledger.go: the calls of the term;
//   - sources.go: the finalizers of the sources of clones and restored snapshots, and what uses a source;
//   - secrets.go: when the secret is read, and read again;
//   - create_volume.go: what a response means, and the deletion of a volume that was rejected;
//   - handles.go: which claim or PersistentVolume a volume belongs to, and what follows if a PersistentVolume of its name exists;
//   - pv_deleted.go: what follows from the deletion of a PersistentVolume;
//   - drain.go: what a process writes after its term has ended, and the log of what it leaves.
//
// Logs and /statusz name the states pending (Idle, Settled), requested (Planned, Sent), indeterminate (Unknown), created (Answered),
// rejected (Undoing) and pvCreated (Settled, and the PersistentVolume is saved).
//
// Only the values of the secret of an indeterminate request are read again.
//
// A claim that is bound or deleted is forgotten unless its call is in progress.
//
// # PersistentVolumes
//
// A released PersistentVolume takes three steps: DeleteVolume, removal of the finalizers, deletion of the object.
//
// # Loops
//
// [Controller.Run] starts the claim loop (gather, decide, apply), the volume loop, the queues
// that release the sources of clones and restored snapshots, and the watches of optional kinds.
// In distributed provisioning the claim loop consults nodeOwnership before it selects this node.
package provisioner
