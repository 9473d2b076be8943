// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/serving"
)

// Config configures the HTTP endpoints. An empty address disables its endpoint.
type Config struct {
	// Endpoints serve metrics, health and the handlers.
	Endpoints []Endpoint
	// HealthAddress serves health checks only, always in plain HTTP.
	HealthAddress string
	// ProfilingAddress serves profiles only, always in plain HTTP.
	ProfilingAddress string
	// DriverHealthAddress serves /healthz with the result of DriverHealth only, always in plain HTTP.
	DriverHealthAddress string
	// DriverHealth checks the CSI driver.
	DriverHealth Check
	// TLS makes the Endpoints serve HTTPS. Nil: plain HTTP.
	TLS *tls.Config
	// Guard authorizes requests at the Endpoints for everything but health. It requires TLS, because tokens are secret. Nil: every
	// request is authorized.
	Guard *Guard
	// LeaderElection serves /healthz/leader-election.
	LeaderElection bool
	// Handlers returns what serves GET of further paths. Its argument is the path of the metrics at the same address. Optional.
	Handlers func(metricsPath string) map[string]http.Handler
	// Actions serve PUT of paths, which change the process. Without Guard they serve only
	// clients that reach the process through its loopback interface, as kubectl port-forward does.
	Actions map[string]http.Handler
}

// Endpoint is an address with metrics of its own.
type Endpoint struct {
	Address     string // for example ":8080"
	MetricsPath string
	Registry    interface {
		prometheus.Registerer
		prometheus.Gatherer
	}
	Pprof bool // serves profiles under /debug/pprof/
}

// CheckPath returns an error if metrics cannot be served at path.
func CheckPath(metrics string) error {
	switch {
	case !strings.HasPrefix(metrics, "/"):
		return fmt.Errorf("--metrics-path: must begin with a slash, got %q", metrics)
	case strings.ContainsAny(metrics, "{}?# "): // http.ServeMux takes braces as wildcards, and panics on invalid ones
		return fmt.Errorf("--metrics-path: must not contain braces, spaces, ? or #, got %q", metrics)
	case path.Clean(metrics) != cmp.Or(strings.TrimSuffix(metrics, "/"), "/"): // http.ServeMux panics
		return fmt.Errorf("--metrics-path: must not contain //, /./ or /../, got %q", metrics)
	case slices.Contains(reserved, strings.TrimSuffix(metrics, "/")) || strings.HasPrefix(metrics, "/debug/"):
		return fmt.Errorf("--metrics-path: %s is reserved", metrics)
	}
	return nil
}

// reserved lists the paths of other endpoints.
var reserved = []string{"", "/livez", "/readyz", "/healthz", "/healthz/leader-election", "/statusz", "/flagz"}

// Check returns an error if it fails.
type Check func(*http.Request) error

// Warning is returned by a [Check] that passes with a remark, which the verbose output shows.
type Warning string

func (w Warning) Error() string { return string(w) }

// Server serves metrics, health checks and profiles. Checks may be added while it runs.
type Server struct {
	endpoints []endpoint

	mu    sync.Mutex
	live  []namedCheck
	ready []namedCheck
	lead  []namedCheck
}

type namedCheck struct {
	name  string
	check Check
}

// shutdownTimeout bounds the wait for requests in flight at shutdown.
const shutdownTimeout = 5 * time.Second

