package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"
)

// Config is what an operator may set.
type Config struct {
	// Address is where to listen, such as ":8080". It is empty for none, as are the others.
	Address string
	// HealthAddress serves health and nothing else, always in plain HTTP.
	HealthAddress string
	// ProfilingAddress serves profiles and nothing else.
	ProfilingAddress string
	// Guard, where it is not nil, has Address speak TLS, and lets only who may see
	// them get metrics and profiles there. Health is for everybody.
	Guard *Guard
	// MetricsPath is the path of the metrics.
	MetricsPath string
	// Pprof serves profiles under /debug/pprof/.
	Pprof bool
	// LeaderElection serves /healthz/leader-election.
	LeaderElection bool
	// Handlers are served at Address besides, by their paths, to whom metrics are.
	Handlers map[string]http.Handler
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	switch {
	case !strings.HasPrefix(c.MetricsPath, "/"):
		return fmt.Errorf("--metrics-path: must begin with a slash, got %q", c.MetricsPath)
	case strings.ContainsAny(c.MetricsPath, "{}?# "): // braces are wildcards to the router, which panics when they are wrong
		return fmt.Errorf("--metrics-path: must be a plain path without braces, blanks, ? and #, got %q", c.MetricsPath)
	case slices.Contains(reserved, strings.TrimSuffix(c.MetricsPath, "/")) || strings.HasPrefix(c.MetricsPath, "/debug/pprof"):
		return fmt.Errorf("--metrics-path: %s is the path of something else", c.MetricsPath)
	}
	return nil
}

// reserved are the paths that have a meaning of their own.
var reserved = []string{"", "/livez", "/readyz", "/healthz", "/healthz/leader-election", "/statusz", "/flagz"}

// Check is nil when what it checks is well.
type Check func(*http.Request) error

// Server serves metrics, health and profiles. Checks may be added while it runs.
type Server struct {
	endpoints []endpoint

	mu    sync.Mutex
	live  []named
	ready []named
	lead  []named
}

type named struct {
	name  string
	check Check
}

// shutdownLimit bounds the wait for requests that are being answered at the end.
const shutdownLimit = 5 * time.Second

// NewServer listens, so that an address that is in use is found at the start.
// It serves in [Server.Run].
func NewServer(cfg Config, reg *prometheus.Registry) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{}
	for _, e := range []struct {
		what, address string
		handler       *http.ServeMux
		guard         *Guard
	}{
		{"metrics and health", cfg.Address, s.everything(cfg, reg), cfg.Guard},
		{"health", cfg.HealthAddress, s.health(), nil},
		{"profiles", cfg.ProfilingAddress, profiles(http.NewServeMux(), nil), nil},
	} {
		if e.address == "" {
			continue
		}
		listener, err := net.Listen("tcp", e.address)
		if err != nil {
			for _, open := range s.endpoints {
				open.listener.Close()
			}
			return nil, fmt.Errorf("serving %s at %q: %w", e.what, e.address, err)
		}
		server := &http.Server{Handler: e.handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
		if e.guard != nil {
			server.TLSConfig = e.guard.tlsConfig()
		}
		s.endpoints = append(s.endpoints, endpoint{e.what, server, listener})
	}
	return s, nil
}

// endpoint is one address at which a server listens.
type endpoint struct {
	what     string
	server   *http.Server
	listener net.Listener
}

// everything is what the main address serves.
func (s *Server) everything(cfg Config, reg *prometheus.Registry) *http.ServeMux {
	mux := s.health()
	metrics := promhttp.InstrumentMetricHandler(reg, promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.Handle("GET "+cfg.MetricsPath, cfg.Guard.protect(metrics))
	for path, handler := range cfg.Handlers {
		mux.Handle("GET "+path, cfg.Guard.protect(handler))
	}
	if cfg.LeaderElection {
		mux.HandleFunc("GET /healthz/leader-election", s.leaderElection)
	}
	if cfg.Pprof {
		profiles(mux, cfg.Guard)
	}
	return mux
}

// health serves the checks, which kubelets ask for without a token.
func (s *Server) health() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", s.answer(&s.live, http.StatusInternalServerError))
	mux.HandleFunc("GET /healthz", s.answer(&s.live, http.StatusInternalServerError))
	mux.HandleFunc("GET /readyz", s.answer(&s.ready, http.StatusServiceUnavailable))
	mux.HandleFunc("GET /readyz/{check}", s.answer(&s.ready, http.StatusServiceUnavailable))
	return mux
}

