// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"fmt"
	"testing"
	"time"
)

// count returns the numbers of reads and writes of the controllers, events excluded.
func (f *fixture) count() (reads, writes int) {
	for _, s := range f.allRequests() {
		if s.writes() {
			writes++
		} else {
			reads++
		}
	}
	return reads, writes
}

// TestCostOfWaiting: the volumes of lost nodes that wait cost no more than their nodes do. 10 minutes have two checks
// by default.
func TestCostOfWaiting(t *testing.T) {
	t.Parallel()
	const volumes, readLimit, writeLimit = 200, 50, 5
	for name, hold := range map[string]bool{"in_the_grace": false, "held": true} {
		t.Run(name, func(t *testing.T) {
			writeLimit := writeLimit
			f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace, f.cfg.CheckInterval = time.Hour, 10*time.Second })
			for i := range volumes {
				f.bound(fmt.Sprintf("c%d", i), "n")
			}
			if hold {
				f.bound("other", "m")
				writeLimit += 2 // for the record of another lost node
			}
			f.onlyWrites()
			f.start()
			n := f.missing("n")
			if hold {
				f.held("n")
			}
			f.passed(n.Since, 2*f.cfg.CheckInterval)
			f.stop()
			reads, writes := f.count()
			t.Logf("%d reads, %d writes", reads, writes)
			if reads > readLimit || writes > writeLimit {
				t.Errorf("%d reads and %d writes in two checks, want %d and %d at most", reads, writes, readLimit, writeLimit)
			}
		})
	}
}
