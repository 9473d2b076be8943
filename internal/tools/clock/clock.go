// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package clock compares the local clock with that of the API server.
package clock

import (
	"net/http"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"
)

// Unknown is the skew to a server whose responses have no Date.
const Unknown = time.Duration(-1 << 62)

// Skew returns how far the local clock is ahead of date, which the server wrote between before
// and after. A Date has whole seconds; Skew returns 0 if the clocks may agree.
func Skew(date string, before, after time.Time) time.Duration {
	server, err := http.ParseTime(date)
	if err != nil {
		return Unknown
	}
	switch {
	case before.After(server.Add(time.Second)):
		return before.Sub(server.Add(time.Second))
	case after.Before(server):
		return after.Sub(server)
	}
	return 0
}

// Clock tells the time of the API server, or the local time before the first response.
type Clock struct {
	skew    atomic.Int64
	isKnown atomic.Bool
}

// Observe returns a transport of the API server whose responses set c.
func (c *Clock) Observe(next http.RoundTripper) http.RoundTripper { return observer{c, next} }

// Now returns the time of the API server.
func (c *Clock) Now() time.Time { return time.Now().Add(-time.Duration(c.skew.Load())) }

// Skew returns how far the local clock is ahead of that of the API server; [Unknown] before the first response with a Date.
func (c *Clock) Skew() time.Duration {
	if !c.isKnown.Load() {
		return Unknown
	}
	return time.Duration(c.skew.Load())
}

type observer struct {
	clock *Clock
	next  http.RoundTripper
}

func (o observer) RoundTrip(r *http.Request) (*http.Response, error) {
	before := time.Now()
	response, err := o.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if skew := Skew(response.Header.Get("Date"), before, time.Now()); skew != Unknown {
		o.clock.skew.Store(int64(skew))
		o.clock.isKnown.Store(true)
	}
	return response, nil
}

// IsHeld reports whether lease has a holder and has not expired at now, a time of a [Clock].
func IsHeld(lease *coordinationv1.Lease, now time.Time) bool {
	s := lease.Spec
	if ptr.Deref(s.HolderIdentity, "") == "" || s.RenewTime == nil {
		return false
	}
	const precision = 2 * time.Second // the clocks are compared to a second
	return now.Before(s.RenewTime.Add(time.Duration(ptr.Deref(s.LeaseDurationSeconds, 15))*time.Second + precision))
}
