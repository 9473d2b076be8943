// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build race

package provisioner

// competitors is how many nodes compete for claims in TestHundredNodes. With the race
// detector a hundred need all of a small machine.
const competitors = 25
