package csitest

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Step is how a call is answered. do makes the plugin do what it would do.
type Step func(ctx context.Context, p *Plugin, request any, do func() (any, error)) (any, error)

// releasedKey is that of the channel in the context of a call that Release closes.
type releasedKey struct{}

// Hang never answers, until the client gives up or [Plugin.Release]; then the
// call is done, as one that took too long would be.
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

// Fail answers with an error and does nothing.
func Fail(code codes.Code, message string) Step {
	return func(context.Context, *Plugin, any, func() (any, error)) (any, error) {
		return nil, status.Error(code, message)
	}
}

// DoAndFail does what was asked for and answers with an error all the same.
func DoAndFail(code codes.Code, message string) Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		if _, err := do(); err != nil {
			return nil, err
		}
		return nil, status.Error(code, message)
	}
}

// DoAndHang does what was asked for and never answers.
func DoAndHang() Step {
	return func(ctx context.Context, p *Plugin, request any, do func() (any, error)) (any, error) {
		response, err := do()
		if err != nil {
			return nil, err
		}
		return Hang()(ctx, p, request, func() (any, error) { return response, nil })
	}
}

// Delay waits before it does what was asked for.
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

// Drop closes the connection instead of an answer, as a driver that is killed
// does, and serves again.
func Drop() Step {
	return func(context.Context, *Plugin, any, func() (any, error)) (any, error) { return nil, errDropped }
}

// DoAndDrop does what was asked for and closes the connection instead of an answer.
func DoAndDrop() Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		if _, err := do(); err != nil {
			return nil, err
		}
		return nil, errDropped
	}
}

// Alter does what was asked for and changes the answer. T is the type of the
// response, such as *csi.CreateVolumeResponse.
func Alter[T any](change func(T)) Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) {
		response, err := do()
		if r, ok := response.(T); ok && err == nil {
			change(r)
		}
		return response, err
	}
}

// Default does what was asked for: a place holder between other steps.
func Default() Step {
	return func(_ context.Context, _ *Plugin, _ any, do func() (any, error)) (any, error) { return do() }
}

// script is what was said about calls to come, by method.
type script struct {
	next   map[string][]Step
	always map[string]Step
}

// Next says how the next calls of a method are answered, one step each.
func (p *Plugin) Next(method string, steps ...Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script.next[method] = append(p.script.next[method], steps...)
}

// Always says how all calls of a method are answered for which Next says
// nothing; nil ends that.
func (p *Plugin) Always(method string, step Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script.always[method] = step
}

// Release has all hanging calls go on.
func (p *Plugin) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.release)
	p.release = make(chan struct{})
}

// play answers a call by the script.
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
