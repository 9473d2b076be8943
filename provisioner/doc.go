// Package provisioner makes volumes for claims and deletes them again: it turns
// PersistentVolumeClaims into CreateVolume calls and PersistentVolumes, and released
// PersistentVolumes into DeleteVolume calls (CSI spec, "CreateVolume").
//
// It owns, on objects:
//
//   - the finalizer external-provisioner.volume.kubernetes.io/finalizer on a
//     PersistentVolume whose reclaim policy is Delete (KEP-2644);
//   - the finalizer storage-controller.io/provisioning and an annotation beside it on
//     a claim whose volume may be coming into being, see --provisioning-protection;
//   - the removal of volume.kubernetes.io/selected-node from a claim whose volume
//     cannot be made there.
//
// A claim goes through these states; every arrow is one write or one call, and the
// process may die at each of them:
//
//	wanted ─► asked ─► created ─► saved (PersistentVolume) ─► bound, by Kubernetes
//	            │ in doubt: protected, asked again with the same request
//	            └ final error: forgotten, tried again after a back-off
//
// And a volume:
//
//	released ─► deleted at the driver ─► finalizers removed ─► deleted
package provisioner
