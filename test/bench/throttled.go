// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// throttledRate is how many CreateVolume calls per second a throttling driver executes, and throttledTimeout the deadline of a call.
const (
	throttledRate    = 2
	throttledTimeout = 5 * time.Second
	// throttledLimit ends the measurement of a side.
	throttledLimit = 5 * time.Minute
)

// throttled is the result of both sides with a driver that throttles.
type throttled struct {
	Claims int         `json:"claims"`
	Sides  [2]creation `json:"sides"`
}

// creation is how the claims got their volumes.
type creation struct {
	Volumes  int     `json:"volumes"` // at the end of the measurement
	Seconds  float64 `json:"seconds"` // until the last of them
	TimedOut int     `json:"timedOut"`
	// LastTimedOut is when the last call timed out, in seconds; 0: none has.
	LastTimedOut float64 `json:"lastTimedOutSeconds"`
}

// measureThrottled measures both sides, each with a control plane of its own.
func measureThrottled(ctx context.Context, o options, sides [2]side, claims int) (*throttled, error) {
	t := &throttled{Claims: claims}
	for s, side := range sides {
		say("measuring %d claims of %s with a driver that throttles", claims, side.Versions)
		var err error
		t.Sides[s], err = measureCreated(ctx, o, side, claims)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", side.Name, err)
		}
	}
	return t, nil
}

// measureCreated measures one side.
func measureCreated(ctx context.Context, o options, s side, claims int) (c creation, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	o.nodes, o.foreign, o.phases = 1, 0, nil
	b, err := setUp(ctx, o, kubetest.Config{}, lifeOfVolumes...)
	if err != nil {
		return c, err
	}
	defer b.tearDown()
	if err := b.prepare(ctx); err != nil {
		return c, err
	}
	var commands sidecars
	for _, command := range s.Commands {
		commands = append(commands, fmt.Sprintf("%s --timeout=%v", command, throttledTimeout))
	}
	driver := &throttlingDriver{limiter: rate.NewLimiter(throttledRate, 1), want: claims, done: make(chan struct{}), began: time.Now()}
	b.plugin.Always("CreateVolume", driver.create)
	stop, err := b.start(ctx, commands)
	if err != nil {
		return c, err
	}
	defer stop()
	if err := b.claims(ctx, claims); err != nil {
		return c, err
	}
	select {
	case <-driver.done:
	case <-time.After(throttledLimit):
	case <-ctx.Done():
		return c, fmt.Errorf("%w%s", context.Cause(ctx), b.tails())
	}
	driver.mu.Lock()
	defer driver.mu.Unlock()
	return driver.created, nil
}

// throttlingDriver limits its calls on the client side, as drivers of clouds do: a call waits for its turn, or until its deadline.
type throttlingDriver struct {
	limiter *rate.Limiter
	want    int // volumes
	done    chan struct{}

	mu      sync.Mutex
	began   time.Time // of the first call
	created creation
}

// create implements [csitest.Step].
func (d *throttlingDriver) create(ctx context.Context, _ *csitest.Plugin, _ any, do func() (any, error)) (any, error) {
	d.mu.Lock()
	if d.created == (creation{}) {
		d.began = time.Now()
	}
	d.mu.Unlock()
	if d.limiter.Wait(ctx) != nil {
		<-ctx.Done()
		d.mu.Lock()
		defer d.mu.Unlock()
		d.created.TimedOut++
		d.created.LastTimedOut = time.Since(d.began).Seconds()
		return nil, status.Error(codes.DeadlineExceeded, "waiting for a token of the client-side rate limiter")
	}
	response, err := do()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.created.Volumes++
		d.created.Seconds = time.Since(d.began).Seconds()
		if d.created.Volumes == d.want {
			close(d.done)
		}
	}
	return response, err
}

// throttled renders how claims get volumes from a driver that throttles.
func (c *comparison) throttled() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d claims at once; the driver executes %d CreateVolume calls per second, and the others wait in it until their "+
		"deadline of %v (`--timeout`). Measured for at most %v:\n\n", c.Throttled.Claims, throttledRate, throttledTimeout, throttledLimit)
	b.WriteString(c.conditions())
	b.WriteString("| | volumes | within s | volumes/s | timed out calls | the last of them after s |\n|---|---|---|---|---|---|\n")
	for s, r := range c.Throttled.Sides {
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %d | %s |\n", c.Sides[s].Name, r.Volumes, number(r.Seconds),
			number(float64(r.Volumes)/max(r.Seconds, 1)), r.TimedOut, number(r.LastTimedOut))
	}
	return b.String()
}
