package app

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// replica is a controller that serves on every replica.
type replica struct {
	serve func(context.Context) error
	run   func(context.Context) error
}

func (r replica) Serve(ctx context.Context) error { return r.serve(ctx) }
func (r replica) Run(ctx context.Context) error   { return r.run(ctx) }

// TestServingEndsBesideTheWork has both hear of the end at once, and the Lease released after both.
func TestServingEndsBesideTheWork(t *testing.T) {
	var ended atomic.Int32
	begun, told := make(chan struct{}), make(chan struct{})
	r := replica{
		serve: func(ctx context.Context) error {
			<-ctx.Done()
			close(told)
			ended.Add(1)
			return nil
		},
		run: func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			<-told // which would hang if serving waited for the work
			ended.Add(1)
			return nil
		},
	}
	ctx, drain := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- terms1(true, r).run(ctx) }()
	<-begun
	drain(workloop.ErrDrain)
	if err := <-done; err != nil || ended.Load() != 2 {
		t.Errorf("%v, %d of 2 have ended", err, ended.Load())
	}
}

// TestLeaseOutlivesServing has the work end long before the last request is answered.
func TestLeaseOutlivesServing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := terms1(true, replica{run: func(ctx context.Context) error { <-ctx.Done(); return nil }}).entries[0]
		close(e.members[0].synced)
		e.serving.Add(1)
		ctx, drain := context.WithCancelCause(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.lead(ctx) }()
		drain(workloop.ErrDrain)
		synctest.Wait()
		if len(done) > 0 {
			t.Error("the term ended before serving did")
		}
		e.serving.Done()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestServingThatFailsEndsTheProcess(t *testing.T) {
	broken := errors.New("the port is taken")
	r := replica{
		serve: func(context.Context) error { return broken },
		run:   func(ctx context.Context) error { <-ctx.Done(); return nil },
	}
	if err := terms1(true, r).run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// terms1 returns the terms of one controller, without watches and leader election.
func terms1(named bool, c controller) *terms {
	t := &terms{informers: kube.NewInformers(nil, nil, "a.b"), limit: time.Minute, retry: startRetry}
	m := newMember("x", named, nil)
	m.controller = c
	close(m.built)
	t.add("", m)
	return t
}
