// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// failure is an error that was read: from a status, an event or the status page. [explanation.failed] is the only way to report an
// error, and the text of the error decides the next step: a finding never names a cause that was not read.
type failure struct {
	text      string
	at        time.Time // zero: unknown
	condition string    // that reports the error since at
	code      string    // gRPC code, if it was read apart from the text; Unknown also stands for an error without one
	local     bool      // an error of the component itself, which may quote one of the driver
	by        string    // the component that had the error
	again     string    // " in 5m" if the time of the next attempt was read
}

var (
	grpcError     = regexp.MustCompile(`rpc error: code = (\w+) desc = `)
	missingAccess = regexp.MustCompile(`is forbidden: User "[^"]*" cannot `)
)

// grpcCode returns the gRPC code of the error: that of a call to the driver. It is "" for any other error.
func (f failure) grpcCode() string {
	if f.local {
		return ""
	}
	if found := grpcError.FindStringSubmatch(f.text); found != nil {
		return found[1]
	}
	return f.code
}

// next returns the next step after f.
func (f failure) next() string {
	advice := "Fix the error shown above; the log of the " + f.by + " has the details."
	switch f.grpcCode() {
	case "Unavailable", "DeadlineExceeded", "Canceled":
		advice = "Check that the driver runs and responds; the log of its container (`kubectl logs`) has the details."
	case "Unknown":
		advice = "Fix the error shown above; the logs of the " + f.by + " and of the driver container (`kubectl logs`) have the details."
	case "":
		if missingAccess.MatchString(f.text) {
			advice = "Grant the permission that the error names: `storage-controller doctor --print-rbac` prints the missing ones."
		}
	default:
		advice = "Fix the error shown above; the log of the driver container (`kubectl logs`) has the details."
	}
	return "Retries automatically" + f.again + ". " + advice
}

// failed adds a finding about f. The text before the error says what failed.
func (e *explanation) failed(topic string, f failure, format string, args ...any) *finding.Finding {
	what := fmt.Sprintf(format, args...)
	switch {
	case f.condition != "":
		what += fmt.Sprintf(" (condition %s for %s)", f.condition, e.age(f.at))
	case !f.at.IsZero():
		what += " " + e.age(f.at) + " ago"
	}
	added := e.failing(topic, "%s: %s", what, sentence(cmp.Or(f.text, "the error has no text")))
	added.Next = f.next()
	return added
}

// failureOfEvent returns the error that an event reports. role is the component that sends such events.
func failureOfEvent(event *corev1.Event, role string) failure {
	return failure{text: event.Message, at: lastSeen(event).Time, by: role}
}

// failureOfStatus returns the error in the status of a VolumeAttachment.
func failureOfStatus(err *storagev1.VolumeError) failure {
	return failure{text: err.Message, at: err.Time.Time, by: roleAttacher, local: !strings.HasPrefix(err.Message, "rpc error: ")}
}
