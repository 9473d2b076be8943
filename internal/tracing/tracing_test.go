// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// TestErrorOfASpan: a collector refuses all spans of a batch if one of them is not valid UTF-8 or too long.
func TestErrorOfASpan(t *testing.T) {
	exporter := tracetest.NewInMemoryExporter()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)).Tracer(scope)
	ctx := WithOperation(context.WithValue(t.Context(), tracerKey{}, tracer), "Attach", "u")
	_, end := StartSpan(ctx, "publish")
	end(errors.New("\xff" + strings.Repeat("x", 1<<20)))
	for _, span := range exporter.GetSpans() {
		if text := span.Status.Description; !utf8.ValidString(text) || len(text) > 2000 || text == "" {
			t.Errorf("%d bytes: %q", len(text), text[:10])
		}
	}
	if n := len(exporter.GetSpans()); n != 1 {
		t.Errorf("%d spans", n)
	}
}
