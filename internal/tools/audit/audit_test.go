// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"math"
	"testing"
	"time"
)

func TestValidate(t *testing.T) {
	t.Parallel()
	for entries, valid := range map[int]bool{0: true, math.MaxInt32: true, -1: false, math.MaxInt32 + 1: false, 3_000_000_000: false} {
		cfg := DefaultConfig()
		cfg.MaxEntries = entries
		if err := cfg.Validate(); (err == nil) != valid {
			t.Errorf("--max-entries=%d: %v", entries, err)
		}
	}
	const want = "--timeout: must be positive, got -1s\n--stuck-after: must be positive, got -2s\n--settle: must be positive, got 0s"
	invalid := Config{Timeout: -time.Second, StuckAfter: -2 * time.Second}
	for range 20 { // the order of a map would differ from run to run
		if err := invalid.Validate(); err == nil || err.Error() != want {
			t.Fatalf("got %v, want %s", err, want)
		}
	}
}
