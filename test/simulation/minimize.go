// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// minimizeRuns bounds the runs of [Minimize].
const minimizeRuns = 150

// Minimize returns a shorter history than h that has the same violation, with fewer faults and steps: it cuts the
// choices of h and replaces them by the simplest ones.
func Minimize(t *testing.T, h History) History {
	runs := 0
	try := func(choices []uint16) bool {
		runs++
		if runs > minimizeRuns {
			return false
		}
		shorter := Run(t, h.Seed, choices)
		if kindOf(shorter.Violation) != kindOf(h.Violation) || len(shorter.Lines) > len(h.Lines) {
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
			clear(zeros[i : i+size])
			if !slices.Equal(zeros, h.Choices) {
				try(zeros)
			}
		}
	}
	return h
}

var names = regexp.MustCompile(`(va-)?pvc-[0-9a-f-]+|(snap\w+-)?[0-9a-f]{8}-[0-9a-f-]+|[0-9]+`)

// kindOf returns the first words of a violation, up to a list of objects, without numbers and generated names.
func kindOf(violation string) string {
	kind, _, _ := strings.Cut(names.ReplaceAllString(violation, "*"), ", ")
	return kind[:min(len(kind), 70)]
}
