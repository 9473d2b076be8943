package csiclient

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Outcome is what the error of a call says about its effects.
type Outcome int

const (
	// Final means that the call had no effect and will have none later.
	Final Outcome = iota
	// Indeterminate means that the call took effect, or may yet: it is repeated with
	// equal arguments and never replaced by another.
	Indeterminate
)

func (o Outcome) String() string {
	if o == Indeterminate {
		return "in doubt"
	}
	return "final"
}

// OutcomeOf tells what err, the error of a call, means (CSI spec, "Error Scheme"
// and "Timeouts"). A call that the client gave up, that did not reach the driver for
// sure, or that the driver says is still pending is in doubt; so is an error
// without a gRPC status. err must not be nil.
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
