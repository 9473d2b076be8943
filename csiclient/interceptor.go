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

// recorder measures calls. The driver's name is one of the labels, so that what
// comes before it is known is kept until it is.
type recorder struct {
	reg prometheus.Registerer

	mu        sync.Mutex
	driver    string
	seconds   *prometheus.HistogramVec // nil until the driver has a name
	withheld  []observation
	migration bool
}

type observation struct {
	method, code string
	migrated     bool
	seconds      float64
}

func newRecorder(reg prometheus.Registerer) *recorder { return &recorder{reg: reg} }

// named is called each time the driver has said its name; the first one counts.
func (r *recorder) named(driver string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seconds != nil {
		return
	}
	r.driver, r.migration = driver, migration.PluginOf(driver) != ""
	labels := []string{"driver_name", "method_name", "grpc_status_code"}
	if r.migration {
		labels = append(labels, "migrated")
	}
	r.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "csi_sidecar_operations_seconds",
		Help:    "[ALPHA] Duration of the calls of the CSI driver, with their gRPC status code.",
		Buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600},
	}, labels)
	r.reg.MustRegister(r.seconds)
	for _, o := range r.withheld {
		r.observe(o)
	}
	r.withheld = nil
}

// observe records o; the caller holds mu.
func (r *recorder) observe(o observation) {
	values := []string{r.driver, o.method, o.code}
	if r.migration {
		values = append(values, strconv.FormatBool(o.migrated))
	}
	r.seconds.WithLabelValues(values...).Observe(o.seconds)
}

func (r *recorder) intercept(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	begin := time.Now()
	err := invoke(ctx, method, request, response, conn, opts...)
	code := "unknown-non-grpc"
	if s, ok := status.FromError(err); ok {
		code = s.Code().String()
	}
	migrated, _ := ctx.Value(migratedKey{}).(bool)
	o := observation{method, code, migrated, time.Since(begin).Seconds()}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.seconds != nil:
		r.observe(o)
	case len(r.withheld) < 1000: // a driver that never says its name
		r.withheld = append(r.withheld, o)
	}
	return err
}

// logger writes calls to the log, without their secrets.
type logger struct{ maxLength int }

func (l logger) intercept(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	log := klog.FromContext(ctx).V(5)
	if !log.Enabled() { // messages are large and redacting them is not cheap
		return invoke(ctx, method, request, response, conn, opts...)
	}
	log.Info("Calling the driver", "method", method, "request", protosanitizer.StripSecrets(request).String())
	err := invoke(ctx, method, request, response, conn, opts...)
	if err != nil {
		log.Info("The driver answered with an error", "method", method, "err", err.Error())
		return err
	}
	text := protosanitizer.StripSecrets(response).String()
	if l.maxLength > 0 && len(text) > l.maxLength {
		text = fmt.Sprintf("%s [response body too large, log capped to %d chars]", text[:l.maxLength], l.maxLength)
	}
	log.Info("The driver answered", "method", method, "response", text)
	return nil
}

// traced makes a span of each call that is part of one, and tells the driver which it is
// (W3C Trace Context, in the metadata of the call).
func traced(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
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
