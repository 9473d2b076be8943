// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package resizenudge makes the kubelet expand a file system at once.
//
// The kubelet expands the file system of an online-expanded volume when it next reconciles a pod of the
// volume, which may take minutes. An update of the pod triggers that reconciliation. For each
// PersistentVolumeClaim of the driver that waits for a file system expansion, the controller
// therefore updates an annotation of its running pods, once per transition of the claim.
package resizenudge
