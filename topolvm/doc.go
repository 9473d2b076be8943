// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package topolvm is the controller side of the CSI driver TopoLVM: it turns CSI calls into LogicalVolumes, from which topolvm-node
// creates LVM volumes.
//
// The LogicalVolume is the only state. Each arrow is a write, and the process may exit at any of them:
//
//	CreateVolume    CREATE ─► topolvm-node: volumeID, currentSize ─► response
//	a failure       code without volumeID ─► DELETE ─► error
//	DeleteVolume    DELETE ─► topolvm-node: finalizer removed ─► response
//	ControllerExpandVolume  PATCH spec.size ─► topolvm-node: currentSize ─► response
//	a failure       code ─► PATCH spec.size back ─► error
//
// The caller repeats a call without a response with equal arguments. The repeated call finds the LogicalVolume by its name or ID, reads it
// from the API server, because the cache may still have a deleted one, and continues from its state. A response names the node of the
// LogicalVolume, not that of the request.
//
// Each call repeats three steps: it gathers a state from caches and own writes, decides about the next step (a pure function), and applies
// it. It waits by watch for the next version of the LogicalVolume, of its source or of its Node, and does not poll. It does not wait for a
// node that does not exist or is not Ready, because each waiting call occupies a worker of the caller. Once such a creation has a result,
// [Deps].RetryClaim has it repeated.
//
// A creation deletes a LogicalVolume without an LVM volume that has failed, or that is on a node that the request does not allow or that
// does not exist. Such deletions carry the UID and the resourceVersion of the decision. A LogicalVolume with an LVM volume is deleted by
// DeleteVolume and DeleteSnapshot only, or if the CreateVolume call that waited for it finds it larger than its limit.
//
// Locks are held by one process: exclusive by name during a creation, exclusive by ID during a deletion or expansion, shared by ID on the
// source of a creation. Replicas, which all serve calls, rely on the name of the LogicalVolume and on preconditions.
package topolvm
