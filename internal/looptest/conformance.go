// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package looptest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Subject describes a loop to [Conformance].
type Subject struct {
	Plugin csitest.Config
	// Build returns the loop. It must use driver for its CSI calls, bound each of them by
	// timeout, and retry within a second.
	Build func(f *Fixture, p Process, driver csi.ControllerClient, timeout time.Duration) (Loop, error)
	// Setup creates what all work needs; nil if that is nothing.
	Setup func(f *Fixture)
	// Method is the CSI method that the loop calls once for each object of Work.
	Method string
	// Work creates an object for which the loop calls Method.
	Work func(f *Fixture, name string)
	// Result returns the object to which the loop has written the outcome of that call, or an
	// error while it has not.
	Result func(ctx context.Context, f *Fixture, name string) (metav1.Object, error)
}

// Conformance checks that a loop starts, stops and drains, that it repeats a call which
// lost its Lease, that it survives a panic, a cache that lags behind, and a restart.
func Conformance(t *testing.T, s Subject) {
	t.Run("stops_without_leaking_a_goroutine", s.leaks) // alone: it counts the goroutines of the process
	t.Run("starts_with_what_exists", func(t *testing.T) {
		f := s.prepare(t)
		s.Work(f, "before")
		s.start(f)
		s.done(f, "before")
		s.Work(f, "after")
		s.done(f, "after")
		if err := f.Stop(workloop.ErrDrain); !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("Run returned %v, want the cause of the end", err)
		}
		f.Calls(s.Method, 2)
	})
	t.Run("drain_finishes_a_running_call", s.drain)
	t.Run("drain_ends_with_the_timeout_of_a_call", func(t *testing.T) {
		f := s.prepare(t)
		f.Plugin.Always(s.Method, csitest.Hang())
		f.Start(s.build(f, 200*time.Millisecond))
		s.Work(f, "a")
		f.Wait(s.Method, 1)
		_ = f.Stop(workloop.ErrDrain) // returns although the driver never answers
	})
	t.Run("lease_lost_during_a_call", s.leaseLost)
	if !strings.HasPrefix(s.Method, "Get") { // such a call has no effect
		t.Run("lease_expired_before_a_call", s.expired)
	}
	t.Run("panic_costs_one_attempt", s.panics)
	t.Run("lagging_cache_causes_no_second_call", s.lags)
	t.Run("restart_changes_nothing_that_is_done", func(t *testing.T) {
		f := s.prepare(t)
		s.start(f)
		s.Work(f, "a")
		before := s.done(f, "a")
		f.Crash()
		s.start(f)
		s.Work(f, "b")
		s.done(f, "b")
		_ = f.Stop(workloop.ErrDrain)
		if after := s.done(f, "a"); after.GetUID() != before.GetUID() || after.GetResourceVersion() != before.GetResourceVersion() {
			t.Errorf("the restart wrote %s again: resourceVersion %s, was %s", after.GetName(), after.GetResourceVersion(),
				before.GetResourceVersion())
		}
	})
}

func (s Subject) prepare(t *testing.T) *Fixture {
	t.Helper()
	f := New(t, s.Plugin)
	if s.Setup != nil {
		s.Setup(f)
	}
	return f
}

func (s Subject) build(f *Fixture, timeout time.Duration) func(Process) (Loop, error) {
	return func(p Process) (Loop, error) { return s.Build(f, p, p.CSI.Controller(), timeout) }
}

func (s Subject) start(f *Fixture) {
	f.Helper()
	f.Start(s.build(f, time.Minute))
}

// done waits for the result of the work called name, and returns it.
func (s Subject) done(f *Fixture, name string) (result metav1.Object) {
	f.Helper()
	kubetest.Eventually(f, fmt.Sprintf("the outcome of %s for %q is in the API", s.Method, name), func(ctx context.Context) (err error) {
		result, err = s.Result(ctx, f, name)
		return err
	})
	return result
}

