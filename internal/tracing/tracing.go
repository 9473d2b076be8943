// Package tracing tells an OpenTelemetry collector how long what took. An operation, such
// as to provision the volume of a claim, is one trace, however many attempts and
// processes it takes: its ID is made of the UID of the object. Each step is a span in it,
// and each call of the driver a span in a step (see package csiclient).
package tracing

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/url"
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

// Config is what an operator may set.
type Config struct {
	// Endpoint is the URL of a collector that takes OTLP over gRPC, such as
	// http://collector:4317; https means TLS. Empty turns tracing off.
	Endpoint string
	// Ratio is the part of the operations that is traced, from 0 to 1.
	Ratio float64
	// Service and Version are what the collector calls this process.
	Service, Version string
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	if c.Endpoint != "" {
		errs = append(errs, checkEndpoint(c.Endpoint), checkEnvironment())
	}
	if c.Ratio < 0 || c.Ratio > 1 {
		errs = append(errs, fmt.Errorf("--otlp-sampling-ratio: must be between 0 and 1, got %v", c.Ratio))
	}
	return errors.Join(errs...)
}

// checkEndpoint reports what is wrong with the URL. It is shown on pages, and so must have
// nothing that may be secret, which OTLP over gRPC would not send either; and an error does
// not repeat it.
func checkEndpoint(endpoint string) error {
	switch u, err := url.Parse(endpoint); {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return errors.New("--otlp-endpoint: must be a URL such as http://collector:4317")
	case u.User != nil:
		return errors.New("--otlp-endpoint: must have no user and no password; set OTEL_EXPORTER_OTLP_HEADERS for the credentials of the collector")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return errors.New("--otlp-endpoint: must have no path, query or fragment, which OTLP over gRPC does not know, as in http://collector:4317; set OTEL_EXPORTER_OTLP_HEADERS for the credentials of the collector")
	}
	return nil
}

// scope names what makes the spans.
const scope = "github.com/storage-controller/storage-controller"

// Start has the spans of ctx, and of those made of it, sent to the collector of c. stop
// sends what is left; it must be called after the last span, with a context that bounds
// how long it may take. A collector that cannot be reached costs the spans, nothing else.
func Start(ctx context.Context, c Config) (traced context.Context, stop func(context.Context) error, err error) {
	if c.Endpoint == "" {
		return ctx, func(context.Context) error { return nil }, nil
	}
	log := klog.FromContext(ctx)
	otel.SetLogger(discreet(log))
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(c.Endpoint))
	if err != nil {
		return nil, nil, fmt.Errorf("setting up tracing to %s: %w", c.Endpoint, err)
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Info("Spans were not sent", "endpoint", c.Endpoint, "err", err) }))
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithIDGenerator(generator{}),
		sdktrace.WithSampler(sdktrace.TraceIDRatioBased(c.Ratio)), // by the ID, so that all spans of a trace agree
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", c.Service), attribute.String("service.version", c.Version))),
	)
	return context.WithValue(ctx, tracerKey{}, provider.Tracer(scope)), provider.Shutdown, nil
}

type (
	tracerKey    struct{} // of the tracer in a context
	operationKey struct{} // of the operation in it
)

// operation is one trace.
type operation struct {
	name   string
	tracer trace.Tracer
	root   trace.SpanContext
}

// WithOperation makes the steps of ctx those of what is done, under a name, for an object. It
// does nothing where tracing is off.
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

// StartSpan begins a step of the operation of ctx; end is called with its error, nil for none.
func StartSpan(ctx context.Context, name string) (step context.Context, end func(error)) {
	o, ok := ctx.Value(operationKey{}).(*operation)
	if !ok {
		return ctx, func(error) {}
	}
	step, span := o.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, o.root), name)
	return step, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// EndOperation tells that the operation of ctx, begun at a time, has come to its end. facts are
// names and values, by turns.
func EndOperation(ctx context.Context, begun time.Time, facts ...string) {
	o, ok := ctx.Value(operationKey{}).(*operation)
	if !ok {
		return
	}
	var attributes []attribute.KeyValue
	for i := 0; i+1 < len(facts); i += 2 {
		attributes = append(attributes, attribute.String(facts[i], facts[i+1]))
	}
	_, span := o.tracer.Start(ctx, o.name, trace.WithNewRoot(), trace.WithTimestamp(begun), trace.WithAttributes(attributes...))
	span.End()
}

// generator gives the span of a whole operation the IDs that its steps refer to.
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
