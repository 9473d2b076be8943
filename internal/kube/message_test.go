// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestLongMessagesAreCut(t *testing.T) {
	for _, message := range []string{strings.Repeat("x", 5000), strings.Repeat("ä", 2000), "x" + strings.Repeat("€", 1000)} {
		got := Message(message)
		if len(got) > maxMessage || len(got) < maxMessage-3 || !utf8.ValidString(got) || !strings.HasPrefix(message, got) {
			t.Errorf("%d bytes, valid %t", len(got), utf8.ValidString(got))
		}
	}
	if got := Message("short\xff"); got != "short?" {
		t.Error(got)
	}
}
