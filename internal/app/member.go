// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
)

// startRetry is the back-off after which a disabled role is started again.
var startRetry = wait.Backoff{Duration: 5 * time.Second, Factor: 2, Jitter: 0.1, Cap: 5 * time.Minute, Steps: 100}

// member is a role of the process. A role that the user has named must work. Any other role is disabled
// while it fails, with a reason for users, and started again with back-off.
type member struct {
	name  string
	named bool
	// leased reports that the role works only while this process holds a Lease, which it may give back.
	leased      bool
	callsDriver bool
	build       func(context.Context) (controller, error)

	controller controller    // set before built is closed
	failure    error         // of the first attempt to build the controller
	built      chan struct{} // closed when controller is set
	synced     chan struct{} // closed when its caches are synced, too
	settled    chan struct{} // closed when its caches are synced, or when it is disabled for the first time
	settle     func()

	mu      sync.Mutex
	reasons [2]string // why the role is disabled, by activity; "" when the activity does not fail
}

// activity is one of the two tasks of a role. One may fail while the other works.
type activity int

const (
	working  activity = iota // starting, and running the controller while the Lease is held
	handling                 // serving requests on every replica
)

func newMember(name string, named bool, build func(context.Context) (controller, error)) *member {
	m := &member{name: name, named: named, build: build, built: make(chan struct{}), synced: make(chan struct{}),
		settled: make(chan struct{})}
	m.settle = sync.OnceFunc(func() { close(m.settled) })
	return m
}

// buildController builds the controller.
func (m *member) buildController(ctx context.Context) (err error) {
	if m.controller, err = m.build(ctx); err == nil {
		close(m.built)
	}
	return err
}

// waiter returns the controller as a [waiter]. A controller that is not built yet is none: its role is disabled.
func (m *member) waiter() (waiter, bool) {
	select {
	case <-m.built:
		w, ok := m.controller.(waiter)
		return w, ok
	default:
		return nil, false
	}
}

// disabled returns why m is disabled, or "".
func (m *member) disabled() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(slices.DeleteFunc(slices.Clone(m.reasons[:]), func(r string) bool { return r == "" }), "; ")
}

// setDisabled sets the reason for which an activity of m fails, "" if it does not, and returns the previous reason.
func (m *member) setDisabled(a activity, reason string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.reasons[a]
	m.reasons[a] = reason
	return before
}

// retry calls try with back-off until it succeeds or ctx ends. err is the error of the first attempt. Two errors are
// returned instead: [election.ErrLost] of a role with a Lease, so that its term ends, and any other error of a named role.
func (m *member) retry(ctx context.Context, a activity, backoff wait.Backoff, err error, try func(context.Context) error) error {
	log, initial := klog.FromContext(ctx), backoff
	for err != nil && ctx.Err() == nil {
		if lost := errors.Is(err, election.ErrLost); lost && m.leased || m.named && !lost {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		delay := backoff.Step()
		if reason := oneLine(err); m.setDisabled(a, reason) != reason {
			log.Info("Role disabled", "role", m.name, "reason", reason, "retryAfter", delay.Round(time.Second).String())
		}
		m.settle()
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
		begin := time.Now()
		if err = try(ctx); time.Since(begin) > initial.Cap {
			backoff = initial
		}
	}
	return nil
}

// enable records that an activity of m does not fail any more.
func (m *member) enable(ctx context.Context, a activity) {
	if m.setDisabled(a, "") != "" {
		klog.FromContext(ctx).Info("Role enabled", "role", m.name)
	}
}

// run runs the controller for a term, once it is built and its caches are synced.
func (m *member) run(ctx context.Context, backoff wait.Backoff) error {
	select {
	case <-ctx.Done():
		return nil
	case <-m.synced:
	}
	log := klog.FromContext(ctx).WithName(m.name)
	ctx = klog.NewContext(ctx, log)
	try := func(ctx context.Context) error {
		m.enable(ctx, working)
		log.Info("Starting controller")
		defer func() { log.Info("Stopped controller", "cause", context.Cause(ctx)) }()
		return m.controller.Run(ctx)
	}
	return m.retry(ctx, working, backoff, try(ctx), try)
}

// serve serves requests until ctx ends, if the controller is a [server].
func (m *member) serve(ctx context.Context, backoff wait.Backoff) error {
	select {
	case <-ctx.Done():
		return nil
	case <-m.built:
	}
	s, ok := m.controller.(server)
	if !ok {
		return nil
	}
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName(m.name))
	try := func(ctx context.Context) error {
		m.enable(ctx, handling)
		return s.Serve(ctx)
	}
	return m.retry(ctx, handling, backoff, try(ctx), try)
}
