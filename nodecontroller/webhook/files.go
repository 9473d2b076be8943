package webhook

import (
	"bytes"
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"
)

// The names of a pair in a directory and in a Secret.
const (
	certName = "tls.crt"
	keyName  = "tls.key"
)

// followFiles reads the pair from its directory, again and again. Reading what is there
// sees any way of exchanging it, which the notices of file systems do not: a mounted
// Secret changes by exchanging a symbolic link two levels up.
func (s *Server) followFiles(ctx context.Context) {
	for ctx.Err() == nil {
		pause := s.pace.files
		if !s.loadFiles(ctx) && s.keeper.current.Load() == nil {
			pause = s.pace.missing
		}
		wait(ctx, pause)
	}
}

// loadFiles offers the pair in the directory, and tells whether there is one.
func (s *Server) loadFiles(ctx context.Context) bool {
	cert, key, err := readPair(s.cfg.CertDir)
	if err != nil {
		if s.keeper.missing(err) {
			klog.FromContext(ctx).Info("Waiting for a serving certificate in files", "cause", err.Error())
		}
		return false
	}
	taken, err := s.keeper.offer(cert, key)
	tell(ctx, s.cfg.CertDir, taken, err)
	return true
}

// readPair is the two files as they were at one time: one of before an exchange and one
// of after it are no pair, and nothing is wrong with either.
func readPair(dir string) (cert, key []byte, err error) {
	for range 3 {
		if cert, err = os.ReadFile(filepath.Join(dir, certName)); err != nil {
			return nil, nil, err
		}
		if key, err = os.ReadFile(filepath.Join(dir, keyName)); err != nil {
			return nil, nil, err
		}
		again, err := os.ReadFile(filepath.Join(dir, certName))
		if err == nil && bytes.Equal(cert, again) {
			break
		}
	}
	return cert, key, nil
}
