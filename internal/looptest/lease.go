// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package looptest

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// lease is the Lease of a loop. It expires by the clock only, and the context of the term does not end: so a process continues
// that was suspended, before its timers fire.
type lease struct{ expired, refused atomic.Bool }

// term returns the context of a term with l.
func (l *lease) term(ctx context.Context) context.Context {
	return election.WithLease(ctx, election.Lease{Lost: context.WithoutCancel(ctx), Held: func() error {
		if l.expired.Load() {
			l.refused.Store(true)
			return election.ErrLost
		}
		return nil
	}})
}

// Expire ends the Lease of the running loop by the clock.
func (f *Fixture) Expire() { f.lease.expired.Store(true) }

// ExpireAfter has the Lease of a loop that is started later expire while the response to the first request that match accepts
// is on its way.
func (f *Fixture) ExpireAfter(match func(*http.Request) bool) {
	f.Helper()
	config := rest.CopyConfig(f.ControlPlane.Config())
	if f.Requests != nil {
		config = rest.CopyConfig(f.Requests)
	}
	expire := sync.OnceFunc(f.Expire)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return suspending{next, match, expire} })
	var err error
	f.API, err = kubernetes.NewForConfig(config)
	f.Must(err)
	f.Requests = config
}

// suspending calls expire before it returns the response to a request that match accepts.
type suspending struct {
	http.RoundTripper
	match  func(*http.Request) bool
	expire func()
}

// RoundTrip sends r.
func (s suspending) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := s.RoundTripper.RoundTrip(r)
	if s.match(r) {
		s.expire()
	}
	return response, err
}

// Refuses checks that the loop, whose Lease expires, does not call method a further time, and ends its term.
func (f *Fixture) Refuses(method string) {
	f.Helper()
	calls := f.Plugin.Count(method)
	kubetest.Eventually(f, "the loop asks whether it may call "+method, func(context.Context) error {
		if !f.lease.refused.Load() && f.Plugin.Count(method) == calls {
			return errors.New("it has not")
		}
		return nil
	})
	_ = f.Stop(election.ErrLost)
	f.Calls(method, calls)
}

// expired checks that a loop whose Lease has expired calls nothing, and that the next leader does.
func (s Subject) expired(t *testing.T) {
	f := s.prepare(t)
	s.start(f)
	f.Expire()
	s.Work(f, "a")
	f.Refuses(s.Method)
	f.Calls(s.Method, 0)
	s.start(f)
	s.done(f, "a")
	f.Calls(s.Method, 1)
}
