package csitest

import (
	"context"
	"fmt"
	"strings"
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

// record holds the calls, and their numbers by method.
type record struct {
	calls      []*Call
	counts     map[string]int // begun
	running    map[string]int
	maxRunning map[string]int // running at the same time
	changed    chan struct{}  // closed at each change
}

// short returns the method without package and service.
func short(full string) string { return full[strings.LastIndexByte(full, '/')+1:] }

// begin records a call. released is closed by the next Release.
func (p *Plugin) begin(method, socket string, request proto.Message) (call *Call, released <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	call = &Call{Method: method, Request: request, Began: time.Now(), Socket: socket}
	if !p.cfg.DiscardCalls {
		p.record.calls = append(p.record.calls, call)
	}
	p.record.counts[method]++
	p.record.running[method]++
	p.record.maxRunning[method] = max(p.record.maxRunning[method], p.record.running[method])
	p.notify()
	return call, p.release
}

func (p *Plugin) end(call *Call, response any, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m, ok := response.(proto.Message); ok && err == nil {
		call.Response = m
	}
	call.Err, call.Ended = err, time.Now()
	p.record.running[call.Method]--
	p.notify()
}

// notify wakes waiters. It must be called with mu held.
func (p *Plugin) notify() {
	close(p.record.changed)
	p.record.changed = make(chan struct{})
}

// Calls returns the calls of these methods in the order of their start. Without methods, it returns
// all calls except those for identity and capabilities.
func (p *Plugin) Calls(methods ...string) []Call {
	p.mu.Lock()
	defer p.mu.Unlock()
	var calls []Call
	for _, c := range p.record.calls {
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
func (p *Plugin) Count(method string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record.counts[method]
}

// MaxConcurrent returns the largest number of concurrent calls of a method.
func (p *Plugin) MaxConcurrent(method string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record.maxRunning[method]
}

// Wait waits until n calls of a method have started.
func (p *Plugin) Wait(ctx context.Context, method string, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d calls of %s", n, method), func() bool { return p.record.counts[method] >= n })
}

// WaitIdle waits until no call is running.
func (p *Plugin) WaitIdle(ctx context.Context) error {
	return p.wait(ctx, "no running call", func() bool {
		for _, n := range p.record.running {
			if n > 0 {
				return false
			}
		}
		return true
	})
}

func (p *Plugin) wait(ctx context.Context, what string, done func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := done(), p.record.changed
		counts := fmt.Sprint(p.record.counts)
		p.mu.Unlock()
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
