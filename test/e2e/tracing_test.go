// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// spans is a collector that keeps what it is sent.
type spans struct {
	collector.UnimplementedTraceServiceServer
	mu  sync.Mutex
	all []*tracev1.Span
}

func (s *spans) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, resource := range r.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			s.all = append(s.all, scope.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// collect starts a collector and returns its URL.
func collect(t *testing.T) (*spans, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, server := &spans{}, grpc.NewServer()
	collector.RegisterTraceServiceServer(server, s)
	go func() { _ = server.Serve(listener) }() // it ends with Stop
	t.Cleanup(server.Stop)
	return s, "http://" + listener.Addr().String()
}

// named is the spans of a name so far.
func (s *spans) named(name string) []*tracev1.Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.all), func(span *tracev1.Span) bool { return span.GetName() != name })
}

// TestOneTraceForAVolume provisions a volume at the second attempt, in a second process,
// and finds both attempts, and what the driver was told, in one trace.
func TestOneTraceForAVolume(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	got, url := collect(t)
	var mu sync.Mutex
	var parents []string
	passOn := func(step csitest.Step) csitest.Step {
		return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
			md, _ := metadata.FromIncomingContext(ctx)
			mu.Lock()
			parents = append(parents, md.Get("traceparent")...)
			mu.Unlock()
			return step(ctx, p, request, do)
		}
	}
	e.plugin.Next("CreateVolume", passOn(csitest.Fail(codes.Internal, "not now")))
	e.plugin.Always("CreateVolume", passOn(csitest.Default()))
	class := e.class(false, nil)
	first := e.run("provision", "--otlp-endpoint="+url, "--retry-interval-start=1h", "--retry-interval-max=1h")
	e.claim("c", class)
	e.wait("CreateVolume", 1)
	first.signal(syscall.SIGTERM)
	if code := first.code(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	e.run("provision", "--otlp-endpoint="+url)
	volume := e.bound("c")
	e.eventually("the trace has ended", func(context.Context) error {
		if len(got.named("Provision")) == 0 {
			return errors.New("it has not")
		}
		return nil
	})
	root, calls := got.named("Provision")[0], got.named("csi.v1.Controller/CreateVolume")
	if len(calls) != 2 || calls[0].GetStatus().GetMessage() == "" || calls[1].GetStatus().GetMessage() != "" {
		t.Fatalf("the calls are %v", calls)
	}
	if root.GetParentSpanId() != nil || root.GetEndTimeUnixNano() <= calls[1].GetEndTimeUnixNano() ||
		root.GetStartTimeUnixNano() > calls[0].GetStartTimeUnixNano() {
		t.Errorf("the whole is %v", root)
	}
	if !slices.ContainsFunc(root.GetAttributes(), func(a *commonv1.KeyValue) bool {
		return a.GetKey() == "persistentVolume" && a.GetValue().GetStringValue() == volume
	}) {
		t.Errorf("the whole does not name %q: %v", volume, root.GetAttributes())
	}
	mu.Lock()
	defer mu.Unlock()
	for i, call := range calls {
		if string(call.GetTraceId()) != string(root.GetTraceId()) {
			t.Errorf("call %d is in another trace", i)
		}
		if want := fmt.Sprintf("00-%x-%x-01", call.GetTraceId(), call.GetSpanId()); len(parents) != 2 || parents[i] != want {
			t.Errorf("the driver was told %q, not %q", parents, want)
		}
		steps := got.named("create volume")
		if !slices.ContainsFunc(steps, func(s *tracev1.Span) bool {
			return string(s.GetSpanId()) == string(call.GetParentSpanId()) && string(s.GetParentSpanId()) == string(root.GetSpanId())
		}) {
			t.Errorf("call %d is in no step of the whole: %v", i, steps)
		}
	}
}

// TestTracesOfTheRestOfItsLife attaches, detaches and deletes a volume: each is a trace of its
// own, whose ID is that of the object, with the call of the driver two levels below.
func TestTracesOfTheRestOfItsLife(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	got, url := collect(t)
	e.run("all", "--otlp-endpoint="+url)
	e.claim("c", e.class(false, nil))
	volume := e.bound("c")
	pv, err := e.client.CoreV1().PersistentVolumes().Get(t.Context(), volume, metav1.GetOptions{})
	e.must(err)
	e.attach("a", volume, e.nodes[0])
	e.attached(1)
	vas, err := e.attachments(t.Context())
	e.must(err)
	e.detach("a")
	e.attached(0)
	e.leftovers("c")
	for operation, of := range map[string]struct {
		uid  types.UID
		call string
	}{
		"Attach": {vas[0].UID, "ControllerPublishVolume"}, "Detach": {vas[0].UID, "ControllerUnpublishVolume"},
		"Delete": {pv.UID, "DeleteVolume"},
	} {
		e.eventually("the trace of "+operation+" has ended", func(context.Context) error {
			if len(got.named(operation)) == 0 {
				return errors.New("it has not")
			}
			return nil
		})
		root, id := got.named(operation)[0], sha256.Sum256([]byte(operation+"/"+string(of.uid)))
		if string(root.GetTraceId()) != string(id[:16]) {
			t.Errorf("the trace of %s is %x, want %x", operation, root.GetTraceId(), id[:16])
		}
		if !slices.ContainsFunc(got.named("csi.v1.Controller/"+of.call), func(call *tracev1.Span) bool {
			return string(call.GetTraceId()) == string(id[:16]) && string(call.GetParentSpanId()) != string(root.GetSpanId())
		}) {
			t.Errorf("no call of %s is in a step of %s", of.call, operation)
		}
	}
}

// TestTracingWithoutCollector checks that the process works without a reachable collector.
func TestTracingWithoutCollector(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	p := e.run("all", "--otlp-endpoint=http://127.0.0.1:1")
	e.claim("c", e.class(false, nil))
	e.bound("c")
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
