// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package kubetest

import "syscall"

// dieWithParent keeps a process from receiving the Ctrl-C of a terminal.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
