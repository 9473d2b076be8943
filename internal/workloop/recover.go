// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"fmt"
	"runtime/debug"
)

// Recover turns a panic of the function that defers it into an error with a stack trace.
func Recover(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
}
