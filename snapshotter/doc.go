// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package snapshotter creates and deletes the snapshots of one CSI driver: it turns VolumeSnapshotContents into CreateSnapshot and
// DeleteSnapshot calls, and VolumeGroupSnapshotContents into the calls for groups (CSI spec, "CreateSnapshot" and
// "CreateVolumeGroupSnapshot"). The snapshot-controller of the cluster creates and deletes these objects.
//
// Fields that it writes:
//
//   - status of a content, except the first status of a member of a group;
//   - annotation volumesnapshot-being-created, from before the first call until the status has the snapshot;
//   - annotation storage-controller.io/create-snapshot with the request of that call;
//   - finalizer volumesnapshotcontent-bound-protection, added before the first call if the
//     snapshot-controller has not added it, and removed after a successful deletion.
//
// Each arrow is one write, or one RPC and the write that records its result. The process may exit at any of them:
//
//	bound ─► finalizer, annotations ─► created, status ─► annotation removed ─► ready
//	deletionTimestamp, released ─► deleted, finalizer removed
//
// A deletion is released by the annotation volumesnapshot-being-deleted. If the outcome of CreateSnapshot is unknown then, the call is
// repeated with the recorded request until it is known, because only then the snapshot can be deleted.
// A content that is given to another driver is left to that driver; an event names a snapshot that may remain.
//
// # Calls
//
// CreateSnapshot follows the rules of package intent.
//
//   - record.go: what a content records about it and says about the calls of earlier processes, how the record is written, and what
//     follows if it is refused;
//   - ledger.go: the calls of the term;
//   - decide.go: what a content without a snapshot gets, also when a call is recorded for the first time or was never sent;
//   - decide_answer.go: what follows from a response, also from one that cannot be written, and from a user who removes the annotation
//     during the wait;
//   - decide_repeat.go: the repetitions during a deletion, also before DeleteSnapshot;
//   - answer.go: what a response may change of a status, and contradictions;
//   - decide_delete.go: which snapshots a deletion deletes;
//   - undo.go: what follows if a content was deleted, also unseen by the watch, or given to another driver.
//
// # Loops
//
// [Controller.Serve] watches the resources on every replica while the API server serves them. [Controller.Run] starts one loop (gather,
// decide, apply) for each of the two kinds of contents. Both have a [content] in caches, decisions and writes, and share the decision
// table [driver.rowOf].
package snapshotter
