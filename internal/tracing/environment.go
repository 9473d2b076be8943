// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/go-logr/logr"
)

// environments lists the prefixes of OpenTelemetry's variables for the exporter: for all signals,
// and for traces only.
var environments = []string{"OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"}

// checkEnvironment returns an error for every variable with an invalid value. The exporter would
// ignore it, and connect without the credentials or the CA in it. Errors name the variable only,
// because its value may be secret.
func checkEnvironment() error {
	var errs []error
	check := func(name string, f func(string) error) {
		if value := strings.TrimSpace(os.Getenv(name)); value != "" {
			if err := f(value); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		}
	}
	for _, prefix := range environments {
		check(prefix+"HEADERS", checkHeaders)
		check(prefix+"TIMEOUT", checkTimeout)
		check(prefix+"CERTIFICATE", checkCA)
		check(prefix+"CLIENT_CERTIFICATE", func(certificate string) error {
			return checkKeyPair(certificate, strings.TrimSpace(os.Getenv(prefix+"CLIENT_KEY")), prefix+"CLIENT_KEY")
		})
	}
	return errors.Join(errs...)
}

// headerName matches the header names that gRPC accepts.
var headerName = regexp.MustCompile(`^[0-9A-Za-z_.-]+$`)

func checkHeaders(value string) error {
	for i, item := range strings.Split(value, ",") {
		if strings.TrimSpace(item) == "" {
			continue
		}
		name, text, found := strings.Cut(item, "=")
		decoded, err := url.PathUnescape(text)
		switch {
		case !found:
			err = errors.New("has no =; use NAME=VALUE, separated by commas")
		case !headerName.MatchString(strings.TrimSpace(name)):
			err = errors.New("has a name with invalid characters; use letters, digits, _, . and -")
		case err != nil:
			err = errors.New("has a value with an invalid % escape; use %25 for % and %2C for a comma")
		case strings.ContainsFunc(strings.TrimSpace(decoded), func(r rune) bool { return r < ' ' || r > '~' }):
			err = errors.New("has a value with characters that are not printable ASCII")
		}
		if err != nil {
			return fmt.Errorf("item %d %w", i+1, err)
		}
	}
	return nil
}

func checkTimeout(value string) error {
	if _, err := strconv.Atoi(value); err != nil {
		return errors.New("must be a number of milliseconds")
	}
	return nil
}

func checkCA(path string) error {
	text, err := readFile(path)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(text) {
		err = errors.New("must be the path of a file with PEM certificates")
	}
	return err
}

func checkKeyPair(certificate, key, keyVariable string) error {
	if key == "" {
		return fmt.Errorf("requires %s", keyVariable)
	}
	public, err := readFile(certificate)
	if err != nil {
		return err
	}
	private, err := readFile(key)
	if err != nil {
		return fmt.Errorf("and %s: %w", keyVariable, err)
	}
	if _, err := tls.X509KeyPair(public, private); err != nil { // the text may contain parts of the key
		return fmt.Errorf("the files of this variable and of %s are not a PEM certificate and its key", keyVariable)
	}
	return nil
}

// readFile reads a file. Its errors do not contain the path, because a user may have set the
// variable to the secret instead.
func readFile(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if failed := (*os.PathError)(nil); errors.As(err, &failed) {
		err = failed.Err
	}
	if err != nil {
		return nil, fmt.Errorf("must be the path of a readable file: %w", err)
	}
	return text, nil
}

// redactedLogger returns a logger for OpenTelemetry that drops errors and values, because they
// contain credentials that could not be parsed. The messages are constant.
func redactedLogger(log logr.Logger) logr.Logger {
	return logr.New(messages{log.WithName("opentelemetry")})
}

type messages struct{ log logr.Logger }

// Init implements [logr.LogSink].
func (messages) Init(logr.RuntimeInfo) {}

// Enabled implements [logr.LogSink].
func (m messages) Enabled(level int) bool { return m.log.V(level).Enabled() }

// Info implements [logr.LogSink].
func (m messages) Info(level int, message string, _ ...any) { m.log.V(level).Info(message) }

// Error implements [logr.LogSink].
func (m messages) Error(_ error, message string, _ ...any) {
	m.log.Info("OpenTelemetry reported an error; check the variables OTEL_*", "problem", message)
}

// WithValues implements [logr.LogSink].
func (m messages) WithValues(...any) logr.LogSink { return m }

// WithName implements [logr.LogSink].
func (m messages) WithName(string) logr.LogSink { return m }