func (s Subject) leaks(t *testing.T) {
	f := newSerial(t, s.Plugin)
	if s.Setup != nil {
		s.Setup(f)
	}
	s.start(f) // the first start opens connections to the API server that are kept
	f.Crash()
	before := goleak.IgnoreCurrent()
	s.start(f)
	s.Work(f, "a")
	s.done(f, "a")
	_ = f.Stop(workloop.ErrDrain)
	// Connections to the API server and the server side of the plugin belong to the test.
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
		goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*clientConnReadLoop).run"),
		goleak.IgnoreAnyFunction("net/http.(*conn).serve"), goleak.IgnoreAnyFunction("net/http.(*connReader).backgroundRead"))
}

func (s Subject) drain(t *testing.T) {
	f := s.prepare(t)
	s.start(f)
	f.Plugin.Next(s.Method, csitest.Hang())
	s.Work(f, "a")
	f.Wait(s.Method, 1)
	stopped := make(chan error, 1)
	go func() { stopped <- f.Stop(workloop.ErrDrain) }()
	f.Plugin.Release()
	if err := <-stopped; !errors.Is(err, workloop.ErrDrain) {
		t.Errorf("Run returned %v, want the cause of the end", err)
	}
	if _, err := s.Result(f.Context(), f, "a"); err != nil {
		t.Errorf("Run returned before the outcome of its last call was written: %v", err)
	}
	f.Calls(s.Method, 1)
}

func (s Subject) leaseLost(t *testing.T) {
	f := s.prepare(t)
	s.start(f)
	f.Plugin.Next(s.Method, csitest.DoAndHang())
	s.Work(f, "a")
	f.Wait(s.Method, 1)
	if err := f.Stop(election.ErrLost); !errors.Is(err, election.ErrLost) { // returns long before the timeout of the call
		t.Errorf("Run returned %v, want the cause of the end", err)
	}
	f.Must(f.Plugin.WaitIdle(f.Context()))
	s.start(f)
	s.done(f, "a")
	calls := f.Plugin.Calls(s.Method)
	if len(calls) != 2 || !proto.Equal(calls[0].Request, calls[1].Request) {
		t.Errorf("the next leader did not repeat the call with equal arguments: %v", calls)
	}
}

// panicking is a connection to a driver whose first call of method panics.
type panicking struct {
	grpc.ClientConnInterface
	method string
	once   chan struct{}
}

// Invoke panics once, and then calls the driver.
func (p panicking) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if method == "/csi.v1.Controller/"+p.method {
		select {
		case <-p.once:
			panic("a defect of the controller")
		default:
		}
	}
	return p.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

func (s Subject) panics(t *testing.T) {
	f := s.prepare(t)
	conn, err := grpc.NewClient("unix:"+f.Plugin.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	f.Must(err)
	t.Cleanup(func() { conn.Close() })
	driver := panicking{conn, s.Method, make(chan struct{}, 1)}
	driver.once <- struct{}{}
	f.Start(func(p Process) (Loop, error) { return s.Build(f, p, csi.NewControllerClient(driver), time.Minute) })
	s.Work(f, "a")
	s.Work(f, "b")
	s.done(f, "a")
	s.done(f, "b")
	if n := counter(t, f.Registry, "storage_controller_worker_panics_total"); n != 1 {
		t.Errorf("storage_controller_worker_panics_total is %v, want 1", n)
	}
}

// counter returns the sum of a counter over its labels.
func counter(t *testing.T, registry *prometheus.Registry, name string) (sum float64) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			for _, m := range family.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// watchDelay is how far the cache lags behind: longer than a sync takes.
const watchDelay = 500 * time.Millisecond

// slowWriter delays each write of a watch.
type slowWriter struct{ http.ResponseWriter }

// Write writes p after watchDelay.
func (w slowWriter) Write(p []byte) (int, error) {
	<-time.After(watchDelay)
	return w.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController flush the writer below.
func (w slowWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (s Subject) lags(t *testing.T) {
	f := s.prepare(t)
	f.Watch = kubetest.Proxy(t, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.URL.Query().Get("watch") != "" {
			w = slowWriter{w}
		}
		pass.ServeHTTP(w, r)
	})
	s.start(f)
	for n, name := range []string{"a", "b", "c"} {
		s.Work(f, name)
		s.done(f, name)
		f.Calls(s.Method, n+1)
	}
	_ = f.Stop(workloop.ErrDrain)
	f.Calls(s.Method, 3)
}