// NewServer listens on all addresses, so that an address in use fails at startup. Requests are
// answered from [Server.Run] on.
func NewServer(cfg Config) (*Server, error) {
	type content struct {
		name, address string
		handler       *http.ServeMux
		tls           *tls.Config
	}
	s := &Server{}
	var contents []content
	for _, e := range cfg.Endpoints {
		if err := CheckPath(e.MetricsPath); err != nil {
			return nil, err
		}
		contents = append(contents, content{"metrics and health", e.Address, s.main(cfg, e), cfg.TLS})
	}
	for _, e := range append(contents,
		content{"health", cfg.HealthAddress, s.health(), nil},
		content{"profiles", cfg.ProfilingAddress, profiles(http.NewServeMux(), nil), nil},
		content{"the health of the driver", cfg.DriverHealthAddress, driverHealth(cfg.DriverHealth), nil},
	) {
		if e.address == "" {
			continue
		}
		listener, err := net.Listen("tcp", e.address)
		if err != nil {
			for _, open := range s.endpoints {
				open.listener.Close()
			}
			return nil, fmt.Errorf("serving %s at %q: %w", e.name, e.address, err)
		}
		server := serving.New(e.handler)
		server.ReadTimeout, server.WriteTimeout = 10*time.Minute, 10*time.Minute // longer than a profile
		server.ErrorLog = slog.NewLogLogger(logr.ToSlogHandler(klog.Background()), slog.LevelError)
		server.TLSConfig = e.tls.Clone() // http.Server changes it
		s.endpoints = append(s.endpoints, endpoint{e.name, server, listener})
	}
	return s, nil
}

// endpoint is one address of a server.
type endpoint struct {
	content  string
	server   *http.Server
	listener net.Listener
}

// main returns the handler of e.
func (s *Server) main(cfg Config, e Endpoint) *http.ServeMux {
	mux := s.health()
	metrics := promhttp.InstrumentMetricHandler(e.Registry, promhttp.HandlerFor(e.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: 10}))
	mux.Handle("GET "+e.MetricsPath, cfg.Guard.protect(metrics))
	if cfg.Handlers != nil {
		for path, handler := range cfg.Handlers(e.MetricsPath) {
			mux.Handle("GET "+path, cfg.Guard.protect(handler))
		}
	}
	for path, handler := range cfg.Actions {
		if cfg.Guard == nil {
			handler = loopbackOnly(handler)
		}
		mux.Handle("PUT "+path, cfg.Guard.protect(handler))
	}
	if cfg.LeaderElection {
		mux.HandleFunc("GET /healthz/leader-election", s.leaderElection)
	}
	if e.Pprof {
		profiles(mux, cfg.Guard)
	}
	return mux
}

// loopbackOnly passes requests of clients on the same host or in the same pod to next.
func loopbackOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.RemoteAddr)
		if err != nil || !net.ParseIP(host).IsLoopback() {
			http.Error(w, "forbidden from another host. Use kubectl port-forward, or --secure-metrics-server", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// health returns the handler of the checks. It needs no token, because kubelets send none.
func (s *Server) health() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", s.serveChecks(&s.live, http.StatusInternalServerError))
	mux.HandleFunc("GET /healthz", s.serveChecks(&s.live, http.StatusInternalServerError))
	mux.HandleFunc("GET /readyz", s.serveChecks(&s.ready, http.StatusServiceUnavailable))
	mux.HandleFunc("GET /readyz/{check}", s.serveChecks(&s.ready, http.StatusServiceUnavailable))
	return mux
}

// driverHealth returns a handler that answers as livenessprobe does: ok, or status 500 with the error.
func driverHealth(check Check) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := check(r); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, err)
			return
		}
		fmt.Fprint(w, "ok")
	})
	return mux
}

// profiles adds the handlers of net/http/pprof to mux.
func profiles(mux *http.ServeMux, guard *Guard) *http.ServeMux {
	for path, handler := range map[string]http.HandlerFunc{
		"": pprof.Index, "cmdline": pprof.Cmdline, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
	} {
		mux.Handle("/debug/pprof/"+path, guard.protect(handler))
	}
	return mux
}

// Address returns the first address on which the server listens: that of the first of [Config.Endpoints], if any. It panics if no
// address is configured.
func (s *Server) Address() string { return s.endpoints[0].listener.Addr().String() }

// AddLive adds a check to /livez and /healthz. The kubelet restarts a container that fails it.
func (s *Server) AddLive(name string, check Check) { s.add(&s.live, name, check) }

// AddReady adds a check to /readyz.
func (s *Server) AddReady(name string, check Check) { s.add(&s.ready, name, check) }

