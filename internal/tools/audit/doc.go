// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package audit compares the volumes of a driver with the objects of the API server: volumes
// and PersistentVolumes, published nodes and VolumeAttachments. It also finds objects that
// are stuck in deletion. It changes nothing.
package audit
