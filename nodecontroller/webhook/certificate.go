// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// certificatePoll is the time between two reads of the serving certificate. The kubelet updates a mounted Secret by
// replacing a symbolic link, which a watch of the files misses.
const certificatePoll = 5 * time.Second

// certificate is the serving certificate in a directory, such as a mounted Secret. One goroutine loads it.
type certificate struct {
	dir     string
	reloads *prometheus.CounterVec // by result
	state   atomic.Pointer[certificateState]
}

// certificateState is the outcome of a read.
type certificateState struct {
	pair    *tls.Certificate // the last usable one; nil: there was none yet
	problem error            // why the files are not usable; nil: pair is from them
}

// newCertificate returns the certificate in dir, which [certificate.load] reads.
func newCertificate(dir string, registry prometheus.Registerer) *certificate {
	c := &certificate{dir: dir, reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_webhook_cert_reload_total",
		Help: "Serving certificates that were found, by result: ok, or error for files that cannot be used.",
	}, []string{"result"})}
	for _, result := range []string{"ok", "error"} { // so that both are there from the start
		c.reloads.WithLabelValues(result)
	}
	c.state.Store(&certificateState{problem: errors.New("it was not read yet")})
	registry.MustRegister(c.reloads, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_expiry_seconds",
		Help: "Seconds until the serving certificate expires; negative after that, 0 without one.",
	}, func() float64 {
		if pair := c.state.Load().pair; pair != nil {
			return time.Until(pair.Leaf.NotAfter).Seconds()
		}
		return 0
	}), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "storage_controller_webhook_cert_rejected",
		Help: "1 if the files of the serving certificate cannot be used, else 0.",
	}, func() float64 {
		if c.state.Load().problem != nil {
			return 1
		}
		return 0
	}))
	return c
}

// load reads the files. If they cannot be used, the pair before stays. A result that repeats is logged and counted once.
func (c *certificate) load(ctx context.Context) {
	log, before := klog.FromContext(ctx), c.state.Load()
	pair, err := readPair(c.dir, time.Now())
	switch {
	case err != nil:
		if before.problem == nil || before.problem.Error() != err.Error() {
			c.reloads.WithLabelValues("error").Inc()
			log.Error(err, "Loading the serving certificate failed, the last usable one stays in use")
		}
		pair = before.pair
	case before.problem != nil || !pair.Leaf.Equal(before.pair.Leaf):
		c.reloads.WithLabelValues("ok").Inc()
		log.Info("Serving certificate loaded", "notAfter", pair.Leaf.NotAfter)
	}
	c.state.Store(&certificateState{pair, err})
}

// readPair returns the pair in dir, or an error if clients do not accept it at now.
func readPair(dir string, now time.Time) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, corev1.TLSCertKey), filepath.Join(dir, corev1.TLSPrivateKeyKey))
	if err == nil {
		err = validAt(pair.Leaf, now)
	}
	if err != nil {
		return nil, fmt.Errorf("loading %s and %s from --cert-dir %q: %w", corev1.TLSCertKey, corev1.TLSPrivateKeyKey, dir, err)
	}
	return &pair, nil
}

// validAt returns an error unless leaf is valid at now.
func validAt(leaf *x509.Certificate, now time.Time) error {
	switch {
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is not valid before %s. Check the clocks", leaf.NotBefore.UTC().Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the certificate expired at %s. Renew it", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// ready returns an error unless a valid certificate is loaded.
func (c *certificate) ready() error {
	state := c.state.Load()
	if state.pair == nil {
		return fmt.Errorf("no serving certificate is loaded: %w", state.problem)
	}
	return validAt(state.pair.Leaf, time.Now())
}

// get implements the callback of [tls.Config]. It also returns a certificate that has expired since, which clients with
// a late clock accept.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if pair := c.state.Load().pair; pair != nil {
		return pair, nil
	}
	return nil, errors.New("no serving certificate is loaded")
}
