// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrOldRead is returned by [MayCallNow] if the decision to call is based on a read that is too old. Read and decide again.
var ErrOldRead = errors.New("the state that was read from the API server is too old")

// maxReadAge is the age of a live read from which nothing is decided that cannot be undone. It is much longer than a read usually
// takes, and much shorter than a Lease.
const maxReadAge = 5 * time.Second

// Moment is a point in time. The zero Moment is none.
type Moment struct{ at time.Time }

// Now returns the current Moment. Take that of a read before its request is sent: the response may wait in a suspended process.
func Now() Moment { return Moment{time.Now()} }

// IsZero reports whether m is none.
func (m Moment) IsZero() bool { return m.at.IsZero() }

// age returns the time since m: the larger difference of the wall clock and the monotonic clock. The monotonic clock stops while
// the machine is suspended, and the wall clock may be set back.
func (m Moment) age() time.Duration {
	now := time.Now()
	return max(now.Sub(m.at), now.Round(0).Sub(m.at.Round(0)))
}

// Lease is the Lease of a term.
type Lease struct {
	// Lost ends with [ErrLost] when the Lease is lost, even after the end of the term.
	Lost context.Context
	// Held returns nil if the Lease has not expired by the clock, else [ErrLost].
	Held func() error
}

// leaseKey is the context key of a [Lease].
type leaseKey struct{}

// WithLease returns the context of a term with this Lease.
func WithLease(term context.Context, lease Lease) context.Context {
	return context.WithValue(term, leaseKey{}, lease)
}

// Held returns [Lease.Lost] of the context of a [Lead]. For any other context, the result never ends.
func Held(term context.Context) context.Context {
	if lease, ok := term.Value(leaseKey{}).(Lease); ok {
		return lease.Lost
	}
	return context.Background()
}

// MayCallNow returns nil if this process holds its Lease now, and read is zero or recent. Otherwise it returns [ErrLost] or
// [ErrOldRead]. Call it directly before a call with effects, after everything that waits: a process may be suspended at any
// statement, and another replica leads when it continues. read is the Moment of the live read on which the decision is based; it
// is required if the call cannot be undone. Without leader election only its age counts.
func MayCallNow(ctx context.Context, read Moment) error {
	if lease, ok := ctx.Value(leaseKey{}).(Lease); ok {
		if lease.Lost.Err() != nil {
			return context.Cause(lease.Lost)
		}
		if err := lease.Held(); err != nil {
			return err
		}
	}
	if age := read.age(); !read.IsZero() && age > maxReadAge {
		return fmt.Errorf("%w: %v, more than %v", ErrOldRead, age.Round(time.Millisecond), maxReadAge)
	}
	return nil
}

// MayCall is [MayCallNow] for a call that can be undone or repeated, and so needs no recent read.
func MayCall(ctx context.Context) error { return MayCallNow(ctx, Moment{}) }

// maxRereads is the number of repetitions of [Reread].
const maxRereads = 3

// Reread calls f, and again while it fails with [ErrOldRead], at most three times: f reads and decides again.
func Reread(f func() error) error {
	err := f()
	for i := 0; i < maxRereads && errors.Is(err, ErrOldRead); i++ {
		err = f()
	}
	return err
}
