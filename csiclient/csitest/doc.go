// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package csitest provides a CSI driver that runs in the process of a test. It implements volumes,
// snapshots and publications as the CSI spec demands, records every call in order, and can be
// scripted:
//
//	plugin.Next("ControllerPublishVolume", csitest.Hang(), csitest.Fail(codes.Aborted, "pending"))
//
// makes the next two calls hang and fail, and the third succeed.
package csitest
