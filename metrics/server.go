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
	// Address is where to listen, such as ":8080".
	Address string
	// MetricsPath is the path of the metrics.
	MetricsPath string
	// Pprof serves profiles under /debug/pprof/.
	Pprof bool
	// LeaderElection serves /healthz/leader-election.
	LeaderElection bool
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	switch {
	case !strings.HasPrefix(c.MetricsPath, "/"):
		return fmt.Errorf("--metrics-path: must begin with a slash, got %q", c.MetricsPath)
	case slices.Contains(reserved, strings.TrimSuffix(c.MetricsPath, "/")) || strings.HasPrefix(c.MetricsPath, "/debug/pprof"):
		return fmt.Errorf("--metrics-path: %s is the path of something else", c.MetricsPath)
	}
	return nil
}

// reserved are the paths that have a meaning of their own.
var reserved = []string{"", "/livez", "/readyz", "/healthz", "/healthz/leader-election"}

// Check is nil when what it checks is well.
type Check func(*http.Request) error

// Server serves metrics, health and profiles. Checks may be added while it runs.
type Server struct {
	server   *http.Server
	listener net.Listener

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
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("serving metrics and health at %q: %w", cfg.Address, err)
	}
	s := &Server{listener: listener}
	mux := http.NewServeMux()
	mux.Handle("GET "+cfg.MetricsPath, promhttp.InstrumentMetricHandler(reg, promhttp.HandlerFor(reg, promhttp.HandlerOpts{})))
	mux.HandleFunc("GET /livez", s.answer(&s.live))
	mux.HandleFunc("GET /healthz", s.answer(&s.live))
	mux.HandleFunc("GET /readyz", s.answer(&s.ready))
	if cfg.LeaderElection {
		mux.HandleFunc("GET /healthz/leader-election", s.leaderElection)
	}
	if cfg.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	s.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
	return s, nil
}

// Address is where the server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

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

// Run serves until ctx ends, which is no error.
func (s *Server) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
		defer cancel()
		_ = s.server.Shutdown(ctx) // who is still asking then is cut off
	})()
	klog.FromContext(ctx).Info("Serving metrics and health", "address", s.Address())
	if err := s.server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics and health: %w", err)
	}
	return nil
}

// answer runs the checks of list. "?verbose" lists all of them, "?exclude=name"
// leaves one out.
func (s *Server) answer(list *[]named) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		checks := slices.Clone(*list)
		s.mu.Unlock()
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
			w.WriteHeader(http.StatusInternalServerError)
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
