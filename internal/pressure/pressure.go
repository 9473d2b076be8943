// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package pressure limits how many calls of a method a driver gets at a time, while more of them do not complete sooner.
//
// A driver that throttles, or queues calls until their deadline, completes fewer calls the more it gets. As long as calls are not
// throttled, do not time out and do not slow down, there is no limit other than the workers. Otherwise [search] looks for the lowest
// limit with which the driver completes as many.
package pressure

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
)

// Gate holds the limits of a driver. Use [New].
type Gate struct {
	log            klog.Logger
	first          int // limit of a method before its first calls have ended; 0: none
	limit, waiting *prometheus.GaugeVec

	mu       sync.Mutex
	limiters map[string]*limiter // by method
}

// New returns a gate, and registers its metrics. first limits each method until its first calls have ended; 0 means no limit.
func New(log klog.Logger, reg prometheus.Registerer, first int) *Gate {
	g := &Gate{log: log, first: first, limiters: map[string]*limiter{},
		limit: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "storage_controller_csi_concurrency_limit",
			Help: "Calls of a CSI method that run at a time at most, because the driver seems to be overloaded; 0 for no such limit.",
		}, []string{"method_name"}),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "storage_controller_csi_waiting_calls",
			Help: "Calls of a CSI method that wait for its concurrency limit.",
		}, []string{"method_name"}),
	}
	reg.MustRegister(g.limit, g.waiting)
	return g
}

type gateKey struct{}

// WithGate returns a context for loops whose calls g limits. Without g, nothing is limited.
func WithGate(ctx context.Context, g *Gate) context.Context {
	return context.WithValue(ctx, gateKey{}, g)
}

// attempt is the attempt of a worker, which makes one call at a time.
type attempt struct {
	gate   *Gate
	until  context.Context // no wait outlasts it
	permit *permit         // nil: none
	called bool            // a call that had a permit has ended
}

type attemptKey struct{}

// Attempt returns the context of an attempt whose calls the gate of ctx limits. Call end after it. At the end of until, which may be before
// that of ctx, an attempt that waits fails, so that no call is started while the process shuts down.
func Attempt(ctx, until context.Context) (_ context.Context, end func()) {
	g, _ := ctx.Value(gateKey{}).(*Gate)
	if g == nil {
		return ctx, func() {}
	}
	a := &attempt{gate: g, until: until}
	return context.WithValue(ctx, attemptKey{}, a), a.drop
}

// drop ends a permit that was not used.
func (a *attempt) drop() {
	if a.permit != nil {
		a.permit.cancel()
		a.permit = nil
	}
}

// Enter waits until the driver may get the next call of method, such as CreateVolume. The call follows with a context of ctx. If it
// had to wait, Enter returns [election.ErrOldRead]: the caller reads and decides again in the same attempt, for which the place is
// kept. After its first call, an attempt does not wait: it may lose what it knows of that call when it decides again, and repeat it.
// group names what calls have in common whose trouble is not that of the driver, such as their StorageClass or node.
func Enter(ctx context.Context, method, group string) error {
	a, limited := ctx.Value(attemptKey{}).(*attempt)
	if !limited {
		return nil
	}
	l := a.gate.of(method)
	if a.permit != nil && a.permit.limiter == l {
		return nil
	}
	a.drop()
	if a.called {
		a.permit = l.exceed(group)
		return nil
	}
	p, waited, err := l.acquire(ctx, a.until, group)
	if err != nil {
		return err
	}
	a.permit = p
	if waited {
		return fmt.Errorf("%w: %s has waited for other calls", election.ErrOldRead, method)
	}
	return nil
}

// Intercept is an interceptor of the connection to the driver, which measures the calls that have entered.
func Intercept(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	a, limited := ctx.Value(attemptKey{}).(*attempt)
	if !limited || a.permit == nil || !strings.HasSuffix(method, "/"+a.permit.limiter.method) {
		return invoke(ctx, method, request, response, conn, opts...)
	}
	began := time.Now()
	var budget time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		budget = deadline.Sub(began)
	}
	err := invoke(ctx, method, request, response, conn, opts...)
	a.permit.end(time.Since(began), budget, err) // after a panic, the end of the attempt cancels it
	a.permit, a.called = nil, true
	return err
}

// of returns the limiter of method.
func (g *Gate) of(method string) *limiter {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.limiters[method]
	if l == nil {
		l = &limiter{
			method: method, changed: g.changed, search: newSearch(), served: map[string]int{},
			limit: g.first, since: time.Now(), reason: "no call has ended yet",
		}
		g.limiters[method] = l
	}
	return l
}

// changed reports a change of l, whose limit was before.
func (g *Gate) changed(l *limiter, before int) {
	g.limit.WithLabelValues(l.method).Set(float64(l.limit))
	g.waiting.WithLabelValues(l.method).Set(float64(len(l.waiting)))
	switch {
	case before == 0 && l.limit > 0:
		g.log.Info("Limiting the calls of the driver that run at a time", "method", l.method, "limit", l.limit, "reason", l.reason)
	case before > 0 && l.limit == 0:
		g.log.Info("No longer limiting the calls of the driver", "method", l.method, "for", time.Since(l.since).Round(time.Second))
	case before != l.limit:
		g.log.V(2).Info("Changed the limit of calls of the driver", "method", l.method, "before", before, "limit", l.limit,
			"reason", l.reason)
	}
}

// Limit describes a limit for /statusz.
type Limit struct {
	Method  string    `json:"method"`
	Limit   int       `json:"limit"` // calls at a time
	Running int       `json:"running"`
	Waiting int       `json:"waiting"`
	Since   time.Time `json:"since"`
	Reason  string    `json:"reason"` // of the last step down
}

// Limits returns the present limits, sorted by method.
func (g *Gate) Limits() []Limit {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	limiters := slices.SortedFunc(maps.Values(g.limiters), func(a, b *limiter) int { return cmp.Compare(a.method, b.method) })
	g.mu.Unlock()
	var all []Limit
	for _, l := range limiters {
		l.mu.Lock()
		if l.limit > 0 {
			all = append(all, Limit{l.method, l.limit, l.running, len(l.waiting), l.since, l.reason})
		}
		l.mu.Unlock()
	}
	return all
}
