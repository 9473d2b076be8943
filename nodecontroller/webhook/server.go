// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"k8s.io/client-go/util/cert"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/serving"
)

// drainLimit bounds the wait for running requests at the end.
const drainLimit = 20 * time.Second

// Server serves admission requests. It needs no Lease.
type Server struct {
	cfg       Config
	deps      Deps
	metrics   *metrics
	mutations map[string]mutation // by path
	bodies    *semaphore.Weighted // bytes of the requests that are being served
	reads     *semaphore.Weighted // live reads
	tls       *tls.Config
	listener  net.Listener
	used      atomic.Bool // the listener was used
	serving   atomic.Bool
}

// New returns a Server that listens, so that an address in use is reported at the start. Requests
// are served by [Server.Serve], which also closes the listener.
func New(cfg Config, deps Deps) (*Server, error) {
	if cfg.ClientCA != "" {
		if _, err := cert.NewPool(cfg.ClientCA); err != nil {
			return nil, fmt.Errorf("--webhook-client-ca: %w", err)
		}
	}
	tlsConfig, err := cfg.TLS.Config(cfg.Certificate.Get)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("--webhook-addr: listening at %q: %w", cfg.Address, err)
	}
	s := &Server{
		cfg: cfg, deps: deps, bodies: semaphore.NewWeighted(maxBodies), reads: semaphore.NewWeighted(maxLiveReads),
		listener: listener, metrics: newMetrics(deps.Registry), tls: tlsConfig,
	}
	if cfg.ClientCA != "" {
		tlsConfig.ClientAuth, tlsConfig.VerifyConnection = tls.RequireAnyClientCert, s.verifyClient
	}
	registerCertificate(cfg.Certificate, deps.Registry)
	// Both paths are always served: during an upgrade, an API server may still call a webhook that
	// is switched off, and a missing path would block the creation of objects.
	s.mutations = map[string]mutation{
		"/pod/mutate": {"pods", s.mutatePod},
		"/pvc/mutate": {"persistentvolumeclaims", s.mutateClaim},
	}
	return s, nil
}

// Address returns where the server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Ready returns an error unless the server serves with a valid certificate and its caches are synced.
func (s *Server) Ready() error {
	if !s.serving.Load() {
		return errors.New("the webhook server is starting or stopping")
	}
	return errors.Join(s.cfg.Certificate.Ready(), s.synced())
}

// synced returns an error until a miss of the caches means that an object is not found.
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

// Serve serves requests, and loads the certificate whenever it changes. When ctx ends, the server is not ready, serves for
// the configured delay, finishes running requests and returns. It may be called again.
func (s *Server) Serve(ctx context.Context) (err error) {
	log := klog.FromContext(ctx).WithName("webhook")
	ctx = klog.NewContext(ctx, log)
	loading, stop := context.WithCancel(ctx)
	var loader sync.WaitGroup
	defer func() { stop(); loader.Wait() }()
	loader.Go(func() { s.cfg.Certificate.Run(loading) })
	listener := s.listener
	if s.used.Swap(true) { // the listener of New was closed when serving ended
		if listener, err = net.Listen("tcp", s.Address()); err != nil {
			return fmt.Errorf("listening at %s again: %w", s.Address(), err)
		}
	}
	server, drained := s.httpServer(ctx), make(chan struct{})
	s.serving.Store(true)
	failed := context.AfterFunc(ctx, func() {
		defer close(drained)
		s.serving.Store(false)
		s.drain(ctx, server)
	})
	log.Info("Serving admission webhooks", "address", s.Address())
	if err := server.ServeTLS(listener, "", ""); failed() {
		s.serving.Store(false)
		return fmt.Errorf("serving admission webhooks at %s: %w", s.Address(), err)
	}
	<-drained
	return nil
}

// drain shuts server down after the delay in which API servers may still send requests.
func (s *Server) drain(ctx context.Context, server *http.Server) {
	ctx = context.WithoutCancel(ctx) // which has ended
	time.Sleep(s.cfg.ShutdownDelay)
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	if err := server.Shutdown(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Running admission requests were aborted")
		_ = server.Close() // its listener is closed already
	}
}

func (s *Server) httpServer(ctx context.Context) *http.Server {
	base := context.WithoutCancel(ctx) // requests may end after ctx
	// Mostly about clients that closed the connection or do not trust the certificate.
	errorLog := slog.NewLogLogger(logr.ToSlogHandler(klog.FromContext(ctx)), slog.Level(-1))
	errorLog.SetOutput(handshakeErrors{errorLog.Writer(), s.metrics.untrusted})
	server := serving.New(s)
	server.TLSConfig = s.tls.Clone() // http.Server changes it
	server.ReadTimeout, server.WriteTimeout = 5*time.Second, 15*time.Second
	server.BaseContext = func(net.Listener) context.Context { return base }
	server.ErrorLog = errorLog
	return server
}

// verifyClient returns an error unless an authority of [Config.ClientCA] signed the certificate of the client.
func (s *Server) verifyClient(client tls.ConnectionState) error {
	roots, err := cert.NewPool(s.cfg.ClientCA)
	if err != nil {
		return fmt.Errorf("--webhook-client-ca: %w", err)
	}
	options := x509.VerifyOptions{
		Roots: roots, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, c := range client.PeerCertificates[1:] {
		options.Intermediates.AddCert(c)
	}
	_, err = client.PeerCertificates[0].Verify(options)
	return err
}

// handshakeErrors counts the lines of an error log about clients that do not accept the certificate.
type handshakeErrors struct {
	io.Writer
	rejected prometheus.Counter
}

func (h handshakeErrors) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("remote error: tls:")) && bytes.Contains(line, []byte("certificate")) {
		h.rejected.Inc()
	}
	return h.Writer.Write(line)
}
