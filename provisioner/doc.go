// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package provisioner provisions and deletes volumes: it turns PersistentVolumeClaims
// into CreateVolume calls and PersistentVolumes, and released PersistentVolumes into
// DeleteVolume calls (CSI spec, "CreateVolume").
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
// The volume of a claim passes through these stages. Each line is a transition of the
// [operation] of the claim; the process may exit before and after each of them.
//
//	pending       ─ begin ───────────► requested      a CreateVolume request is prepared
//	pending       ─ resume ──────────► indeterminate  an earlier process recorded a request on the claim
//	requested     ─ outcomeUnknown ──► indeterminate  CreateVolume returned no definite result
//	requested     ─ volumeCreated ───► created        CreateVolume returned a volume
//	indeterminate ─ volumeCreated ───► created
//	requested     ─ volumeRejected ──► rejected       CreateVolume returned a volume that cannot be used
//	indeterminate ─ volumeRejected ──► rejected
//	created       ─ pvSaved ─────────► pvCreated      the PersistentVolume is created
//	created       ─ outcomeUnknown ──► indeterminate  a PersistentVolume of the claim is deleted, or being deleted
//	created       ─ volumeRejected ──► rejected       a PersistentVolume of that name has another volume
//	requested     ─ noVolume ────────► pending        no volume exists and none will: final error, or never called
//	indeterminate ─ noVolume ────────► pending        final error
//	created       ─ noVolume ────────► pending        the volume belongs to another object, or was deleted with this one
//	rejected      ─ noVolume ────────► pending        the volume is deleted again
//	pvCreated     ─ unbound ─────────► pending        the PersistentVolume was deleted before the claim was bound
//
// An indeterminate request is repeated with equal arguments until the driver returns a
// definite result; only the values of its secret are read again. With
// --provisioning-protection=off it is prepared again if the StorageClass was recreated.
//
// A claim that is bound or deleted is forgotten in the stages pending and pvCreated, and
// in no other.
//
// # PersistentVolumes
//
// A released PersistentVolume takes three steps: DeleteVolume, removal of the
// finalizers, deletion of the object.
//
// # Loops
//
// [Controller.Run] starts the claim loop (gather, decide, apply), the volume loop, the queues
// that release the sources of clones and restored snapshots, and the watches of optional kinds.
// In distributed provisioning the claim loop consults nodeOwnership before it selects this node.
package provisioner
