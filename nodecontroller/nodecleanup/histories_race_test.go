// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build race

package nodecleanup

// histories is the number of histories of [TestPromises] with the race detector.
const histories = 1_000
