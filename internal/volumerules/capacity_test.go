// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"math"
	"testing"
)

func TestCapacityWarning(t *testing.T) {
	const gib, tib = 1 << 30, 1 << 40
	for name, tt := range map[string]struct {
		reported, requested int64
		want                bool
	}{
		"as requested":         {2 * gib, 2 * gib, false},
		"unknown":              {0, 2 * gib, false},
		"rounded up":           {3 * gib, 2*gib + 1, false},
		"smallest volume":      {tib, 1, false},
		"smallest volume, 4Ti": {4*tib + 2, 1, false},
		"larger":               {4*tib + 3, 1, true},
		"8 EiB":                {math.MaxInt64, 2 * gib, true},
		"8 EiB, as requested":  {math.MaxInt64, math.MaxInt64, false},
		"no request":           {math.MaxInt64, 0, true},
	} {
		if got := CapacityWarning("CreateVolume", "vol", tt.reported, tt.requested); (got != "") != tt.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
