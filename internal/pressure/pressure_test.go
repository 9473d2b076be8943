// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package pressure

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
)

const method = "CreateVolume"

// limitedGate returns a gate with a limit of one call, which stays.
func limitedGate() (*Gate, context.Context) {
	g := New(klog.Background(), prometheus.NewRegistry(), 1)
	return g, WithGate(context.Background(), g)
}

// blocked returns an error unless another attempt has to wait.
func blocked(t *testing.T, ctx context.Context, want bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	other, end := Attempt(ctx, ctx)
	defer end()
	err := Enter(other, method, "other")
	if got := errors.Is(err, context.DeadlineExceeded); got != want {
		t.Errorf("another attempt is blocked: %t, want %t (%v)", got, want, err)
	}
}

// TestEnter: who holds the only permit, and until when.
func TestEnter(t *testing.T) {
	answered := func(ctx context.Context, err error) error {
		return Intercept(ctx, "/csi.v1.Controller/"+method, nil, nil, nil,
			func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return err })
	}
	for name, test := range map[string]struct {
		attempt func(t *testing.T, ctx context.Context)
		blocks  bool // until the end of the attempt
	}{
		"before the call": {func(t *testing.T, ctx context.Context) {
			for range 2 { // an attempt that decides again keeps its permit
				if err := Enter(ctx, method, "a"); err != nil {
					t.Error(err)
				}
			}
		}, true},
		"after the call": {func(_ *testing.T, ctx context.Context) { _, _ = Enter(ctx, method, "a"), answered(ctx, nil) }, false},
		"after a failed call": {func(_ *testing.T, ctx context.Context) {
			_, _ = Enter(ctx, method, "a"), answered(ctx, status.Error(codes.Unavailable, "down"))
		}, false},
		"before another method": {func(_ *testing.T, ctx context.Context) {
			_, _ = Enter(ctx, method, "a"), Enter(ctx, "DeleteVolume", "a")
		}, false},
		"call of another method": {func(_ *testing.T, ctx context.Context) {
			_ = Enter(ctx, method, "a")
			_ = Intercept(ctx, "/csi.v1.Controller/DeleteVolume", nil, nil, nil,
				func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil })
		}, true},
		"panic in the call": {func(_ *testing.T, ctx context.Context) {
			defer func() { _ = recover() }()
			_ = Enter(ctx, method, "a")
			_ = Intercept(ctx, "/csi.v1.Controller/"+method, nil, nil, nil,
				func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { panic("driver") })
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := limitedGate()
				attempt, end := Attempt(ctx, ctx)
				test.attempt(t, attempt)
				blocked(t, ctx, test.blocks)
				end()
				blocked(t, ctx, false)
			})
		})
	}
}

// TestSecondCall: after its first call, an attempt does not wait, and others wait for both.
func TestSecondCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := limitedGate()
		attempt, end := Attempt(ctx, ctx)
		defer end()
		answer := func() {
			_ = Intercept(attempt, "/csi.v1.Controller/"+method, nil, nil, nil,
				func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil })
		}
		if err := Enter(attempt, method, "a"); err != nil {
			t.Fatal(err)
		}
		answer()
		other, endOther := Attempt(ctx, ctx)
		if err := Enter(other, method, "a"); err != nil {
			t.Fatal(err)
		}
		if err := Enter(attempt, method, "a"); err != nil {
			t.Errorf("a second call waits: %v", err)
		}
		endOther()
		blocked(t, ctx, true)
		answer()
		blocked(t, ctx, false)
	})
}

// TestWait: an attempt that has waited decides again, and groups take turns.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, ctx := limitedGate()
		first, end := Attempt(ctx, ctx)
		if err := Enter(first, method, "a"); err != nil {
			t.Fatal(err)
		}
		var order []string
		for _, group := range []string{"a", "a", "b", "a", "c", "b"} {
			go func() {
				attempt, end := Attempt(ctx, ctx)
				defer end()
				if err := Enter(attempt, method, group); !errors.Is(err, election.ErrOldRead) {
					t.Errorf("after waiting: %v", err)
				}
				if err := Enter(attempt, method, group); err != nil {
					t.Errorf("the permit is not kept: %v", err)
				}
				order = append(order, group)
			}()
			synctest.Wait()
		}
		canceled, cancel := context.WithCancelCause(ctx)
		go func() {
			attempt, end := Attempt(canceled, canceled)
			defer end()
			err := Enter(attempt, method, "d")
			if !errors.Is(err, election.ErrLost) || !strings.Contains(err.Error(), method) {
				t.Errorf("after the end of the term: %v", err)
			}
		}()
		synctest.Wait()
		limits := g.Limits()
		if len(limits) != 1 || limits[0].Running != 1 || limits[0].Waiting != 7 || limits[0].Reason == "" {
			t.Errorf("limits %+v", limits)
		}
		if n := testutil.ToFloat64(g.waiting.WithLabelValues(method)); n != 7 {
			t.Errorf("metric of waiting calls: %v", n)
		}
		cancel(election.ErrLost)
		synctest.Wait()
		end()
		synctest.Wait()
		if want := []string{"a", "b", "c", "a", "b", "a"}; !slices.Equal(order, want) {
			t.Errorf("order %v, want %v", order, want)
		}
		if n := testutil.ToFloat64(g.waiting.WithLabelValues(method)); n != 0 {
			t.Errorf("metric of waiting calls at the end: %v", n)
		}
	})
}

// TestIsOverload: the errors of drivers that have too many calls.
func TestIsOverload(t *testing.T) {
	for text, want := range map[error]bool{
		status.Error(codes.DeadlineExceeded, "context deadline exceeded"):                    true,
		status.Error(codes.Internal, "RequestLimitExceeded: Request limit exceeded."):        true,
		status.Error(codes.Internal, "StatusCode=429 -- TooManyRequests"):                    true,
		status.Error(codes.Aborted, "An operation with the given volume key already exists"): false,
		status.Error(codes.Aborted, "throttled by client-side rate limiter"):                 true,
		status.Error(codes.Unavailable, "error reading from server: EOF"):                    false,
		status.Error(codes.Unavailable, "throttling: rate exceeded"):                         true,
		status.Error(codes.InvalidArgument, "no such type"):                                  false,
		errors.New("no gRPC status"):                                                         false,
	} {
		if got := isOverload(text); got != want {
			t.Errorf("%v: %t", text, got)
		}
	}
}
