// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/cert"
	"k8s.io/klog/v2"
)

// certificatePoll is the time between two reads of a serving certificate. The kubelet updates a mounted Secret by
// replacing a symbolic link, which a watch of the files misses.
const certificatePoll = 5 * time.Second

// Certificate is a serving certificate in two files, such as those of a mounted Secret. One goroutine loads it.
type Certificate struct {
	// CertFile and KeyFile are in PEM.
	CertFile, KeyFile string
	// Flag named the files. It is in errors.
	Flag string
	// Loaded is called with the outcome of a read that differs from the one before; nil is a usable certificate. Optional.
	Loaded func(error)
	state  atomic.Pointer[certificateState]
}

// certificateState is the outcome of a read.
type certificateState struct {
	pair    *tls.Certificate // the last usable one; nil: there was none yet
	problem error            // why the files are not usable; nil: pair is from them
}

func (c *Certificate) current() certificateState {
	if state := c.state.Load(); state != nil {
		return *state
	}
	return certificateState{problem: errors.New("it was not read yet")}
}

// Run loads the certificate whenever it changes, until ctx ends.
func (c *Certificate) Run(ctx context.Context) { wait.UntilWithContext(ctx, c.Load, certificatePoll) }

// Load reads the files. If they cannot be used, the pair before stays. A result that repeats is logged once.
func (c *Certificate) Load(ctx context.Context) {
	log, before := klog.FromContext(ctx), c.current()
	pair, err := c.read(time.Now())
	isNew := true
	switch {
	case err != nil && before.problem != nil && before.problem.Error() == err.Error():
		pair, isNew = before.pair, false
	case err != nil:
		log.Error(err, "Loading the serving certificate failed. The last usable one stays in use, if there was one", "file", c.CertFile)
		pair = before.pair
	case before.problem != nil || !pair.Leaf.Equal(before.pair.Leaf):
		log.Info("Serving certificate loaded", "file", c.CertFile, "notAfter", pair.Leaf.NotAfter)
	default:
		isNew = false
	}
	c.state.Store(&certificateState{pair, err})
	if isNew && c.Loaded != nil {
		c.Loaded(err)
	}
}

// read returns the pair in the files, or an error if clients do not accept it at now.
func (c *Certificate) read(now time.Time) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err == nil {
		err = validAt(pair.Leaf, now)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: loading %s and %s: %w", c.Flag, c.CertFile, c.KeyFile, err)
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

// Ready returns an error unless a valid certificate is loaded.
func (c *Certificate) Ready() error {
	state := c.current()
	if state.pair == nil {
		return fmt.Errorf("no serving certificate is loaded: %w", state.problem)
	}
	return validAt(state.pair.Leaf, time.Now())
}

// Problem returns why the files cannot be used, nil if they can.
func (c *Certificate) Problem() error { return c.current().problem }

// Expiry returns when the certificate expires, and false without one.
func (c *Certificate) Expiry() (time.Time, bool) {
	if pair := c.current().pair; pair != nil {
		return pair.Leaf.NotAfter, true
	}
	return time.Time{}, false
}

// Get implements the callback of [tls.Config]. It also returns a certificate that has expired since, which clients with
// a late clock accept.
func (c *Certificate) Get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if pair := c.current().pair; pair != nil {
		return pair, nil
	}
	return nil, errors.New("no serving certificate is loaded")
}

// renewBefore is the remaining validity at which a [SelfSigned] certificate is replaced.
const renewBefore = 30 * 24 * time.Hour

// SelfSigned is a certificate of its own authority, which is renewed before it expires. It encrypts tokens in transit;
// clients cannot verify the server.
type SelfSigned struct {
	mu   sync.Mutex
	pair *tls.Certificate
}

// Get implements the callback of [tls.Config].
func (s *SelfSigned) Get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pair == nil || time.Until(s.pair.Leaf.NotAfter) < renewBefore {
		pair, err := generate()
		if err != nil {
			return nil, fmt.Errorf("generating a self-signed certificate: %w", err)
		}
		s.pair = pair
	}
	return s.pair, nil
}

// generate returns a certificate that is valid for one year.
func generate() (*tls.Certificate, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("storage-controller", nil, []string{"localhost"})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certificate, key)
	return &pair, err
}
