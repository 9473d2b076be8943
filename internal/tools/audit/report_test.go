// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"strings"
	"testing"
)

// TestHandlesWithControlCharacters: a driver must not write lines of the report, or to the terminal.
func TestHandlesWithControlCharacters(t *testing.T) {
	var b strings.Builder
	r := Report{Driver: "d", Findings: []Finding{{Kind: Kinds()[0], VolumeHandle: "v\n  \x1b[2Jw", Message: "m"}}}
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, "\n  volume v   ?[2Jw: m\n") {
		t.Errorf("%q", got)
	}
}