// AddLeaderElection adds a check to /healthz/leader-election and /livez.
func (s *Server) AddLeaderElection(name string, check Check) {
	s.add(&s.lead, name, check)
	s.add(&s.live, "leader-election-"+name, check)
}

func (s *Server) add(list *[]namedCheck, name string, check Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*list = append(*list, namedCheck{name, check})
}

// CheckResult is the result of one check.
type CheckResult struct {
	Kind string // livez or readyz
	Name string
	Err  error // nil if the check passed
}

// CheckResults runs all checks.
func (s *Server) CheckResults(r *http.Request) []CheckResult {
	s.mu.Lock()
	lists := map[string][]namedCheck{"livez": slices.Clone(s.live), "readyz": slices.Clone(s.ready)}
	s.mu.Unlock()
	var results []CheckResult
	for _, kind := range []string{"livez", "readyz"} {
		for _, c := range lists[kind] {
			results = append(results, CheckResult{kind, c.name, c.check(r)})
		}
	}
	return results
}

// Run serves until ctx ends. It returns nil after requests in flight were answered, or after
// 5 s. If an endpoint fails, Run shuts the others down and returns the error.
func (s *Server) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(s.endpoints))
	var wg sync.WaitGroup
	for i, e := range s.endpoints {
		wg.Go(func() {
			errs[i] = e.run(ctx)
			if errs[i] != nil {
				stop()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (e endpoint) run(ctx context.Context) error {
	shutdown := make(chan struct{}) // closed when Shutdown has returned
	defer context.AfterFunc(ctx, func() {
		defer close(shutdown)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if e.server.Shutdown(ctx) != nil {
			e.server.Close()
		}
	})()
	e.server.BaseContext = func(net.Listener) context.Context { return context.WithoutCancel(ctx) } // carries the logger
	klog.FromContext(ctx).Info("Serving "+e.content, "address", e.listener.Addr().String(), "tls", e.server.TLSConfig != nil)
	var err error
	if e.server.TLSConfig != nil {
		err = e.server.ServeTLS(e.listener, "", "")
	} else {
		err = e.server.Serve(e.listener)
	}
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving %s: %w", e.content, err)
	}
	<-shutdown // Serve returns as soon as Shutdown begins
	return nil
}

// serveChecks runs the checks in list, or the one named in the path, and answers with failedStatus
// if one fails. "?verbose" lists passed checks too, "?exclude=name" skips a check.
func (s *Server) serveChecks(list *[]namedCheck, failedStatus int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		checks := slices.Clone(*list)
		s.mu.Unlock()
		if name := r.PathValue("check"); name != "" {
			checks = slices.DeleteFunc(checks, func(c namedCheck) bool { return c.name != name })
			if len(checks) == 0 {
				http.NotFound(w, r)
				return
			}
		}
		var lines strings.Builder
		failed := false
		for _, c := range checks {
			if slices.Contains(r.URL.Query()["exclude"], c.name) {
				fmt.Fprintf(&lines, "[+]%s excluded: ok\n", c.name)
				continue
			}
			var warning Warning
			switch err := c.check(r); {
			case errors.As(err, &warning):
				fmt.Fprintf(&lines, "[+]%s ok: %v\n", c.name, warning)
			case err != nil:
				failed = true
				fmt.Fprintf(&lines, "[-]%s failed: %v\n", c.name, err)
			default:
				fmt.Fprintf(&lines, "[+]%s ok\n", c.name)
			}
		}
		_, verbose := r.URL.Query()["verbose"]
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		switch {
		case failed:
			w.WriteHeader(failedStatus)
			fmt.Fprint(w, lines.String())
		case verbose:
			fmt.Fprint(w, lines.String(), "ok\n")
		default:
			fmt.Fprint(w, "ok")
		}
	}
}

func (s *Server) leaderElection(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	checks := slices.Clone(s.lead)
	s.mu.Unlock()
	for _, c := range checks {
		if err := c.check(r); err != nil {
			http.Error(w, fmt.Sprintf("internal server error: %s: %v", c.name, err), http.StatusInternalServerError)
			return
		}
	}
	fmt.Fprint(w, "ok")
}
