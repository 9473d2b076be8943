// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package supervise

import "syscall"

// dieWithParent lets the system kill a child together with the thread that
// started it, so that a component never outlives its supervisor. In a
// process group of its own it does not see the Ctrl-C of a terminal.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
