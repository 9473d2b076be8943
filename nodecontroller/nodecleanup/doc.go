// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package nodecleanup cleans up after nodes that were deleted.
//
// A volume of a node-local driver names its node by a value of the topology key in its node affinity. Such a value is a
// host. A host is in one of these states:
//
//	present ──► deleting ──► missing ──► its record ends, when nothing of it is left
//	   ▲            │           │
//	   └────────────┴───────────┘ lists of all Nodes have its Node: its record ends
//
// The states are:
//   - present: a Node exists that is not being deleted. Nothing is deleted.
//   - deleting: its Node is being deleted and waits for our finalizer. After --node-delete-grace its claims are deleted, then
//     its custom resources, then the finalizer is removed.
//   - missing: no Node exists. After --node-missing-grace, or an approval, its claims are deleted, in mode volumes also the
//     volumes that the driver can no longer delete, then its custom resources.
//   - unclear: a CSINode or a Node exists that may be its node. Nothing is deleted, and a later absence has its full grace.
//
// Lost nodes are few, and every decision is about all of them. So a pass reads the cluster ([newWorld]), decides ([plan]),
// writes the records, and carries out the due deletions. Only [mayClean] permits a deletion. It judges the caches for the plan, and live
// reads before the request.
//
// Everything that must outlive the process is in one record per lost host. The records of a driver are in one ConfigMap:
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
// The promises of the package are numbered. 1 to 19 are the elements of [rules]: a deletion needs the consent of all of them.
// The others, of which [nextRecord] and [releases] are in plan.go, are:
//
//  20. A deletion carries the UID and the resourceVersion of the live read. A patch of finalizers tests the resourceVersion.
//  21. A record is written before anything is deleted, and before the finalizer of a Node is removed.
//  22. Only the process that the annotation holder names, and that has the Lease, writes or deletes.
//  23. The field since is set, and a record ends, only by lists of the same pass ([nextRecord], [Plan.needsLists]).
//  24. A hold ends only with an approval or the return of the node. An approval ends with this loss ([nextRecord]).
//  25. After ten minutes without a check, all graces start again, and approvals end. A since in the future becomes now
//     ([nextRecord]).
//  26. The opt-out of a Node is in its record while the Node exists, before our finalizer is removed, and outlives the Node
//     ([releases], [nextRecord]).
//  27. Our finalizer stays until grace and cleanup are over, but not longer than --node-finalizer-timeout, except for 26
//     ([releases]). That holds also while the custom resources of the driver are not cached, and nothing is deleted.
//  28. Of the finalizers of a PersistentVolume, only those of the driver's provisioner and attacher are removed
//     ([Settings.removableFinalizers]).
package nodecleanup
