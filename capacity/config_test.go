// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"strings"
	"testing"
)

// TestValidateReportsInOrder checks that the same settings give the same text each time.
func TestValidateReportsInOrder(t *testing.T) {
	var cfg Config
	first := cfg.Validate().Error()
	lines := strings.Split(first, "\n")
	for i, flag := range []string{
		"--timeout:", "--retry-interval-start:", "--retry-interval-max:", "--capacity-poll-interval:", "--capacity-threads:",
	} {
		if !strings.HasPrefix(lines[i], flag) {
			t.Errorf("line %d is %q, want %s", i, lines[i], flag)
		}
	}
	for range 100 {
		if again := cfg.Validate().Error(); again != first {
			t.Fatalf("got\n%s\nafter\n%s", again, first)
		}
	}
}
