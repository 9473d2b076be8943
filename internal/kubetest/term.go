package kubetest

import (
	"context"
	"errors"
	"testing"
)

// Informers is what a controller learns from: kube.Informers.
type Informers interface {
	Start(ctx context.Context)
	Shutdown()
}

// RunTerm has run work with watches, as a process would, until stop is called with the
// cause for its end, or the test is over. stop returns what run has returned; then the
// watches have ended, and closed has been called.
func RunTerm(t testing.TB, watches Informers, run func(context.Context) error, closed func()) (stop func(cause error) error) {
	watching, endWatch := context.WithCancel(context.WithoutCancel(t.Context()))
	watches.Start(watching)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	var ended error
	stop = func(cause error) error {
		if ctx.Err() == nil {
			cancel(cause)
			ended = <-done
			endWatch()
			watches.Shutdown()
			closed()
		}
		return ended
	}
	t.Cleanup(func() { _ = stop(errors.New("the test is over")) })
	return stop
}
