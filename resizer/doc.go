// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package resizer expands and modifies the volumes of one CSI driver: it calls ControllerExpandVolume for PersistentVolumeClaims that
// request more storage (KEP-1790) and ControllerModifyVolume for claims that request another VolumeAttributesClass (KEP-3751).
//
// Fields that it writes:
//
//   - of a claim: status.allocatedResources, status.allocatedResourceStatuses, status.capacity, status.modifyVolumeStatus,
//     status.currentVolumeAttributesClassName, the conditions Resizing, FileSystemResizePending, ControllerResizeError, NodeResizeError,
//     ModifyingVolume and ModifyVolumeError, and the annotation volume.kubernetes.io/node-expansion-not-required;
//   - of a PersistentVolume: spec.capacity, spec.volumeAttributesClassName, and the annotation
//     volume.alpha.kubernetes.io/pre-resize-capacity with the size before an expansion.
//
// All writes are patches that test the UID and the resourceVersion, and are sent only while this process holds its Lease.
//
// # Expansion
//
// Each arrow is one write, or one RPC and the write that records its result. The process may
// exit at any of them. The words are values of status.allocatedResourceStatuses.
//
//	(none) ─► ControllerResizeInProgress ─► RPC ─► PersistentVolume ─► NodeResizePending ─► (kubelet)
//	                     │        ▲          ├─ complete ───────────► (none)
//	                     ▼        │          │
//	                  final or indeterminate error: repeated
//	          ControllerResizeInfeasible ◄───┘ retried after --retry-interval-max
//
// While the outcome of a call is unknown, the recorded size is requested again, even if the claim requests another one now. A final
// response permits another size. A driver that expands volumes on nodes only gets no call; the claim is written before the
// PersistentVolume, because the kubelet expands to the recorded size.
//
// # Modification
//
// status.modifyVolumeStatus names the VolumeAttributesClass that the driver gets, before the call. The PersistentVolume is written before
// that status is removed, so that the class is protected without a gap.
//
// # Calls
//
// Both RPCs follow the rules of package intent: the record is the status that names the target. record.go says what that means and writes
// it, ledger.go has the calls of the term, call.go plans and sends them, and answer.go decides about their responses. delay.go has the
// waits before a call: after an infeasible target, and while the volume is in use, which inuse.go watches.
// Another target is planned only while no call may have an effect, which record.go ([claimState.only]) decides.
//
// # Loop
//
// One queue has a key for each operation on a claim, so that both operations of a claim run in parallel, with separate back-off. They
// share a lock, which is held during decisions and writes, and not during calls. If both begin, one patch writes both intents.
package resizer
