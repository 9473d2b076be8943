// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package topolvmtest provides what tests of TopoLVM need besides an API server: the CustomResourceDefinitions of both groups, and
// nodes that do what topolvm-node does, without LVM.
package topolvmtest
