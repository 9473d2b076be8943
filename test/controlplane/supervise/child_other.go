// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package supervise

import "syscall"

// dieWithParent puts a child into a process group of its own, where it does not see
// the Ctrl-C of a terminal. Only Linux can end it with a supervisor that was killed.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
