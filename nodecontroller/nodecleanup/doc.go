// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package nodecleanup deletes the claims and volumes of nodes that were deleted.
//
// A volume of a node-local driver names its node by a value of the topology key in its node
// affinity. Such a value is a host. A host is in one of these states:
//
//	present ──► deleting ──► missing ──► its record ends, when nothing of it is left
//	   ▲            │           │
//	   └────────────┴───────────┘ a live read finds a Node: its record ends
//
// The states are:
//   - present: a Node exists. Nothing is deleted.
//   - deleting: its Node is being deleted and waits for our finalizer. After --node-delete-grace its
//     claims are deleted, then its custom resources, then the finalizer is removed. The finalizer is
//     also removed, and the claims are left, if the host is held or at --node-finalizer-timeout.
//   - missing: no Node exists. After --node-missing-grace, or an approval, its claims are deleted, in
//     mode volumes also the volumes that the driver can no longer delete, then its custom resources.
//   - unclear: a CSINode or a Node exists that may be its node. Nothing is deleted, and a later
//     absence has its full grace. A hold remains.
//
// With --node-cleanup-scope=opt-in the StorageClass or the claim must opt in. In each scope every
// owner, and the Node, can opt out, see [Policy.refusal].
//
// The breaker holds the hosts with something to delete if too many are lost at the same time. Only an
// approval for this loss, or the return of the Node, ends a hold. A removal is planned, and neither
// counted nor held from then on, if its Node is found unschedulable, without a running pod that uses its volumes, while it waits
// for our finalizer.
//
// An approval for all ([LostNode].ApprovedAll) takes the place of the opt-in, if it was given for each node of a volume.
//
// Everything that must outlive the process is in one record per lost host. The records of a driver
// are in one ConfigMap, see [LostNode]:
//
//	metadata:
//	  name: lost-nodes.local.example.com
//	  annotations:
//	    storage-controller.io/topology-key: topology.local.example.com/node
//	    storage-controller.io/last-look: "2026-11-22T10:05:00Z"
//	    storage-controller.io/approve: worker-9        # set by people, consumed by the controller
//	data:
//	  worker-7: '{"node":"worker-7","since":"2026-11-22T09:51:03Z","held":"breaker"}'
//	  worker-8: '{"node":"worker-8","since":"2026-11-22T09:50:00Z","acted":"2026-11-22T10:05:02Z"}'
//
// These rules keep the records true:
//
//  1. A record is written before the node finalizer is removed, and before anything is deleted.
//  2. A record ends when a live read finds the Node, or when nothing of the host is left. Its hold and approval end with
//     it. Until the window of the breaker has passed, it keeps the time of the last deletion.
//  3. Every write carries the resourceVersion. The annotation holder names the term of the leader,
//     so that an earlier leader can neither write nor delete.
//  4. If no process has checked the lost nodes for longer than [Settings.ClockGap], their grace starts again before
//     anything is deleted.
//  5. The leader writes the ConfigMap again if it is deleted.
//
// The queue has one key per host. A sync reads the caches ([gatherer]), decides what the record
// must contain ([Policy.recordOf]) and what comes next ([Policy.decideHost]). [Policy.nextStep]
// names the next step for a volume: the claim, the volume, its finalizers. Before each deletion the
// volume, the node and the cluster are read live, the step is decided again, and [Policy.mayClean]
// must return no reason against it. The deletion carries the UID and resourceVersion of that read.
package nodecleanup
