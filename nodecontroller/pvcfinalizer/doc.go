// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package pvcfinalizer removes finalizers from PersistentVolumeClaims.
//
// In mode strip it removes obsolete finalizers, which no other program removes, from all claims
// of the cluster. In mode enforce it also processes claims that are being deleted and have the
// finalizer of the driver: it deletes all pods that use them, and removes the finalizer when it is
// the last one.
//
// A claim is read from the API server before any of its pods is deleted, and so is the pod, which is
// deleted by UID.
package pvcfinalizer
