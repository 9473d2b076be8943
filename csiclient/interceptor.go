// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/migration"
)

type migratedKey struct{}

// WithMigrated returns a context for calls about a volume of an in-tree plugin, if migrated is
// true. The metrics of drivers that replaced a plugin have this as a label.
func WithMigrated(ctx context.Context, migrated bool) context.Context {
	return context.WithValue(ctx, migratedKey{}, migrated)
}

// recorder measures calls. Calls before GetPluginInfo are buffered, because driver_name is a label.
type recorder struct {
	registry func(method string) prometheus.Registerer

	mu        sync.Mutex
	driver    string
	seconds   map[prometheus.Registerer]*prometheus.HistogramVec // nil until the name is known
	buffered  []observation
	migration bool
}

// maxBuffered bounds the calls to a driver that does not answer GetPluginInfo.
const maxBuffered = 1000

type observation struct {
	method, code string
	migrated     bool
	seconds      float64
}

// hasDriver reports whether setDriver was called.
func (r *recorder) hasDriver() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seconds != nil
}

// setDriver sets the label driver_name. Only the first call has an effect.
func (r *recorder) setDriver(driver string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seconds != nil {
		return
	}
	r.driver, r.migration = driver, migration.PluginOf(driver) != ""
	r.seconds = map[prometheus.Registerer]*prometheus.HistogramVec{}
	for _, o := range r.buffered {
		r.observe(o)
	}
	r.buffered = nil
}

// histogram returns the histogram of a method. It must be called with mu held.
func (r *recorder) histogram(method string) *prometheus.HistogramVec {
	registry := r.registry(method)
	if known := r.seconds[registry]; known != nil {
		return known
	}
	labels := []string{"driver_name", "method_name", "grpc_status_code"}
	if r.migration {
		labels = append(labels, "migrated")
	}
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "csi_sidecar_operations_seconds",
		Help:    "[ALPHA] Duration of CSI calls, by method and gRPC status code.",
		Buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600},
	}, labels)
	registry.MustRegister(seconds)
	r.seconds[registry] = seconds
	return seconds
}

// observe must be called with mu held.
func (r *recorder) observe(o observation) {
	values := []string{r.driver, o.method, o.code}
	if r.migration {
		values = append(values, strconv.FormatBool(o.migrated))
	}
	r.histogram(o.method).WithLabelValues(values...).Observe(o.seconds)
}

func (r *recorder) intercept(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	start := time.Now()
	err := invoke(ctx, method, request, response, conn, opts...)
	code := "unknown-non-grpc"
	if s, ok := status.FromError(err); ok {
		code = s.Code().String()
	}
	migrated, _ := ctx.Value(migratedKey{}).(bool)
	o := observation{method, code, migrated, time.Since(start).Seconds()}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.seconds != nil:
		r.observe(o)
	case len(r.buffered) < maxBuffered:
		r.buffered = append(r.buffered, o)
	}
	return err
}

// logger logs calls without their secrets.
type logger struct{ maxLength int }

func (l logger) intercept(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	log := klog.FromContext(ctx).V(5)
	if !log.Enabled() { // redacting large messages is expensive
		return invoke(ctx, method, request, response, conn, opts...)
	}
	log.Info("CSI call", "method", method, "request", protosanitizer.StripSecrets(request).String())
	err := invoke(ctx, method, request, response, conn, opts...)
	if err != nil {
		log.Info("CSI call failed", "method", method, "err", err.Error())
		return err
	}
	text := protosanitizer.StripSecrets(response).String()
	if l.maxLength > 0 && len(text) > l.maxLength {
		text = fmt.Sprintf("%s [response body too large, log capped to %d chars]", text[:l.maxLength], l.maxLength)
	}
	log.Info("CSI call succeeded", "method", method, "response", text)
	return nil
}

// traced creates a child span for each call, and sends its context to the driver in the metadata
// (W3C Trace Context).
func traced(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	parent := trace.SpanFromContext(ctx)
	if !parent.SpanContext().IsValid() {
		return invoke(ctx, method, request, response, conn, opts...)
	}
	name := strings.TrimPrefix(method, "/")
	ctx, span := parent.TracerProvider().Tracer("csiclient").Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
	defer span.End()
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	for k, v := range carrier {
		ctx = metadata.AppendToOutgoingContext(ctx, k, v)
	}
	err := invoke(ctx, method, request, response, conn, opts...)
	span.SetAttributes(attribute.String("rpc.system", "grpc"), attribute.Int("rpc.grpc.status_code", int(status.Code(err))))
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return err
}
