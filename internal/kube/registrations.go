package kube

import (
	"context"

	"k8s.io/client-go/tools/cache"
)

// Registrations is the handlers that work for as long as one term of a controller.
type Registrations struct {
	all     []Registration
	awaited []cache.DoneChecker
	err     error
}

// Add takes what [Informer.Handle] returns.
func (r *Registrations) Add(registration Registration, err error) {
	r.AddUnawaited(registration, err)
	if err == nil {
		r.awaited = append(r.awaited, registration.Synced)
	}
}

// AddUnawaited is Add for handlers that [Registrations.Wait] does not wait for.
func (r *Registrations) AddUnawaited(registration Registration, err error) {
	switch {
	case err == nil:
		r.all = append(r.all, registration)
	case r.err == nil:
		r.err = err
	}
}

// Wait returns when the handlers have seen what there is, or one of them could not be
// added. name tells in the log who waits.
func (r *Registrations) Wait(ctx context.Context, name string) error {
	if r.err != nil {
		return r.err
	}
	if !cache.WaitFor(ctx, name, r.awaited...) {
		return context.Cause(ctx)
	}
	return nil
}

// Remove ends the calls of all handlers.
func (r *Registrations) Remove() {
	for _, registration := range r.all {
		_ = registration.Remove() // fails only when the watch has ended, and with it the handlers
	}
}
