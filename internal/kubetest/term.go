// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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

// RunTerm starts watches and calls run until stop is called with a cause, or until the end of the
// test. stop returns the result of run after the watches have ended and closed was called.
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
