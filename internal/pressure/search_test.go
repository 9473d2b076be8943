// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pressure

import (
	"testing"
	"time"
)

// TestFirstStepIsLarge: without a limit, also after an earlier search has taken small steps, the first step halves the calls. After a small
// one, too few calls would have to wait for the step to be judged.
func TestFirstStepIsLarge(t *testing.T) {
	s := newSearch()
	s.fineDown = true
	slow := result{peak: 100, rate: 10, good: 1, mean: 10 * time.Second, budget: 15 * time.Second}
	if limit, reason := s.next(slow, time.Now()); limit != 50 || reason == "" {
		t.Errorf("limit %d, %q", limit, reason)
	}
}
