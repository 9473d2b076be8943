// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"testing"
)

// minimizeRuns bounds the runs of [Minimize].
const minimizeRuns = 150

// Minimize returns a shorter history than h that has a violation, with fewer faults and steps: it cuts the
// choices of h and replaces them by the simplest ones.
func Minimize(t *testing.T, h History) History {
	runs := 0
	try := func(choices []uint16) bool {
		if runs++; runs > minimizeRuns {
			return false
		}
		shorter := Run(t, 0, choices)
		if shorter.Violation == "" || len(shorter.Lines) > len(h.Lines) {
			return false
		}
		h = shorter
		return true
	}
	for size := len(h.Choices) / 2; size > 0 && runs < minimizeRuns; size /= 2 {
		for i := 0; i+size <= len(h.Choices); i += size {
			if try(slices.Delete(slices.Clone(h.Choices), i, i+size)) {
				continue
			}
			zeros := slices.Clone(h.Choices)
			if clear(zeros[i : i+size]); !slices.Equal(zeros, h.Choices) {
				try(zeros)
			}
		}
	}
	return h
}
