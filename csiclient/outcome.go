// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Outcome describes the effect of a failed call.
type Outcome int

const (
	// Final means that the call has no effect, and will have none later.
	Final Outcome = iota
	// Indeterminate means that the call may have taken effect, or may still do so. Retry it with
	// identical arguments.
	Indeterminate
)

func (o Outcome) String() string {
	if o == Indeterminate {
		return "indeterminate"
	}
	return "final"
}

// broken are the beginnings of the messages with which gRPC-Go itself ends a call: the stream broke, or the
// response cannot be used. The driver may have executed the call.
var broken = []string{
	"stream terminated by RST_STREAM", "server closed the stream without sending trailers", "unexpected EOF", "cardinality violation: ",
	"a HEADERS frame cannot", "peer header list size exceeded limit", "protocol error: ", "malformed header: ", "transport: ",
	"unexpected HTTP status code", "grpc: received ", "grpc: trying to send ", "grpc: failed to ",
	"grpc: message after decompression ", "grpc: Decompressor ", "grpc: no decompressor ", "grpc: compressed flag set ",
}

// OutcomeOf returns the outcome of a call that failed with err (CSI spec, "Error Scheme" and
// "Timeouts"). Cancelled and timed out calls, connection errors, unusable responses, Aborted, and errors without a
// gRPC status are indeterminate. err must not be nil.
//
// Final does not mean that the goal of the call is reached: after NotFound from
// ControllerUnpublishVolume the volume may still be published (see package attacher).
func OutcomeOf(err error) Outcome {
	var ofCall interface{ GRPCStatus() *status.Status } // not status.FromError, whose message includes that of err
	if !errors.As(err, &ofCall) {
		return Indeterminate
	}
	s := ofCall.GRPCStatus()
	switch s.Code() {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted:
		return Indeterminate
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition, codes.OutOfRange:
		return Final // only a driver returns these codes
	case codes.Unknown:
		if s.Message() == "" { // the response had no status
			return Indeterminate
		}
	}
	if strings.HasPrefix(s.Message(), "received ") && strings.Contains(s.Message(), "-bytes data exceeding the limit ") {
		return Indeterminate // also from gRPC-Go
	}
	if !refused(s.Message()) && slices.ContainsFunc(broken, func(prefix string) bool { return strings.HasPrefix(s.Message(), prefix) }) {
		return Indeterminate
	}
	return Final
}

// Answered reports whether err has a gRPC status: the driver or its connection has answered.
func Answered(err error) bool {
	var ofCall interface{ GRPCStatus() *status.Status }
	return errors.As(err, &ofCall)
}

// ExcludesEarlier reports whether err, with which a repeated call has failed, also means that the equal calls before it have no
// effect: the driver refuses the arguments. All other errors may be those of a step that comes before the search for an existing
// volume or snapshot.
func ExcludesEarlier(err error) bool {
	code := status.Code(err)
	return code == codes.InvalidArgument || code == codes.OutOfRange
}

// refused reports whether the message is that of a driver that has refused a request for its size.
func refused(message string) bool {
	var size, limit int
	_, err := fmt.Sscanf(message, "grpc: received message larger than max (%d vs. %d)", &size, &limit)
	return err == nil && limit != maxResponse && limit != maxListResponse // else the response exceeded the limit of this client
}
