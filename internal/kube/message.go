// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"time"
)

// maxMessage is the limit of the API server for the messages of events, conditions and attach errors, in bytes.
const maxMessage = 1024

// Message returns text as the API server accepts it in events, conditions and statuses.
func Message(text string) string {
	text = strings.ToValidUTF8(text, "?")
	return strings.ToValidUTF8(text[:min(len(text), maxMessage)], "") // without the part of a character at the end
}

// ShortList returns at most so many of names, and the number of the others.
func ShortList(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// sameErrorInterval limits how often an error is reported that differs from the last report in volatile text only, such as a request ID.
const sameErrorInterval = time.Minute

// ReportedRecently reports whether an error that was reported at that time, but for volatile text, is not reported again at now.
func ReportedRecently(at, now time.Time) bool { return now.Sub(at) < sameErrorInterval }
