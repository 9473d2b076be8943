package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// drainLimit bounds the wait for requests that are being answered at the end.
const drainLimit = 20 * time.Second

// Server answers admission requests. It needs no Lease.
type Server struct {
	cfg       Config
	deps      Deps
	metrics   *metrics
	mutations map[string]mutation // by path
	listener  net.Listener
	served    atomic.Bool // the listener was used
	keeper    *keeper
	pace      pace
	state     atomic.Int32 // of stateNew, stateServing and stateStopping
	// changed wakes the leader when the Secret of its certificate has changed.
	changed chan struct{}
}

const (
	stateNew int32 = iota
	stateServing
	stateStopping
)

// pace is how often is looked for what nobody tells of.
type pace struct {
	files   time.Duration // files of the certificate
	missing time.Duration // the same, while there is none
	upkeep  time.Duration // the configuration that names the authority, and the age of certificates
	// settle is the time from when the configuration names a new authority until API
	// servers can be expected to go by it.
	settle time.Duration
}

// New checks cfg and listens, so that an address that is in use is found at the start.
// Nothing is answered before [Server.Serve], which closes the listener in the end.
func New(cfg Config, deps Deps) (*Server, error) {
	cfg = cfg.complete()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("--webhook-addr: listening at %q: %w", cfg.Address, err)
	}
	s := &Server{
		cfg: cfg, deps: deps, listener: listener, changed: make(chan struct{}, 1),
		pace: pace{files: 10 * time.Second, missing: time.Second, upkeep: 10 * time.Second, settle: 5 * time.Second},
	}
	s.keeper = &keeper{now: time.Now}
	s.metrics = newMetrics(deps.Registry, s.keeper.left)
	s.keeper.reloads = s.metrics.reloads
	// Both are always served: while a program and its configuration are exchanged one
	// after the other, a path that is gone would keep every object from being made.
	s.mutations = map[string]mutation{
		"/pod/mutate": {"pods", s.mutatePod},
		"/pvc/mutate": {"persistentvolumeclaims", s.mutateClaim},
	}
	return s, nil
}

// Address is where the server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Ready is nil when requests are answered: the watches have seen all claims and classes
// and a certificate that is valid now is served.
func (s *Server) Ready() error {
	switch state := s.state.Load(); {
	case state == stateNew:
		return errors.New("the webhook server has not started yet")
	case state == stateStopping:
		return errors.New("the webhook server is stopping")
	}
	if err := s.synced(); err != nil {
		return err
	}
	return s.keeper.ready()
}

// synced is nil when the caches can be relied on for what is not there.
func (s *Server) synced() error {
	var missing []string
	if !s.deps.Claims.Synced() {
		missing = append(missing, "persistentvolumeclaims")
	}
	if !s.deps.Classes.Synced() {
		missing = append(missing, "storageclasses")
	}
	if missing != nil {
		return fmt.Errorf("waiting for the first list of %s", strings.Join(missing, ", "))
	}
	return nil
}

// Serve answers requests from now on. When ctx ends the server is not ready any more,
// goes on for the delay that is set, lets running requests end and returns.
func (s *Server) Serve(ctx context.Context) error {
	log := klog.FromContext(ctx).WithName("webhook")
	ctx = klog.NewContext(ctx, log)
	listener := s.listener
	if s.served.Swap(true) { // the listener of New was closed when serving failed
		var err error
		if listener, err = net.Listen("tcp", s.Address()); err != nil {
			return fmt.Errorf("listening at %s again: %w", s.Address(), err)
		}
	}
	server := s.httpServer(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	work, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { s.followCertificate(work) })
	wg.Go(func() { s.warnOfExpiry(work) })
	drained := make(chan struct{})
	wg.Go(func() {
		defer close(drained)
		<-work.Done()
		s.state.Store(stateStopping)
		if ctx.Err() != nil { // and not because serving has failed
			s.drain(ctx, server)
		}
	})
	s.state.Store(stateServing)
	log.Info("Serving admission webhooks", "address", s.Address(), "certificates", s.cfg.CertMode)
	if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving admission webhooks at %s: %w", s.Address(), err)
	}
	<-drained
	return nil
}

// drain ends server: the API server goes on asking here until it knows better.
func (s *Server) drain(ctx context.Context, server *http.Server) {
	ctx = context.WithoutCancel(ctx) // which has ended
	delay := time.NewTimer(s.cfg.ShutdownDelay)
	defer delay.Stop()
	<-delay.C
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Admission requests were cut off")
		_ = server.Close() // what it reports has been closed anyway
	}
}

func (s *Server) httpServer(ctx context.Context) *http.Server {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(!s.cfg.DisableHTTP2)
	base := context.WithoutCancel(ctx) // requests may end after ctx
	return &http.Server{
		Handler:           s,
		Protocols:         protocols,
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: s.keeper.get},
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       15 * time.Second,
		WriteTimeout:      15 * time.Second,
		IdleTimeout:       90 * time.Second,
		MaxHeaderBytes:    1 << 20,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          log.New(lines{klog.FromContext(ctx).V(1)}, "", 0),
	}
}

// lines passes on what the HTTP server has to say, most of it about clients that went
// away or that trust another certificate.
type lines struct{ logr.Logger }

func (l lines) Write(p []byte) (int, error) {
	l.Info("HTTP server", "message", strings.TrimSpace(string(p)))
	return len(p), nil
}

// followCertificate keeps the newest certificate served until ctx ends.
func (s *Server) followCertificate(ctx context.Context) {
	if s.cfg.CertMode == CertFiles {
		s.followFiles(ctx)
		return
	}
	s.followSecret(ctx)
}

// wait returns after d, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