// profiles adds those of Go to mux.
func profiles(mux *http.ServeMux, guard *Guard) *http.ServeMux {
	for path, handler := range map[string]http.HandlerFunc{
		"": pprof.Index, "cmdline": pprof.Cmdline, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
	} {
		mux.Handle("/debug/pprof/"+path, guard.protect(handler))
	}
	return mux
}

// Address is where the server listens; of several addresses the one that serves most.
func (s *Server) Address() string { return s.endpoints[0].listener.Addr().String() }

// AddLive adds a check of /livez and /healthz: that the process should go on.
func (s *Server) AddLive(name string, check Check) { s.add(&s.live, name, check) }

// AddReady adds a check of /readyz: that the process can do its work.
func (s *Server) AddReady(name string, check Check) { s.add(&s.ready, name, check) }

// AddLeaderElection adds a check of /healthz/leader-election: that a holder of a
// Lease renews it. It is one of /livez too.
func (s *Server) AddLeaderElection(name string, check Check) {
	s.add(&s.lead, name, check)
	s.add(&s.live, "leader-election-"+name, check)
}

func (s *Server) add(list *[]named, name string, check Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*list = append(*list, named{name, check})
}

// CheckResult is what a check has said.
type CheckResult struct {
	Kind, Name string // livez or readyz, and that of the check
	Err        error  // nil: it is well
}

// CheckResults runs all checks.
func (s *Server) CheckResults(r *http.Request) []CheckResult {
	s.mu.Lock()
	lists := map[string][]named{"livez": slices.Clone(s.live), "readyz": slices.Clone(s.ready)}
	s.mu.Unlock()
	var results []CheckResult
	for _, kind := range []string{"livez", "readyz"} {
		for _, c := range lists[kind] {
			results = append(results, CheckResult{kind, c.name, c.check(r)})
		}
	}
	return results
}

// Run serves until ctx ends, which is no error. It returns when all addresses are closed.
func (s *Server) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(s.endpoints))
	var running sync.WaitGroup
	for i, e := range s.endpoints {
		running.Go(func() {
			if errs[i] = e.run(ctx); errs[i] != nil {
				stop()
			}
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

func (e endpoint) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
		defer cancel()
		_ = e.server.Shutdown(ctx) // who is still asking then is cut off
	})()
	e.server.BaseContext = func(net.Listener) context.Context { return context.WithoutCancel(ctx) } // with the logger
	klog.FromContext(ctx).Info("Serving "+e.what, "address", e.listener.Addr().String(), "tls", e.server.TLSConfig != nil)
	var err error
	if e.server.TLSConfig != nil {
		err = e.server.ServeTLS(e.listener, "", "")
	} else {
		err = e.server.Serve(e.listener)
	}
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving %s: %w", e.what, err)
	}
	return nil
}

// answer runs the checks of list, or the one that the path names; when one of them
// fails the status is bad. "?verbose" lists all of them, "?exclude=name" leaves one out.
func (s *Server) answer(list *[]named, bad int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		checks := slices.Clone(*list)
		s.mu.Unlock()
		if name := r.PathValue("check"); name != "" {
			if checks = slices.DeleteFunc(checks, func(c named) bool { return c.name != name }); len(checks) == 0 {
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
			if err := c.check(r); err != nil {
				failed = true
				fmt.Fprintf(&lines, "[-]%s failed: %v\n", c.name, err)
				continue
			}
			fmt.Fprintf(&lines, "[+]%s ok\n", c.name)
		}
		_, verbose := r.URL.Query()["verbose"]
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		switch {
		case failed:
			w.WriteHeader(bad)
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
