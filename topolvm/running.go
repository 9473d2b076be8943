// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"sync"
)

// running holds the running calls. The zero value is ready for use.
type running struct {
	mu       sync.Mutex
	draining bool
	calls    map[*context.CancelCauseFunc]bool
	changed  chan struct{} // closed when the last call ends; nil: drain does not wait
}

// begin returns the context of a new call, which ends with errShutdown if drain does not wait any longer. It returns false while
// draining.
func (r *running) begin(ctx context.Context) (_ context.Context, end func(), ok bool) {
	ctx, cancel := context.WithCancelCause(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		cancel(errShutdown)
		return ctx, nil, false
	}
	if r.calls == nil {
		r.calls = map[*context.CancelCauseFunc]bool{}
	}
	r.calls[&cancel] = true
	return ctx, func() {
		cancel(nil)
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.calls, &cancel)
		if r.draining && len(r.calls) == 0 {
			close(r.changed)
		}
	}, true
}

// drain lets no call begin and waits until the running ones have ended. When ctx ends, it cancels them.
func (r *running) drain(ctx context.Context) {
	r.mu.Lock()
	if r.draining {
		r.mu.Unlock()
		return
	}
	r.draining, r.changed = true, make(chan struct{})
	if len(r.calls) == 0 {
		close(r.changed)
	}
	r.mu.Unlock()
	select {
	case <-r.changed:
		return
	case <-ctx.Done():
	}
	r.mu.Lock()
	for cancel := range r.calls {
		(*cancel)(errShutdown)
	}
	r.mu.Unlock()
	<-r.changed
}
