// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
)

// Call describes a call of the plugin.
type Call struct {
	Method   string // without the service, such as CreateVolume
	Request  proto.Message
	Response proto.Message // nil while running, and after an error
	Err      error
	Began    time.Time
	Ended    time.Time // zero while running
	Socket   string    // that received the call; see [Plugin.ListenOn]
}

// callRecord holds the calls of a plugin and counts them by method. It may be used by many goroutines.
type callRecord struct {
	mu         sync.Mutex
	discard    bool // keep the counts only
	calls      []*Call
	counts     map[string]int // begun
	running    map[string]int
	maxRunning map[string]int // running at the same time
	changed    chan struct{}  // closed at each change
}

// short returns the method without package and service.
func short(full string) string { return full[strings.LastIndexByte(full, '/')+1:] }

func newCallRecord(discard bool) *callRecord {
	return &callRecord{
		discard: discard, counts: map[string]int{}, running: map[string]int{}, maxRunning: map[string]int{}, changed: make(chan struct{}),
	}
}

func (r *callRecord) begin(method, socket string, request proto.Message) *Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	call := &Call{Method: method, Request: request, Began: time.Now(), Socket: socket}
	if !r.discard {
		r.calls = append(r.calls, call)
	}
	r.counts[method]++
	r.running[method]++
	r.maxRunning[method] = max(r.maxRunning[method], r.running[method])
	r.notify()
	return call
}

func (r *callRecord) end(call *Call, response any, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m, ok := response.(proto.Message); ok && err == nil {
		call.Response = m
	}
	call.Err, call.Ended = err, time.Now()
	r.running[call.Method]--
	r.notify()
}

// notify wakes waiters. It must be called with mu held.
func (r *callRecord) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Calls returns the calls of these methods in the order of their start. Without methods, it returns
// all calls except those for identity and capabilities.
func (r *callRecord) Calls(methods ...string) []Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	var calls []Call
	for _, c := range r.calls {
		wanted := len(methods) == 0 && !identity[c.Method]
		for _, m := range methods {
			wanted = wanted || m == c.Method
		}
		if wanted {
			calls = append(calls, *c)
		}
	}
	return calls
}

// Count returns the number of calls of a method, including running ones.
func (r *callRecord) Count(method string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts[method]
}

// MaxConcurrent returns the largest number of concurrent calls of a method.
func (r *callRecord) MaxConcurrent(method string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.maxRunning[method]
}

// Wait waits until n calls of a method have started.
func (r *callRecord) Wait(ctx context.Context, method string, n int) error {
	return r.wait(ctx, fmt.Sprintf("%d calls of %s", n, method), func() bool { return r.counts[method] >= n })
}

// WaitIdle waits until no call is running.
func (r *callRecord) WaitIdle(ctx context.Context) error {
	return r.wait(ctx, "no running call", func() bool {
		for _, n := range r.running {
			if n > 0 {
				return false
			}
		}
		return true
	})
}

func (r *callRecord) wait(ctx context.Context, what string, done func() bool) error {
	for {
		r.mu.Lock()
		ok, changed := done(), r.changed
		counts := fmt.Sprint(r.counts)
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s; there were %s: %w", what, counts, context.Cause(ctx))
		}
	}
}
