// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import "syscall"

// dieWithParent lets the system kill a process together with this one. In a process group of its own it does
// not receive the Ctrl-C of a terminal.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
