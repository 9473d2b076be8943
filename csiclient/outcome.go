// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
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

// OutcomeOf returns the outcome of a call that failed with err (CSI spec, "Error Scheme" and
// "Timeouts"). Cancelled and timed out calls, connection errors, Aborted, and errors without a
// gRPC status are indeterminate. err must not be nil.
//
// Final does not mean that the goal of the call is reached: after NotFound from
// ControllerUnpublishVolume the volume may still be published (see package attacher).
func OutcomeOf(err error) Outcome {
	s, ok := status.FromError(err)
	if !ok {
		return Indeterminate
	}
	switch s.Code() {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted:
		return Indeterminate
	}
	return Final
}
