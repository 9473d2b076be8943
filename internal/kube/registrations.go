// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"

	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Registrations collects the handlers that are registered during one run of a controller.
type Registrations struct {
	all     []Registration
	awaited []cache.DoneChecker
	err     error
}

// Add adds the result of [Informer.Handle].
func (r *Registrations) Add(registration Registration, err error) {
	r.AddUnawaited(registration, err)
	if err == nil {
		r.awaited = append(r.awaited, registration.Synced)
	}
}

// AddUnawaited adds a registration for which [Registrations.Wait] does not wait.
func (r *Registrations) AddUnawaited(registration Registration, err error) {
	switch {
	case err == nil:
		r.all = append(r.all, registration)
	case r.err == nil:
		r.err = err
	}
}

// Wait waits until the handlers were called for all existing objects. It returns the error of Add,
// if any. name appears in the log.
func (r *Registrations) Wait(ctx context.Context, name string) error {
	if r.err != nil {
		return r.err
	}
	quiet := klog.NewContext(ctx, klog.FromContext(ctx).V(2)) // each term waits
	if !cache.WaitFor(quiet, name, r.awaited...) {
		return context.Cause(ctx)
	}
	return nil
}

// Remove unregisters all handlers.
func (r *Registrations) Remove() {
	for _, registration := range r.all {
		_ = registration.Remove() // fails only if the informer was stopped
	}
}
