// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package volumerules holds the rules that decide which volume a claim gets, as pure functions:
// the secrets that a StorageClass names, the data source of a claim, and the conditions for
// restoring a snapshot and cloning a volume. The provisioner follows the rules; explain and
// doctor evaluate them on what they read, so that all three say the same.
package volumerules
