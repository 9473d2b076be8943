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

// environments are the prefixes of the variables of OpenTelemetry that say how to talk to the
// collector: for everything, and for traces alone.
var environments = []string{"OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"}

// checkEnvironment reports every variable that the exporter would not take, for it goes on
// without the credentials or the authority in it. The values may be secret: the errors name
// the variable and never what it says.
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
		check(prefix+"CERTIFICATE", checkAuthority)
		check(prefix+"CLIENT_CERTIFICATE", func(certificate string) error {
			return checkPair(certificate, strings.TrimSpace(os.Getenv(prefix+"CLIENT_KEY")), prefix+"CLIENT_KEY")
		})
	}
	return errors.Join(errs...)
}

// headerName is what gRPC takes.
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
			err = errors.New("has no =; write NAME=VALUE, and others after a comma")
		case !headerName.MatchString(strings.TrimSpace(name)):
			err = errors.New("has a name with characters that a header must not have; write NAME=VALUE")
		case err != nil:
			err = errors.New("has a value with a % that begins no escape; write %25 for %, and %2C for a comma")
		case strings.ContainsFunc(strings.TrimSpace(decoded), func(r rune) bool { return r < ' ' || r > '~' }):
			err = errors.New("has a value with characters that are not printable ASCII, which no header can have")
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

func checkAuthority(path string) error {
	text, err := read(path)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(text) {
		err = errors.New("the file has no certificate in PEM")
	}
	return err
}

func checkPair(certificate, key, keyVariable string) error {
	if key == "" {
		return fmt.Errorf("needs %s as well", keyVariable)
	}
	public, err := read(certificate)
	if err != nil {
		return err
	}
	private, err := read(key)
	if err != nil {
		return fmt.Errorf("and %s: %w", keyVariable, err)
	}
	if _, err := tls.X509KeyPair(public, private); err != nil { // whose text may be about the key
		return fmt.Errorf("the files of it and of %s are no certificate and key that belong together", keyVariable)
	}
	return nil
}

// read is the content of a file, or an error without its name: somebody may have put the
// content there instead.
func read(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if failed := (*os.PathError)(nil); errors.As(err, &failed) {
		err = failed.Err
	}
	if err != nil {
		return nil, fmt.Errorf("must be the path of a file that can be read: %w", err)
	}
	return text, nil
}

// discreet is a logger for OpenTelemetry, whose own writes what it could not parse, such as
// credentials, in another format. Only its messages, which are constant, are passed on.
func discreet(log logr.Logger) logr.Logger {
	return logr.New(messages{log.WithName("opentelemetry")})
}

type messages struct{ log logr.Logger }

// Init implements [logr.LogSink].
func (messages) Init(logr.RuntimeInfo) {}

// Enabled implements [logr.LogSink].
func (m messages) Enabled(level int) bool { return m.log.V(level).Enabled() }

// Info implements [logr.LogSink].
func (m messages) Info(level int, message string, _ ...any) { m.log.V(level).Info(message) }

// Error implements [logr.LogSink]. The texts of errors have values in them, too.
func (m messages) Error(_ error, message string, _ ...any) {
	m.log.Info("Tracing has a problem, look at the variables OTEL_*", "problem", message)
}

// WithValues implements [logr.LogSink].
func (m messages) WithValues(...any) logr.LogSink { return m }

// WithName implements [logr.LogSink].
func (m messages) WithName(string) logr.LogSink { return m }
