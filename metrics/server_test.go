// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// local returns an endpoint on a free port.
func local() Endpoint {
	return Endpoint{Address: "127.0.0.1:0", MetricsPath: "/metrics", Registry: NewRegistry("v1")}
}

// serve serves cfg. Without an endpoint it gets one.
func serve(t *testing.T, cfg Config, collectors ...prometheus.Collector) (*Server, func(path string) (int, string)) {
	t.Helper()
	if cfg.Endpoints == nil {
		cfg.Endpoints = []Endpoint{local()}
	}
	cfg.Endpoints[0].Registry.MustRegister(collectors...)
	s, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s, func(path string) (int, string) {
		t.Helper()
		response, err := http.Get("http://" + s.Address() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(body)
	}
}

func TestMetricsOfTheProcess(t *testing.T) {
	e := local()
	e.MetricsPath = "/numbers"
	_, get := serve(t, Config{Endpoints: []Endpoint{e}})
	code, body := get("/numbers")
	if code != 200 {
		t.Fatalf("%d: %s", code, body)
	}
	for name, n := range map[string]int{
		"\nprocess_start_time_seconds ": 1, "\ngo_goroutines ": 1,
		`storage_controller_build_info{goversion="go`: 1, "promhttp_metric_handler_requests_total{": 3,
	} {
		if got := strings.Count("\n"+body, name); got != n {
			t.Errorf("%q is there %d times, want %d", name, got, n)
		}
	}
	if problems, err := promlint.New(strings.NewReader(body)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	if code, _ := get("/metrics"); code != 404 {
		t.Errorf("the default path answers %d although another path is configured", code)
	}
}

func TestChecks(t *testing.T) {
	s, get := serve(t, Config{LeaderElection: true})
	var broken error
	s.AddReady("driver", func(*http.Request) error { return broken })
	s.AddReady("watches", func(*http.Request) error { return nil })
	s.AddLeaderElection("provisioner", func(*http.Request) error { return broken })
	want := func(path string, code int, text string) {
		t.Helper()
		if c, body := get(path); c != code || !strings.Contains(body, text) {
			t.Errorf("%s: %d %q, want %d with %q", path, c, body, code, text)
		}
	}
	want("/readyz", 200, "ok")
	want("/readyz?verbose", 200, "[+]driver ok\n[+]watches ok")
	want("/livez", 200, "ok")
	want("/healthz", 200, "ok")
	want("/healthz/leader-election", 200, "ok")
	broken = errors.New("connection lost")
	want("/readyz", 503, "[-]driver failed: connection lost")
	want("/readyz?exclude=driver", 200, "ok")
	want("/readyz/driver", 503, "[-]driver failed: connection lost")
	want("/readyz/watches", 200, "ok")
	want("/readyz/nothing", 404, "")
	want("/livez", 500, "[-]leader-election-provisioner failed: connection lost")
	want("/healthz/leader-election", 500, "internal server error: provisioner: connection lost")
}

// slow is a collector that takes until the channel is closed.
type slow chan struct{}

func (slow) Describe(chan<- *prometheus.Desc) {}

func (c slow) Collect(chan<- prometheus.Metric) { <-c }

// TestConcurrentScrapes: an eleventh scrape is refused, because each takes memory.
func TestConcurrentScrapes(t *testing.T) {
	gate := make(slow)
	_, get := serve(t, Config{}, gate)
	codes := make(chan int)
	for range 11 {
		go func() {
			code, _ := get("/metrics")
			codes <- code
		}()
	}
	answers := 11
	select {
	case code := <-codes:
		if answers--; code != http.StatusServiceUnavailable {
			t.Errorf("the first answer has the status %d", code)
		}
	case <-time.After(time.Minute):
		t.Error("no scrape is refused")
	}
	close(gate)
	for range answers {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("status %d", code)
		}
	}
}

// TestLargeHeaders: clients without a permission cannot make the process hold much.
func TestLargeHeaders(t *testing.T) {
	_, get := serve(t, Config{})
	if code, _ := get("/" + strings.Repeat("a", 128<<10)); code != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("status %d", code)
	}
}

func TestPathsNotServed(t *testing.T) {
	_, get := serve(t, Config{})
	for _, path := range []string{"/", "/healthz/leader-election", "/debug/pprof/", "/debug/pprof/cmdline"} {
		if code, _ := get(path); code != 404 {
			t.Errorf("%s answers %d", path, code)
		}
	}
	e := local()
	e.Pprof = true
	_, get = serve(t, Config{Endpoints: []Endpoint{e}})
	if code, body := get("/debug/pprof/"); code != 200 || !strings.Contains(body, "goroutine") {
		t.Errorf("%d", code)
	}
}

// TestActions: without a guard, only clients on the loopback interface may change the process.
func TestActions(t *testing.T) {
	changed := 0
	cfg := Config{Actions: map[string]http.Handler{
		"/debug/flags/v": http.HandlerFunc(func(http.ResponseWriter, *http.Request) { changed++ }),
	}}
	handler := (&Server{}).main(cfg, local())
	for from, want := range map[string]int{
		"127.0.0.1:99": http.StatusOK, "[::1]:99": http.StatusOK, "10.1.2.3:99": http.StatusForbidden, "pod": http.StatusForbidden,
	} {
		before, answer := changed, httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPut, "/debug/flags/v", nil)
		r.RemoteAddr = from
		if handler.ServeHTTP(answer, r); answer.Code != want || (changed > before) != (want == http.StatusOK) {
			t.Errorf("%s: %d, changed %t", from, answer.Code, changed > before)
		}
	}
	answer := httptest.NewRecorder()
	if handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/debug/flags/v", nil)); answer.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d", answer.Code)
	}
}

func TestConfigErrors(t *testing.T) {
	for _, path := range []string{
		"", "metrics", "/", "/livez", "/healthz/", "/debug/pprof/heap", "/debug/flags/v", "/{", "/{x}", "/a b", "/a?b", "/a#b",
		"//a", "/a//b", "/a/../b", "/a//",
	} {
		if err := CheckPath(path); err == nil || !strings.Contains(err.Error(), "--metrics-path") {
			t.Errorf("%q: %v", path, err)
		}
	}
	s, _ := serve(t, Config{})
	used := local()
	used.Address = s.Address()
	for _, cfg := range []Config{
		{Endpoints: []Endpoint{local()}, HealthAddress: s.Address()}, {Endpoints: []Endpoint{used}}, {Endpoints: []Endpoint{local(), used}},
	} {
		if _, err := NewServer(cfg); err == nil || !strings.Contains(err.Error(), s.Address()) {
			t.Errorf("an address in use: %v", err)
		}
	}
}

func TestShutdownAnswersRequestsInFlight(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	s, err := NewServer(Config{Endpoints: []Endpoint{local()}, Handlers: func(string) map[string]http.Handler {
		return map[string]http.Handler{"/slow": http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			close(started)
			<-release
		})}
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	returned, answered := make(chan error, 1), make(chan error, 1)
	go func() { returned <- s.Run(ctx) }()
	go func() {
		response, err := http.Get("http://" + s.Address() + "/slow")
		if err == nil {
			err = response.Body.Close()
		}
		answered <- err
	}()
	<-started
	stop()
	select {
	case <-returned:
		t.Fatal("Run returned while a request was in flight")
	case <-time.After(100 * time.Millisecond): // Run must keep waiting
	}
	close(release)
	if err := errors.Join(<-answered, <-returned); err != nil {
		t.Error(err)
	}
}
