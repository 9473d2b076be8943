// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package tracing exports OpenTelemetry traces. An operation, such as provisioning the volume of a
// PVC, is one trace: the trace ID is derived from the UID of the object, so that all attempts, also
// of other replicas, share it. Each step of the controller is a span, with a child span for each
// CSI call (see package csiclient).
package tracing

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Config configures the export of traces.
type Config struct {
	// Endpoint is the URL of a collector that accepts OTLP over gRPC, such as
	// http://collector:4317. The scheme https enables TLS. Empty disables tracing.
	Endpoint string
	// Ratio is the fraction of operations that is traced, from 0 to 1.
	Ratio float64
	// Service and Version are the attributes service.name and service.version.
	Service, Version string
}

// Validate returns all errors in c.
func (c Config) Validate() error {
	var errs []error
	if c.Endpoint != "" {
		errs = append(errs, checkEndpoint(c.Endpoint), checkEnvironment())
	}
	if c.Ratio < 0 || c.Ratio > 1 || math.IsNaN(c.Ratio) {
		errs = append(errs, fmt.Errorf("--otlp-sampling-ratio: must be between 0 and 1, got %v", c.Ratio))
	}
	return errors.Join(errs...)
}

// checkEndpoint validates the URL. It must not contain credentials, which OTLP over gRPC does not
// send, because logs and /statusz contain it. Errors do not repeat it.
func checkEndpoint(endpoint string) error {
	switch u, err := url.Parse(endpoint); {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return errors.New("--otlp-endpoint: must be a URL such as http://collector:4317")
	case u.User != nil:
		return errors.New("--otlp-endpoint: must not contain a user or password; set OTEL_EXPORTER_OTLP_HEADERS for credentials")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return errors.New("--otlp-endpoint: must not contain a path, query or fragment; " +
			"set OTEL_EXPORTER_OTLP_HEADERS for credentials")
	}
	return nil
}

// scope is the instrumentation scope of the spans.
const scope = "github.com/storage-controller/storage-controller"

// Start exports the spans of the returned context and its children to the collector of c. Call
// stop after the last span to export the remaining ones; its context bounds the time for that.
// Spans are dropped if the collector is unreachable.
func Start(ctx context.Context, c Config) (traced context.Context, stop func(context.Context) error, err error) {
	if c.Endpoint == "" {
		return ctx, func(context.Context) error { return nil }, nil
	}
	log := klog.FromContext(ctx)
	otel.SetLogger(redactedLogger(log))
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(c.Endpoint))
	if err != nil {
		return nil, nil, fmt.Errorf("setting up tracing to %s: %w", c.Endpoint, err)
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Info("Exporting spans failed", "endpoint", c.Endpoint, "err", err)
	}))
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithIDGenerator(generator{}),
		sdktrace.WithSampler(sdktrace.TraceIDRatioBased(c.Ratio)), // by trace ID: all spans of a trace or none
		sdktrace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", c.Service), attribute.String("service.version", c.Version),
		)),
	)
	return context.WithValue(ctx, tracerKey{}, provider.Tracer(scope)), provider.Shutdown, nil
}

type (
	tracerKey    struct{} // context key of a [trace.Tracer]
	operationKey struct{} // context key of an *operation
)

// operation is one trace.
type operation struct {
	name   string
	tracer trace.Tracer
	root   trace.SpanContext
}

// WithOperation returns a context whose spans belong to the trace of the named operation on the
// object with this UID. It returns ctx if tracing is disabled.
func WithOperation(ctx context.Context, name string, object types.UID) context.Context {
	tracer, ok := ctx.Value(tracerKey{}).(trace.Tracer)
	if !ok {
		return ctx
	}
	id := sha256.Sum256([]byte(name + "/" + string(object)))
	root := trace.SpanContextConfig{TraceFlags: trace.FlagsSampled, Remote: true}
	copy(root.TraceID[:], id[:16])
	copy(root.SpanID[:], id[16:])
	return context.WithValue(ctx, operationKey{}, &operation{name, tracer, trace.NewSpanContext(root)})
}

// StartSpan starts a span in the operation of ctx. Call end with the error of the step, or nil.
func StartSpan(ctx context.Context, name string) (spanCtx context.Context, end func(error)) {
	o, ok := ctx.Value(operationKey{}).(*operation)
	if !ok {
		return ctx, func(error) {}
	}
	spanCtx, span := o.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, o.root), name)
	return spanCtx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, fmt.Sprintf("%.1000s", strings.ToValidUTF8(err.Error(), "?")))
		}
		span.End()
	}
}

// EndOperation exports the root span of the operation of ctx, from start to now. attributes are
// alternating keys and values.
func EndOperation(ctx context.Context, start time.Time, attributes ...string) {
	o, ok := ctx.Value(operationKey{}).(*operation)
	if !ok {
		return
	}
	var pairs []attribute.KeyValue
	for pair := range slices.Chunk(attributes, 2) {
		pairs = append(pairs, attribute.String(pair[0], pair[1]))
	}
	_, span := o.tracer.Start(ctx, o.name, trace.WithNewRoot(), trace.WithTimestamp(start), trace.WithAttributes(pairs...))
	span.End()
}

// generator gives the root span of an operation the IDs to which its other spans refer.
type generator struct{}

// NewIDs implements [sdktrace.IDGenerator].
func (g generator) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	if o, ok := ctx.Value(operationKey{}).(*operation); ok {
		return o.root.TraceID(), o.root.SpanID()
	}
	var id trace.TraceID
	rand.Read(id[:])
	return id, g.NewSpanID(ctx, id)
}

// NewSpanID implements [sdktrace.IDGenerator].
func (generator) NewSpanID(context.Context, trace.TraceID) (id trace.SpanID) {
	rand.Read(id[:])
	return id
}
