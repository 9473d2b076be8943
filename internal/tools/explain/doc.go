// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package explain reports why a Pod, PersistentVolumeClaim, PersistentVolume, VolumeAttachment, VolumeSnapshot or
// Node is in its state, and the next step.
//
// Like the controllers it gathers, decides and prints: gather.go and reads.go read each object once, functions
// without side effects derive findings from these facts, and report.go writes them. A read that fails becomes a
// finding. An error is reported only as a failure (failure.go) that was read: its text decides the next step. Only
// the metadata of Secrets is requested, so their values never leave the API server.
package explain
