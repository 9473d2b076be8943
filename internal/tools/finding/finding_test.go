// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package finding

import (
	"strings"
	"testing"
)

func TestText(t *testing.T) {
	t.Parallel()
	const want = `ok       a             m
failing  longer-topic  n
                       → h
unknown  b             o
warning  b             p
warning  c             q
                       → shared
blocked  c             r
                       → another
`
	got := Text([]Finding{
		{Severity: OK, Topic: "a", Message: "m"}, {Severity: Failing, Topic: "longer-topic", Message: "n", Next: "h"},
		{Severity: Unknown, Topic: "b", Message: "o"}, {Severity: Warning, Topic: "b", Message: "p", Next: "shared"},
		{Severity: Warning, Topic: "c", Message: "q", Next: "shared"}, {Severity: Blocked, Topic: "c", Message: "r", Next: "another"},
	})
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestTextOfOthers: no field adds a line to the report, or writes to the terminal.
func TestTextOfOthers(t *testing.T) {
	t.Parallel()
	const text = "a\r\n\tb\u2028c\x1b[2J\u202e"
	got := Text([]Finding{{Severity: text, Topic: text, Message: text, Next: text}})
	if strings.Count(got, "\n") != 2 || strings.ContainsAny(got, "\r\t\x1b\u2028\u202e") || !strings.HasPrefix(got, "a b c?[2J? ") {
		t.Errorf("%q", got)
	}
}

func TestSeverities(t *testing.T) {
	t.Parallel()
	for i, s := range severities[1:] {
		if less := severities[i]; !s.Exceeds(less) || less.Exceeds(s) || s.Exceeds(s) {
			t.Errorf("%s and %s", s, less)
		}
	}
	if !Failing.Exceeds(Warning) || !Warning.Exceeds(Unknown) || !Unknown.Exceeds(OK) {
		t.Error("wrong order")
	}
	all := []Finding{{Severity: OK}, {Severity: Warning}, {Severity: OK}}
	if Count(all, OK) != 2 || Count(all, Failing) != 0 {
		t.Error("wrong count")
	}
	if Plural(1, "check") != "1 check" || Plural(0, "check") != "0 checks" {
		t.Error("wrong plural")
	}
}
