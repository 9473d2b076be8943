// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package pvcfinalizer removes finalizers from PersistentVolumeClaims.
//
// In mode strip it removes obsolete finalizers, which no other program removes, from all claims
// of the cluster. In mode enforce it also processes claims that are being deleted and have the
// finalizer of the driver: it deletes the pods that keep them from being deleted, as
// --pvc-pod-deletion says, and removes the finalizer when it is the last one.
//
// A claim is read from the API server before any of its pods is deleted. So are the pod and, if it
// matters, the node of the pod. A pod is deleted by UID, and by resourceVersion if its node matters.
package pvcfinalizer
