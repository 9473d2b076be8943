package csitest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
)

// Call is one call of the plugin.
type Call struct {
	Method   string // without the service, such as CreateVolume
	Request  proto.Message
	Response proto.Message // nil while it runs, and after an error
	Err      error
	Began    time.Time
	Ended    time.Time // zero while it runs
	Socket   string    // at which it came in; see [Plugin.ListenOn]
}

// record is what is known of calls, by method.
type record struct {
	calls      []*Call
	counts     map[string]int // begun
	running    map[string]int
	maxRunning map[string]int // running at the same time
	changed    chan struct{}  // closed at each change
}

// short is the method without package and service.
func short(full string) string { return full[strings.LastIndexByte(full, '/')+1:] }

// begin records a call. released is closed by the next Release: one that comes after
// somebody has seen the call in the record.
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

// notify wakes those who wait for a change; the caller holds mu.
func (p *Plugin) notify() {
	close(p.record.changed)
	p.record.changed = make(chan struct{})
}

// Calls is the calls so far in the order of their beginning; of the named methods
// only, where some are named. Calls of the identity service and for
// capabilities are among them only when named.
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

// Count is how many calls of a method have begun.
func (p *Plugin) Count(method string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record.counts[method]
}

// MaxConcurrent is how many calls of a method have run at the same time at most.
func (p *Plugin) MaxConcurrent(method string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.record.maxRunning[method]
}

// Wait returns when n calls of a method have begun.
func (p *Plugin) Wait(ctx context.Context, method string, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d calls of %s", n, method), func() bool { return p.record.counts[method] >= n })
}

// WaitIdle returns when no call is running.
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
