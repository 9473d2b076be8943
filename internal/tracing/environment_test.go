// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

// TestEnvironment checks that a value that the exporter would ignore is an error that contains the
// variable, but not the value.
func TestEnvironment(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "s3cret")
	if err := os.WriteFile(garbage, []byte("s3cret"), 0o600); err != nil {
		t.Fatal(err)
	}
	const headers, traces = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
	const ca, client = "OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"
	for name, c := range map[string]struct {
		variable, value, want string
	}{
		"nothing":                   {headers, "", ""},
		"one":                       {headers, "authorization=Bearer%20s3cret", ""},
		"two, and a comma":          {headers, " a = b , authorization=Basic s3cret==,", ""},
		"as HTTP has it":            {headers, "authorization: Bearer s3cret", "item 1 has no ="},
		"the second one":            {traces, "a=b,s3cret", "item 2 has no ="},
		"a name that is none":       {headers, "s3 cret=a", "item 1 has a name"},
		"no name":                   {headers, "=s3cret", "item 1 has a name"},
		"a percent sign":            {headers, "a=%zz s3cret", "item 1 has a value with an invalid % escape"},
		"another line":              {headers, "a=s3cret%0Ab", "not printable"},
		"no file":                   {ca, filepath.Join(dir, "s3cret.pem"), "no such file"},
		"no certificate":            {ca, garbage, "PEM certificates"},
		"the certificate itself":    {"OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "-----BEGIN s3cret", "no such file"},
		"a certificate and no key":  {client, garbage, "requires OTEL_EXPORTER_OTLP_CLIENT_KEY"},
		"a time":                    {"OTEL_EXPORTER_OTLP_TIMEOUT", "s3cret", "milliseconds"},
		"a time that is a duration": {"OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(c.variable, c.value)
			if err := (Config{Ratio: 1}).Validate(); err != nil {
				t.Errorf("without tracing: %v", err)
			}
			err := Config{Endpoint: "http://collector:4317", Ratio: 1}.Validate()
			switch {
			case c.want == "" && err == nil:
			case c.want == "" || err == nil || !strings.HasPrefix(err.Error(), c.variable+": ") || !strings.Contains(err.Error(), c.want):
				t.Errorf("%v, want %q of %s", err, c.want, c.variable)
			case strings.Contains(err.Error(), "s3cret"):
				t.Errorf("it shows the value: %v", err)
			}
		})
	}
	t.Run("a pair", func(t *testing.T) {
		t.Setenv(client, garbage)
		t.Setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", garbage)
		if err := checkEnvironment(); err == nil || !strings.Contains(err.Error(), "not a PEM certificate and its key") {
			t.Error(err)
		}
	})
}

// TestLogOfOpenTelemetry checks that OpenTelemetry's log lines are passed on without values.
func TestLogOfOpenTelemetry(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "a=%zz s3cret,authorization: s3cret")
	t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "s3cret")
	var out bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out), textlogger.Verbosity(9))))
	_, stop, err := Start(ctx, Config{Endpoint: "http://127.0.0.1:1", Ratio: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop(context.Background()) })
	for _, text := range []string{"escape header value", "parse headers", "read tls ca cert file"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("it does not say %q: %s", text, &out)
		}
	}
	if strings.Contains(out.String(), "s3cret") || strings.Contains(out.String(), "%zz") {
		t.Errorf("it shows values: %s", &out)
	}
}
