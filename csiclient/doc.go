// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package csiclient connects to the CSI driver. It provides one connection per process, the
// driver's name and capabilities, the outcome of failed calls, and metrics, traces and redacted
// logs of all calls.
//
// Losing the connection does not end the process. The client becomes not ready, which holds the
// workers (see [Client.WaitReady]), reconnects, and reads name and capabilities again. If they
// differ, [Client.Run] returns an error.
package csiclient
