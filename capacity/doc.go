// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package capacity publishes the available capacity of one CSI driver: for each topology
// segment with nodes of the driver and each of its StorageClasses it calls GetCapacity and
// keeps one CSIStorageCapacity object with the response (KEP-1472; CSI spec,
// "GetCapacity"). The scheduler places pods with unbound claims where capacity is
// available.
//
// The unit of work is a pair of a StorageClass and a segment. Events enqueue the pairs that
// they affect. The sync of a pair creates, updates or deletes its objects, and calls the
// driver if its response is older than --capacity-poll-interval or may have changed.
//
// The objects have the labels csi.storage.k8s.io/drivername and csi.storage.k8s.io/managed-by,
// with the values that csi-provisioner writes, and an owner reference (see [FindOwner]).
// They have no finalizer. The package sends no events.
package capacity
