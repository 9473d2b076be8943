// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package election runs work on one of several replicas: the one that holds a Lease.
//
// The Lease is released only after the work has stopped, so that two replicas never work at the
// same time. A replica that loses the Lease drains, becomes a standby, and keeps its process. The
// protocol is the one of client-go.
package election
