// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"strings"
	"testing"
)

// TestHandlesWithControlCharacters: a driver must not write lines of the report, or to the terminal.
func TestHandlesWithControlCharacters(t *testing.T) {
	f := Finding{VolumeHandle: "v\n  \x1b[2Jw"}.of(VolumeWithoutPV, "", "m")
	if got := (Report{Driver: "d", Findings: []Finding{f}}).Text(); !strings.Contains(got, "volume_without_pv  volume v ?[2Jw: m\n") {
		t.Errorf("%q", got)
	}
}
