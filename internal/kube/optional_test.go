// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

// TestOptional interrupts a watch after a minute, and lets requests fail.
func TestOptional(t *testing.T) {
	nodes := corev1.SchemeGroupVersion.WithResource("nodes")
	forbidden := apierrors.NewForbidden(nodes.GroupResource(), "", nil)
	notFound := apierrors.NewNotFound(nodes.GroupResource(), "")
	broken := apierrors.NewInternalError(errors.New("the conversion webhook failed"))
	for name, tt := range map[string]struct {
		err       error  // of lists and watches
		from, end int    // of the failures, in seconds; zero: at once and for good
		first     int32  // requests that succeed
		list      bool   // lists succeed
		want      string // whether the watch is open after 30 s, 90 s and 5 min
		runs      int    // of the work
		calls     int    // of the handlers, for the only object
		lines     int    // of the log, at most
		why       string // the watch is not open
	}{
		"no failure":                  {want: "[true true true]", runs: 1, calls: 1},
		"not served at first":         {err: notFound, end: 40, want: "[false true true]", runs: 1, calls: 1},
		"not served":                  {err: notFound, want: "[false false false]", why: "not found"},
		"forbidden":                   {err: forbidden, want: "[false false false]", lines: 1, why: "forbidden"},
		"forbidden for seconds":       {err: forbidden, from: 60, end: 68, want: "[true true true]", runs: 1, calls: 1, lines: 1},
		"forbidden for long":          {err: forbidden, from: 60, end: 100, want: "[true false true]", runs: 2, calls: 2, lines: 2},
		"removed":                     {err: notFound, from: 60, want: "[true false false]", runs: 1, calls: 1, why: "not found"},
		"removed and installed again": {err: notFound, from: 60, end: 100, want: "[true false true]", runs: 2, calls: 2},
		"list without watch":          {err: forbidden, list: true, want: "[true true true]", runs: 1, calls: 1, lines: 1},
		"broken for long":             {err: broken, from: 60, want: "[true true true]", runs: 1, calls: 1, lines: 4},
		"broken after the probe":      {err: broken, first: 1, want: "[false false false]", lines: 5, why: "watching the nodes: failed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				var requests atomic.Int32
				server := apiserver.New(apiserver.Hooks{Before: func(_ context.Context, r apiserver.Request) error {
					at := int(time.Since(began).Seconds())
					if requests.Add(1) <= tt.first || at < tt.from || tt.end > 0 && at >= tt.end || tt.list && r.Verb == "list" {
						return nil
					}
					return tt.err
				}})
				if err := server.Create(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}); err != nil {
					t.Fatal(err)
				}
				client, err := metadata.NewForConfig(server.Config("test"))
				if err != nil {
					t.Fatal(err)
				}
				var calls, lines, runs atomic.Int32
				log := funcr.New(func(_, line string) {
					t.Log(time.Since(began), line)
					if strings.Contains(line, `"List `) {
						lines.Add(1)
					}
				}, funcr.Options{})
				o := NewOptionalMetadata(client, nodes, Handlers[*metav1.PartialObjectMetadata]{
					Add: func(*metav1.PartialObjectMetadata) { calls.Add(1) },
				})
				ctx, stop := context.WithCancelCause(klog.NewContext(t.Context(), log))
				var wg sync.WaitGroup
				wg.Go(func() { o.Run(ctx) })
				wg.Go(func() {
					for ctx.Err() == nil {
						o.Wait(ctx)
						err := o.Do(ctx, func(ctx context.Context, nodes *Informer[*metav1.PartialObjectMetadata]) error {
							runs.Add(1)
							if len(nodes.List()) != 1 {
								t.Error("the work begins before the first list is complete")
							}
							<-ctx.Done()
							return context.Cause(ctx)
						})
						if err != context.Cause(ctx) {
							t.Errorf("Do returned %v", err)
						}
					}
				})
				var got []bool
				for _, at := range []time.Duration{30 * time.Second, 60 * time.Second, 90 * time.Second, 5 * time.Minute} {
					time.Sleep(at - time.Since(began))
					if at == 60*time.Second {
						server.CloseWatches(func(apiserver.Request) bool { return true }, errors.New("closed"))
						continue
					}
					informers, _, _ := o.Get()
					got = append(got, informers != nil)
				}
				_, _, why := o.Get()
				if fmt.Sprint(got) != tt.want || why != nil != (tt.why != "") || why != nil && !strings.Contains(why.Error(), tt.why) {
					t.Errorf("open: %v, want %s; reason %v", got, tt.want, why)
				}
				if int(runs.Load()) != tt.runs || int(calls.Load()) != tt.calls {
					t.Errorf("%d runs, %d calls", runs.Load(), calls.Load())
				}
				if n := int(lines.Load()); n > tt.lines || n == 0 && tt.lines > 0 {
					t.Errorf("%d lines", n)
				}
				stop(errors.New("shutting down"))
				wg.Wait()
			})
		})
	}
}
