// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package nodecontroller is the role for node-local volumes. It reads the settings and runs four
// independent parts, which do not import each other:
//
//   - nodecleanup deletes claims and volumes of nodes that were deleted;
//   - pvcfinalizer removes finalizers of claims, and deletes pods that block their deletion;
//   - resizenudge makes the kubelet expand a file system at once;
//   - webhook answers admission requests for pods and claims.
package nodecontroller
