// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csitest

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Step answers a call. do runs the handler of the plugin.
type Step func(ctx context.Context, p *Plugin, request any, do func() (any, error)) (any, error)

// releasedKey is the context key of the channel that Release closes.
type releasedKey struct{}

// Hang does not answer until the client cancels the call. After [Plugin.Release], the handler runs, as
// in a call that took too long.
func Hang() Step {
	return func(ctx context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		released, _ := ctx.Value(releasedKey{}).(<-chan struct{})
		select {
		case <-released:
			return do()
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// Fail returns an error without running the handler.
func Fail(code codes.Code, message string) Step {
	return func(context.Context, *Plugin, any, func() (any, error)) (any, error) {
		return nil, status.Error(code, message)
	}
}

// DoAndFail runs the handler and returns an error.
func DoAndFail(code codes.Code, message string) Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		if _, err := do(); err != nil {
			return nil, err
		}
		return nil, status.Error(code, message)
	}
}

// DoAndHang runs the handler and hangs like [Hang].
func DoAndHang() Step {
	return func(ctx context.Context, p *Plugin, request any, do func() (any, error)) (any, error) {
		response, err := do()
		if err != nil {
			return nil, err
		}
		return Hang()(ctx, p, request, func() (any, error) { return response, nil })
	}
}

// Delay runs the handler after d.
func Delay(d time.Duration) Step {
	return func(ctx context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		select {
		case <-time.After(d):
			return do()
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// Drop closes the connection instead of a response, like a driver that is killed and restarted.
func Drop() Step {
	return func(context.Context, *Plugin, any, func() (any, error)) (any, error) { return nil, errDropped }
}

// DoAndDrop runs the handler and closes the connection instead of a response.
func DoAndDrop() Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		if _, err := do(); err != nil {
			return nil, err
		}
		return nil, errDropped
	}
}

// Alter runs the handler and changes the response of type T, such as *csi.CreateVolumeResponse.
func Alter[T any](change func(T)) Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		response, err := do()
		if r, ok := response.(T); ok && err == nil {
			change(r)
		}
		return response, err
	}
}

// Default runs the handler.
func Default() Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) { return do() }
}

// script holds the steps for the next calls and for all others, by method.
type script struct {
	next   map[string][]Step
	always map[string]Step
}

// Next answers the next calls of a method with steps, one each.
func (p *Plugin) Next(method string, steps ...Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script.next[method] = append(p.script.next[method], steps...)
}

// Always answers all calls of a method with step that have no step of [Plugin.Next]. Nil removes it.
func (p *Plugin) Always(method string, step Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script.always[method] = step
}

// Release continues all hanging calls.
func (p *Plugin) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.release)
	p.release = make(chan struct{})
}

// released returns a channel that the next Release closes.
func (p *Plugin) released() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.release
}

// play answers a call as scripted.
func (p *Plugin) play(ctx context.Context, method string, request any, latency time.Duration, handler grpc.UnaryHandler) (any, error) {
	if latency > 0 {
		select {
		case <-time.After(latency):
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	p.mu.Lock()
	step := p.script.always[method]
	if next := p.script.next[method]; len(next) > 0 {
		step, p.script.next[method] = next[0], next[1:]
	}
	p.mu.Unlock()
	do := func() (any, error) { return handler(ctx, request) }
	if step == nil {
		return do()
	}
	return step(ctx, p, request, do)
}
